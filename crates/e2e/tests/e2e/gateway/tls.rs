//! Remote backends: behind TLS, with a certificate authority that only this test knows, or behind a proxy.

use std::{
    fs,
    io::{BufRead, BufReader, Write, copy},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use serde_json::json;
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        ServerConfig,
        crypto::ring,
        pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
    },
};

use super::world::{Gate, backend};
use crate::mcp::client::{Place, until};

/// TLS on its own port, forwarded in plain text to the server. Returns the root certificate as PEM.
fn front(server: String) -> (u16, String) {
    let key = || KeyPair::generate().expect("a key");
    let mut root = CertificateParams::new(vec![]).expect("no names are wrong");
    root.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let root_key = key();
    let root_certificate = root.self_signed(&root_key).expect("a root");
    let issuer = Issuer::new(root, root_key);
    let own_key = key();
    let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    let own = CertificateParams::new(names).and_then(|own| own.signed_by(&own_key, &issuer)).expect("a certificate");
    let private = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(own_key.serialize_der()));
    let config = ServerConfig::builder_with_provider(ring::default_provider().into())
        .with_safe_default_protocol_versions()
        .expect("its own versions fit")
        .with_no_client_auth()
        .with_single_cert(vec![own.der().clone()], private)
        .expect("they belong together");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("a socket");
    let port = listener.local_addr().expect("bound").port();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).expect("a socket");
            let acceptor = TlsAcceptor::from(Arc::new(config));
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, server) = (acceptor.clone(), server.clone());
                tokio::spawn(async move {
                    // A client that does not trust the certificate disconnects here.
                    let Ok(mut stream) = acceptor.accept(stream).await else { return };
                    if let Ok(mut plain) = tokio::net::TcpStream::connect(server).await {
                        let _ = tokio::io::copy_bidirectional(&mut stream, &mut plain).await;
                    }
                });
            }
        });
    });
    (port, root_certificate.pem())
}

#[test]
fn a_private_root_certificate_is_trusted_if_configured() {
    let inner = Gate::listen(Place::new(), &backend("one", &[], ""));
    inner.child("one");
    let (port, root) = front(inner.address.clone());
    let config = format!("[[backend]]\nname = \"far\"\nurl = \"https://localhost:{port}/mcp\"\n");

    for variable in ["SSL_CERT_FILE", "SSL_CERT_DIR"] {
        let place = Place::new();
        fs::create_dir(place.join("roots")).expect("ours");
        place.write("roots/own.pem", &root);
        place.write("roots/README", "not a certificate\n");
        let named = place.join(if variable == "SSL_CERT_FILE" { "roots/own.pem" } else { "roots" });
        let gate = Gate::listen_with(place, &config, |setup| setup.env(variable, &named));
        gate.is("far", "ready");
        assert_eq!(gate.session().call("far__one__echo", json!({"text": variable})), variable);
        gate.end();
    }

    // Files on which a reader would block or never end are not read.
    let place = Place::new();
    let fifo = place.join("fifo");
    nix::unistd::mkfifo(fifo.as_str(), nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
    for (variable, named, words) in [
        ("SSL_CERT_FILE", fifo.as_str(), "it is a FIFO, not a file"),
        ("SSL_CERT_FILE", "/dev/zero", "it is a device, not a file"),
        ("SSL_CERT_DIR", &place.join(""), "SSL_CERT_FILE can name"),
    ] {
        let gate = Gate::listen_with(Place::new(), &config, |setup| setup.env(variable, named));
        let why = until("the first try to fail", || gate.backend("far")["last_exit"].as_str().map(str::to_owned));
        assert!(why.contains(words), "{variable}={named}: {why}");
        gate.end();
    }

    // The authority is not configured, or its file does not exist: the error says what to do.
    let missing = "/nowhere/at/all.pem";
    for (named, words) in [(None, "SSL_CERT_FILE can name"), (Some(missing), "SSL_CERT_FILE names /nowhere/at/all.pem")]
    {
        let gate = Gate::listen_with(Place::new(), &config, |setup| match named {
            Some(named) => setup.env("SSL_CERT_FILE", named),
            None => setup,
        });
        let why = until("the first try to fail", || gate.backend("far")["last_exit"].as_str().map(str::to_owned));
        assert!(why.contains(&format!("https://localhost:{port}")) && why.contains(words), "{why}");
        gate.end();
    }
    inner.end();
}

/// A proxy whose tunnels all lead to one place. Returns the lines of its requests.
fn proxy(server: String) -> (u16, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("bound").port();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let heard = asked.clone();
    let lead = |mut from: Box<dyn std::io::Read + Send>, to: TcpStream| {
        thread::spawn(move || {
            let mut to = to;
            let _ = copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Write);
        });
    };
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let mut reader = BufReader::new(client.try_clone().expect("a socket"));
            let mut line = String::new();
            while reader.read_line(&mut line).is_ok_and(|read| read > 2) {
                heard.lock().expect("no thread panics while it holds this").push(line.trim_end().to_owned());
                line.clear();
            }
            let Ok(plain) = TcpStream::connect(&server) else { continue };
            let mut back = client;
            if back.write_all(b"HTTP/1.1 200 here you are\r\n\r\n").is_ok() {
                lead(Box::new(reader), plain.try_clone().expect("a socket"));
                lead(Box::new(plain), back);
            }
        }
    });
    (port, asked)
}

#[test]
fn a_remote_backend_is_reached_through_the_proxy_of_the_environment() {
    let inner = ["[gateway]\nhosts = [\"far.example\"]\n\n".to_owned(), backend("one", &[], "")].concat();
    let inner = Gate::listen(Place::new(), &inner);
    inner.child("one");
    let (port, asked) = proxy(inner.address.clone());
    let near = format!("[[backend]]\nname = \"near\"\nurl = \"http://{}/mcp\"\n", inner.address);
    let config = format!("[[backend]]\nname = \"far\"\nurl = \"http://far.example/mcp\"\n\n{near}");
    let by = format!("http://me:secret@127.0.0.1:{port}");
    let gate = Gate::listen_with(Place::new(), &config, |setup| setup.env("HTTP_PROXY", &by).env("NO_PROXY", ""));
    gate.is("far", "ready");
    gate.is("near", "ready");
    let mut session = gate.session();
    assert_eq!(session.call("far__one__echo", json!({"text": "through"})), "through");
    assert_eq!(session.call("near__one__echo", json!({"text": "directly"})), "directly");
    gate.end();
    let asked = asked.lock().expect("no thread panics while it holds this").clone();
    assert!(asked.iter().any(|line| line.starts_with("CONNECT far.example:80 ")), "{asked:?}");
    assert!(asked.iter().any(|line| line.eq_ignore_ascii_case("proxy-authorization: basic bwu6c2vjcmv0")), "{asked:?}");
    assert!(!asked.iter().any(|line| line.starts_with("CONNECT 127.0.0.1")), "this machine is near: {asked:?}");

    // An unsupported proxy scheme is reported, without its password.
    let gate = Gate::listen_with(Place::new(), &config, |setup| {
        setup.env("HTTP_PROXY", "socks5://me:secret@127.0.0.1:1").env("NO_PROXY", "")
    });
    let why = until("the first try to fail", || gate.backend("far")["last_exit"].as_str().map(str::to_owned));
    assert!(why.contains("socks5") && !why.contains("secret"), "{why}");
    gate.end();
    inner.end();
}
