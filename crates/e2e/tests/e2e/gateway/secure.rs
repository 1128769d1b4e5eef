//! TLS on the gateway's own listener.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    sync::Arc,
};

use rcgen::{CertificateParams, KeyPair};
use tokio_rustls::rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    crypto::ring,
    pki_types::{CertificateDer, ServerName},
};

use super::world::{backend, outlast};
use crate::mcp::client::{Client, PATIENCE, Place, Setup, until};

/// A certificate that signs itself, written to `cert.pem` and `key.pem`.
fn certificate(dir: &Path) -> CertificateDer<'static> {
    let key = KeyPair::generate().expect("a key");
    let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    let own = CertificateParams::new(names).and_then(|own| own.self_signed(&key)).expect("a certificate");
    // First the key: whoever reads in between finds two that do not belong together, and keeps what it has.
    fs::write(dir.join("key.pem"), key.serialize_pem()).expect("a file");
    fs::write(dir.join("cert.pem"), own.pem()).expect("a file");
    own.der().clone()
}

/// What `/health` says to a client that trusts only this certificate.
fn health(address: &str, trusted: &CertificateDer<'static>) -> Result<String, std::io::Error> {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.clone()).expect("a certificate");
    let config = ClientConfig::builder_with_provider(ring::default_provider().into())
        .with_safe_default_protocol_versions()
        .expect("its own versions fit")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").expect("a name");
    let connection = ClientConnection::new(Arc::new(config), name).expect("a client");
    let tcp = TcpStream::connect(address)?;
    tcp.set_read_timeout(Some(PATIENCE))?;
    let mut stream = StreamOwned::new(connection, tcp);
    write!(stream, "GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
    let mut text = String::new();
    match stream.read_to_string(&mut text) {
        Err(error) if text.is_empty() => Err(error),
        _ => Ok(text),
    }
}

fn start(place: &Place) -> (Client, String) {
    let config = "[gateway]\nlisten = \"localhost:0\"\ntls = { cert = \"cert.pem\", key = \"key.pem\" }\n\n";
    place.write("outlast.toml", &[config, &backend("one", &[], "")].concat());
    let client = Setup::gateway(place).options(["--name", "gateway"]).hasty().start();
    let line = client.says("listening on https://");
    let address = line.split("https://").nth(1).and_then(|rest| rest.split('/').next()).expect("an address");
    (client, address.to_owned())
}

#[test]
fn the_listener_speaks_tls_and_takes_a_new_certificate_while_it_runs() {
    let place = Place::new();
    let first = certificate(place.path());
    let (client, address) = start(&place);
    client.says(&format!("status page: https://{address}/"));
    let answer = health(&address, &first).expect("TLS");
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"ok\""), "{answer}");

    // Plain HTTP is told what to do instead.
    let mut plain = TcpStream::connect(&address).expect("it listens");
    plain.set_read_timeout(Some(PATIENCE)).expect("a socket");
    plain.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").expect("it reads");
    let mut text = String::new();
    let _ = plain.read_to_string(&mut text);
    assert!(text.starts_with("HTTP/1.1 400") && text.ends_with("https:// instead of http://"), "{text}");

    let second = certificate(place.path());
    until("the new certificate", || health(&address, &second).ok());
    assert!(health(&address, &first).is_err(), "the old one is no longer shown");

    // What cannot be used is reported, and the one before stays in use.
    let failed = place.audit_of("reload_failed").len();
    fs::write(place.path().join("cert.pem"), "no certificate").expect("a file");
    let record = place.recorded("reload_failed", failed + 1);
    assert!(record["detail"].as_str().is_some_and(|detail| detail.contains("cert.pem")), "{record}");
    assert!(health(&address, &second).is_ok());
    let third = certificate(place.path());
    until("the third certificate", || health(&address, &third).ok());
}

#[test]
fn a_certificate_that_cannot_be_used_is_said_at_the_start() {
    let place = Place::new();
    certificate(place.path());
    let other = KeyPair::generate().expect("a key");
    let config = "[gateway]\nlisten = \"localhost:0\"\ntls = { cert = \"cert.pem\", key = \"key.pem\" }\n\n";
    let refused = |place: &Place, config: &str| {
        place.write("outlast.toml", &[config, &backend("one", &[], "")].concat());
        let output = outlast(place, &["gateway"]);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    fs::write(place.path().join("key.pem"), other.serialize_pem()).expect("a file");
    let words = refused(&place, config);
    assert!(words.contains("gateway.tls") && words.contains("cannot be used together"), "{words}");
    fs::remove_file(place.path().join("key.pem")).expect("it is there");
    let words = refused(&place, config);
    assert!(words.contains("key.pem") && words.contains("cannot be read"), "{words}");
    let words = refused(&place, "[gateway]\ntls = { cert = \"cert.pem\" }\n\n");
    assert!(words.contains("both `cert` and `key`"), "{words}");
}
