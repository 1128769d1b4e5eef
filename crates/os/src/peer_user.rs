//! The local user at the other end of a TCP connection within this machine. Linux lists every socket with the user
//! that created it; on other systems the user is unknown.

use std::net::SocketAddr;

use super::PeerUser;

/// `ours` and `peers` are the two addresses of the connection, as this end sees them.
#[cfg(target_os = "linux")]
pub fn peer_user(ours: SocketAddr, peers: SocketAddr) -> PeerUser {
    let own = nix::unistd::geteuid().as_raw();
    // A dual-stack socket is listed in the IPv6 table, also for an IPv4 connection.
    let tables =
        ["/proc/self/net/tcp", "/proc/self/net/tcp6"].into_iter().filter_map(|path| std::fs::read_to_string(path).ok());
    match tables.flat_map(|table| owner(&table, peers, ours)).next() {
        // The administrator can read everything anyway.
        Some(user) if user == own || user == 0 => PeerUser::Same,
        Some(_) => PeerUser::Other,
        None => PeerUser::Unknown,
    }
}

#[cfg(not(target_os = "linux"))]
pub fn peer_user(_ours: SocketAddr, _peers: SocketAddr) -> PeerUser {
    PeerUser::Unknown
}

/// The user of the socket with these two addresses, from a socket table of the kernel.
#[cfg(any(target_os = "linux", test))]
fn owner(table: &str, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
    table.lines().skip(1).find_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let is_it = address(fields.next()?)? == plain(local) && address(fields.next()?)? == plain(remote);
        // State, queues, timer and retransmissions come before the user.
        if is_it { fields.nth(4)?.parse().ok() } else { None }
    })
}

#[cfg(any(target_os = "linux", test))]
fn plain(address: SocketAddr) -> (std::net::IpAddr, u16) {
    (address.ip().to_canonical(), address.port())
}

/// Parses `0100007F:1CA4`: 32-bit words in the byte order of this machine, then the port.
#[cfg(any(target_os = "linux", test))]
fn address(text: &str) -> Option<(std::net::IpAddr, u16)> {
    let (host, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| Some(u32::from_str_radix(host.get(at..at + 8)?, 16).ok()?.to_ne_bytes());
    let ip: std::net::IpAddr = match host.len() {
        8 => word(0)?.into(),
        32 => {
            let mut bytes = [0; 16];
            for (index, part) in bytes.chunks_exact_mut(4).enumerate() {
                part.copy_from_slice(&word(index * 8)?);
            }
            bytes.into()
        }
        _ => return None,
    };
    Some((ip.to_canonical(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_table_names_the_user_of_a_socket() {
        let heading =
            "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode";
        let line = |local: &str, remote: &str, user: u32| {
            format!("\n   0: {local} {remote} 01 00000000:00000000 00:00000000 00000000 {user:>5}        0 32109 1")
        };
        let hex = |address: &str| {
            let address: SocketAddr = address.parse().unwrap();
            let words: Vec<u8> = match address.ip() {
                std::net::IpAddr::V4(ip) => ip.octets().to_vec(),
                std::net::IpAddr::V6(ip) => ip.octets().to_vec(),
            };
            let words = words.chunks(4).map(|word| format!("{:08X}", u32::from_ne_bytes(word.try_into().unwrap())));
            format!("{}:{:04X}", words.collect::<String>(), address.port())
        };
        let table = [
            heading.to_owned(),
            line(&hex("127.0.0.1:7332"), &hex("127.0.0.1:50000"), 1000),
            line(&hex("127.0.0.1:50000"), &hex("127.0.0.1:7332"), 1001),
            line(&hex("[::ffff:127.0.0.1]:50001"), &hex("[::ffff:127.0.0.1]:7332"), 1002),
            line(&hex("[::1]:50002"), &hex("[::1]:7332"), 1003),
        ]
        .concat();
        let user = |peer: &str, ours: &str| owner(&table, peer.parse().unwrap(), ours.parse().unwrap());
        assert_eq!(user("127.0.0.1:50000", "127.0.0.1:7332"), Some(1001));
        assert_eq!(user("127.0.0.1:50001", "127.0.0.1:7332"), Some(1002));
        assert_eq!(user("[::1]:50002", "[::1]:7332"), Some(1003));
        assert_eq!(user("127.0.0.1:50003", "127.0.0.1:7332"), None);
        assert_eq!(user("127.0.0.1:50000", "127.0.0.1:7333"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_connection_of_this_process_belongs_to_our_user() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, peer) = listener.accept().unwrap();
        assert_eq!(peer_user(server.local_addr().unwrap(), peer), PeerUser::Same);
        drop(client);
        let unconnected: SocketAddr = "127.0.0.1:1".parse().unwrap();
        assert_eq!(peer_user(server.local_addr().unwrap(), unconnected), PeerUser::Unknown);
    }
}
