//! TLS on the listener: a certificate with its private key, and the byte stream of a connection with or without TLS.
//! It does not watch the files; a change of them is a change of the configuration.

use std::{
    fmt, io,
    path::Path,
    pin::Pin,
    task::{Context, Poll},
};

use outlast_os as os;
use sha2::{Digest, Sha256};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};

/// A larger file is neither a certificate nor a key.
const FILE_MAX: u64 = 1 << 20;
/// The first byte of a TLS connection: a handshake record.
const HANDSHAKE: u8 = 0x16;
/// The answer to a client that sends plain HTTP to a port with TLS.
const NOT_TLS: &[u8] = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: text/plain\r\n\
    content-length: 53\r\n\r\nthis port speaks TLS: use https:// instead of http://";

/// A certificate chain and the matching private key.
#[derive(Clone)]
pub struct Certificate {
    acceptor: system::Acceptor,
    /// Of both files.
    digest: [u8; 32],
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Certificate(…)")
    }
}

impl PartialEq for Certificate {
    fn eq(&self, other: &Certificate) -> bool {
        self.digest == other.digest
    }
}

impl Eq for Certificate {}

impl Certificate {
    /// Both files are PEM. The error names the file that is wrong.
    pub fn load(cert: &Path, key: &Path) -> Result<Certificate, String> {
        let (cert_pem, key_pem) = (read(cert)?, read(key)?);
        let acceptor = system::acceptor((cert, &cert_pem), (key, &key_pem))?;
        let digest = Sha256::new().chain_update(&cert_pem).chain_update(b"\0").chain_update(&key_pem).finalize().into();
        Ok(Certificate { acceptor, digest })
    }

    /// Performs the handshake. `None` if the client does not use TLS, or rejects the certificate.
    pub async fn accept(&self, mut tcp: TcpStream) -> Option<Transport> {
        let mut first = [0];
        if tcp.peek(&mut first).await.ok()? == 0 {
            return None;
        }
        if first[0] != HANDSHAKE {
            let _ = tokio::io::AsyncWriteExt::write_all(&mut tcp, NOT_TLS).await;
            return None;
        }
        let stream = self.acceptor.accept(tcp).await.ok()?;
        Some(Transport::Tls(Box::new(stream)))
    }
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    let wrong = |why: &dyn fmt::Display| format!("`{}` cannot be read: {why}", path.display());
    os::read_named(path, FILE_MAX).map_err(|error| wrong(&error))
}

/// The byte stream of one connection.
pub enum Transport {
    Plain(TcpStream),
    Tls(Box<system::TlsStream>),
}

impl Transport {
    pub(super) fn tcp(&self) -> &TcpStream {
        match self {
            Transport::Plain(tcp) => tcp,
            Transport::Tls(stream) => system::tcp(stream),
        }
    }
}

impl AsyncRead for Transport {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Transport::Plain(tcp) => Pin::new(tcp).poll_read(cx, buffer),
            Transport::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Transport {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Transport::Plain(tcp) => Pin::new(tcp).poll_write(cx, bytes),
            Transport::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Transport::Plain(tcp) => Pin::new(tcp).poll_flush(cx),
            Transport::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Transport::Plain(tcp) => Pin::new(tcp).poll_shutdown(cx),
            Transport::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Transport::Plain(tcp) => tcp.is_write_vectored(),
            Transport::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Transport::Plain(tcp) => Pin::new(tcp).poll_write_vectored(cx, pieces),
            Transport::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, pieces),
        }
    }
}

/// The TLS library that is compiled in.
#[cfg(not(any(windows, target_os = "macos")))]
mod system {
    use std::{path::Path, sync::Arc};

    use rustls::{
        ServerConfig,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    };
    use tokio::net::TcpStream;
    use tokio_rustls::TlsAcceptor;

    pub(super) type TlsStream = tokio_rustls::server::TlsStream<TcpStream>;
    pub(super) type Acceptor = TlsAcceptor;

    pub(super) fn tcp(stream: &TlsStream) -> &TcpStream {
        stream.get_ref().0
    }

    pub(super) fn acceptor(cert: (&Path, &[u8]), key: (&Path, &[u8])) -> Result<Acceptor, String> {
        let chain: Result<Vec<CertificateDer<'static>>, _> = CertificateDer::pem_slice_iter(cert.1).collect();
        let chain = chain.map_err(|error| format!("`{}` is not a certificate in PEM: {error}", cert.0.display()))?;
        if chain.is_empty() {
            return Err(format!("`{}` contains no certificate in PEM", cert.0.display()));
        }
        let private = PrivateKeyDer::from_pem_slice(key.1)
            .map_err(|error| format!("`{}` contains no private key in PEM: {error}", key.0.display()))?;
        let mut config = ServerConfig::builder_with_provider(ring::default_provider().into())
            .with_safe_default_protocol_versions()
            .expect("the provider has them")
            .with_no_client_auth()
            .with_single_cert(chain, private)
            .map_err(|error| {
                let (cert, key) = (cert.0.display(), key.0.display());
                format!("the certificate `{cert}` and the key `{key}` cannot be used together: {error}")
            })?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(TlsAcceptor::from(Arc::new(config)))
    }
}

/// The TLS library of the system.
#[cfg(any(windows, target_os = "macos"))]
mod system {
    use std::path::Path;

    use native_tls::{Identity, TlsAcceptor};
    use tokio::net::TcpStream;

    pub type TlsStream = tokio_native_tls::TlsStream<TcpStream>;
    pub type Acceptor = tokio_native_tls::TlsAcceptor;

    pub fn tcp(stream: &TlsStream) -> &TcpStream {
        stream.get_ref().get_ref().get_ref()
    }

    pub fn acceptor(cert: (&Path, &[u8]), key: (&Path, &[u8])) -> Result<Acceptor, String> {
        let identity = Identity::from_pkcs8(cert.1, key.1).and_then(TlsAcceptor::new);
        identity.map(Acceptor::from).map_err(|error| {
            let (cert, key) = (cert.0.display(), key.0.display());
            format!("the certificate `{cert}` and the key `{key}` (PKCS #8) cannot be used together: {error}")
        })
    }
}
