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
use crate::mcp::client::{Client, OUTLAST, PATIENCE, Place, Setup, until};

/// A self-signed certificate, written to `cert.pem` and `key.pem`.
fn certificate(dir: &Path) -> CertificateDer<'static> {
    let key = KeyPair::generate().expect("a key");
    let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    let own = CertificateParams::new(names).and_then(|own| own.self_signed(&key)).expect("a certificate");
    // First the key: a reload between the two writes finds a key and a certificate that do not match, and keeps the
    // old ones.
    fs::write(dir.join("key.pem"), key.serialize_pem()).expect("a file");
    fs::write(dir.join("cert.pem"), own.pem()).expect("a file");
    own.der().clone()
}

/// A connection of a client that trusts only this certificate.
fn connect(
    address: &str,
    trusted: &CertificateDer<'static>,
) -> Result<StreamOwned<ClientConnection, TcpStream>, std::io::Error> {
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
    Ok(StreamOwned::new(connection, tcp))
}

/// The response of `/health` for such a client.
fn health(address: &str, trusted: &CertificateDer<'static>) -> Result<String, std::io::Error> {
    let mut stream = connect(address, trusted)?;
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
fn the_listener_serves_tls_and_loads_a_new_certificate_while_it_runs() {
    let place = Place::new();
    let first = certificate(place.path());
    let (client, address) = start(&place);
    client.says(&format!("status page: https://{address}/"));
    let answer = health(&address, &first).expect("TLS");
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"ok\""), "{answer}");

    // A plain HTTP request gets an answer that says what to do.
    let mut plain = TcpStream::connect(&address).expect("it listens");
    plain.set_read_timeout(Some(PATIENCE)).expect("a socket");
    plain.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").expect("it reads");
    let mut text = String::new();
    let _ = plain.read_to_string(&mut text);
    assert!(text.starts_with("HTTP/1.1 400") && text.ends_with("https:// instead of http://"), "{text}");

    let second = certificate(place.path());
    until("the new certificate", || health(&address, &second).ok());
    assert!(health(&address, &first).is_err(), "the old one is no longer shown");

    // An unusable certificate is reported, and the previous one stays in use.
    let failed = place.audit_of("reload_failed").len();
    fs::write(place.path().join("cert.pem"), "no certificate").expect("a file");
    let record = place.recorded("reload_failed", failed + 1);
    assert!(record["detail"].as_str().is_some_and(|detail| detail.contains("cert.pem")), "{record}");
    assert!(health(&address, &second).is_ok());
    let third = certificate(place.path());
    until("the third certificate", || health(&address, &third).ok());
}

/// The keys of a connection cannot be handed over, so it closes; the next one is served by the new program.
#[test]
fn an_upgrade_in_place_closes_connections_with_tls() {
    let place = Place::new();
    let trusted = certificate(place.path());
    let (_client, address) = start(&place);
    let mut idle = connect(&address, &trusted).expect("TLS");
    write!(idle, "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").expect("it reads");
    let mut text = vec![0; 1024];
    let read = idle.read(&mut text).expect("an answer");
    assert!(text[..read].starts_with(b"HTTP/1.1 200"));
    let output = outlast(&place, &["upgrade", "--program", OUTLAST]);
    assert!(output.status.success(), "{output:?}");
    let mut rest = Vec::new();
    let _ = idle.read_to_end(&mut rest);
    assert!(!rest.starts_with(b"HTTP"), "the connection ends");
    let answer = health(&address, &trusted).expect("TLS");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[test]
fn a_certificate_that_cannot_be_used_is_an_error_at_the_start() {
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
