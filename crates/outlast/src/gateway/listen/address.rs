//! Parses the address to listen on, as users write it.

use std::net::{Ipv4Addr, SocketAddr};

/// The error text for an invalid address.
pub const FORMS: &str =
    "write an address and a port, such as \"127.0.0.1:7332\", \"[::1]:7332\", \"localhost:7332\" or \"7332\"";

/// An IP address and a port. `localhost:PORT`, `:PORT` and `PORT` mean 127.0.0.1.
pub fn parse(text: &str) -> Option<SocketAddr> {
    if let Ok(address) = text.parse() {
        return Some(address);
    }
    let (host, port) = text.rsplit_once(':').unwrap_or(("", text));
    let is_local = host.is_empty() || host.eq_ignore_ascii_case("localhost");
    // `parse` would accept `+7332`, too.
    let is_port = is_local && !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let port = port.parse().ok().filter(|_| is_port)?;
    Some(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port))
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn common_forms_of_addresses_are_parsed() {
        let table = [
            ("127.0.0.1:7332", Some("127.0.0.1:7332")),
            ("0.0.0.0:80", Some("0.0.0.0:80")),
            ("[::1]:7332", Some("[::1]:7332")),
            ("localhost:7332", Some("127.0.0.1:7332")),
            ("LocalHost:0", Some("127.0.0.1:0")),
            (":7332", Some("127.0.0.1:7332")),
            ("7332", Some("127.0.0.1:7332")),
            ("", None),
            (":", None),
            ("localhost", None),
            ("localhost:", None),
            ("localhost:70000", None),
            ("70000", None),
            ("+7332", None),
            ("-1", None),
            ("example.com:80", None),
            ("::1", None),
            ("127.0.0.1", None),
        ];
        for (text, address) in table {
            assert_eq!(parse(text), address.map(|address| address.parse().expect("an address")), "{text}");
        }
    }
}
