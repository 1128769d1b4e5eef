//! Connections: pooled, over TLS where the address says so, and never waited for without an end.

use std::{
    collections::BTreeMap,
    error::Error,
    fmt,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode, Uri,
    body::Incoming,
    header::{HeaderName, HeaderValue, LOCATION},
};
use hyper_util::{
    client::legacy::{self, Client},
    rt::{TokioExecutor, TokioTimer},
};
use tokio::time::timeout;
use tower_service::Service;

use super::{
    names::{Connector, Names},
    way::Way,
};

/// The usual servers close a connection that was idle for 5 s. One that we believe open while they are closing it would
/// take a request with it.
const IDLE_MAX: Duration = Duration::from_secs(4);
/// A peer that vanished without a word is noticed after three of these.
const KEEPALIVE: Duration = Duration::from_secs(20);
/// Further redirects are an error.
const REDIRECTS_MAX: usize = 5;

/// One for the whole gateway: every link shares its connections.
#[derive(Clone)]
pub struct HttpClient {
    way: Way,
    connect_max: Duration,
    plain: Plain,
    /// Made when the first address asks for it: the roots of trust are a good part of what an idle gateway would hold.
    secure: Arc<OnceLock<(Secure, Vec<String>)>>,
}

type Plain = Client<Timely<Way>, Full<Bytes>>;
type Secure = Client<Timely<tls::Connector>, Full<Bytes>>;

/// The system's own TLS and trust, where the system has them.
#[cfg(any(windows, target_os = "macos"))]
mod tls {
    use super::super::way::Way;

    pub type Connector = hyper_tls::HttpsConnector<Way>;

    pub fn over(connector: Way) -> (Connector, Vec<String>) {
        let mut connector = hyper_tls::HttpsConnector::new_with_connector(connector);
        connector.https_only(true);
        (connector, Vec::new())
    }
}

/// Elsewhere the TLS, and the roots, that are compiled in: nothing needs to be installed.
#[cfg(not(any(windows, target_os = "macos")))]
mod tls {
    use super::super::way::Way;

    pub type Connector = hyper_rustls::HttpsConnector<Way>;

    /// And what is wrong with the roots that somebody named.
    pub fn over(connector: Way) -> (Connector, Vec<String>) {
        let (roots, complaints) = super::super::trust::roots();
        let config = rustls::ClientConfig::builder_with_provider(rustls::crypto::ring::default_provider().into())
            .with_safe_default_protocol_versions()
            .expect("its own versions fit")
            .with_root_certificates(roots)
            .with_no_client_auth();
        let builder = hyper_rustls::HttpsConnectorBuilder::new().with_tls_config(config).https_only().enable_http1();
        (builder.wrap_connector(connector), complaints)
    }
}

impl HttpClient {
    pub fn new(connect_max: Duration) -> HttpClient {
        let mut connector = Connector::new_with_resolver(Names);
        connector.enforce_http(false);
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(connect_max));
        connector.set_keepalive(Some(KEEPALIVE));
        connector.set_keepalive_interval(Some(KEEPALIVE));
        connector.set_keepalive_retries(Some(3));
        let way = Way::new(connector);
        let plain = builder().build(Timely { connector: way.clone(), max: connect_max });
        HttpClient { way, connect_max, plain, secure: Arc::default() }
    }

    fn request(&self, request: Request<Full<Bytes>>) -> legacy::ResponseFuture {
        if request.uri().scheme_str() != Some("https") {
            return self.plain.request(request);
        }
        let (secure, _) = self.secure.get_or_init(|| {
            let (connector, complaints) = tls::over(self.way.clone());
            (builder().build(Timely { connector, max: self.connect_max }), complaints)
        });
        secure.request(request)
    }

    /// Why a certificate may not be trusted, in words that help.
    fn about_trust(&self, why: &str) -> String {
        let complaints = self.secure.get().map_or(&[][..], |(_, complaints)| complaints);
        match why.contains("UnknownIssuer") {
            false => String::new(),
            true if complaints.is_empty() => {
                "; who signed its certificate is not trusted here: SSL_CERT_FILE may name a file with that root".into()
            }
            true => format!("; {}", complaints.join("; ")),
        }
    }
}

impl fmt::Debug for HttpClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpClient").finish_non_exhaustive()
    }
}

/// Connects in time or not at all: whoever takes a connection may still never finish the handshake of TLS, or of a tunnel.
#[derive(Clone)]
struct Timely<C> {
    connector: C,
    max: Duration,
}

type Connecting<T> = Pin<Box<dyn Future<Output = Result<T, Box<dyn Error + Send + Sync>>> + Send>>;

impl<C> Service<Uri> for Timely<C>
where
    C: Service<Uri, Error = Box<dyn Error + Send + Sync>>,
    C::Future: Send + 'static,
{
    type Response = C::Response;
    type Error = Box<dyn Error + Send + Sync>;
    type Future = Connecting<C::Response>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.connector.poll_ready(cx)
    }

    fn call(&mut self, url: Uri) -> Self::Future {
        let (connecting, max) = (self.connector.call(url), self.max);
        Box::pin(async move {
            let late = || format!("no connection within {} s", max.as_secs_f32()).into();
            timeout(max, connecting).await.unwrap_or_else(|_| Err(late()))
        })
    }
}

fn builder() -> legacy::Builder {
    let mut builder = Client::builder(TokioExecutor::new());
    builder.pool_idle_timeout(IDLE_MAX).pool_timer(TokioTimer::new());
    builder
}

/// One server and what it wants to be told with every request. Its headers are secrets and are never shown.
pub(super) struct Target {
    client: HttpClient,
    pub(super) url: Uri,
    headers: HeaderMap,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) struct Failed {
    /// Whether any of the request may have reached the server.
    pub(super) was_sent: bool,
    /// There is no server, or none that we may speak to.
    pub(super) is_unreachable: bool,
    pub(super) why: String,
}

impl Target {
    pub(super) fn new(client: HttpClient, url: &str, headers: &BTreeMap<String, String>) -> Result<Target, String> {
        let url: Uri = url.parse().map_err(|error| format!("its url is none: {error}"))?;
        let authority = url.authority().ok_or("its url names no host")?;
        if !matches!(url.scheme_str(), Some("http" | "https")) {
            return Err("its url begins with neither http:// nor https://".into());
        }
        if authority.as_str().contains('@') {
            return Err("its url holds a user or password, which belong into its headers".into());
        }
        let mut checked = HeaderMap::new();
        for (name, value) in headers {
            let name = HeaderName::try_from(name).map_err(|_| format!("`{name}` cannot be the name of a header"))?;
            // The value may be a secret, so it is not repeated.
            let mut value = HeaderValue::try_from(value).map_err(|_| {
                format!("the value of its header `{name}` cannot be one: it holds a line break or the like")
            })?;
            value.set_sensitive(true);
            checked.insert(name, value);
        }
        Ok(Target { client, url, headers: checked })
    }

    /// Who it is, in words that tell no secret: a query may hold a key.
    pub(super) fn name(&self) -> String {
        origin(&self.url)
    }

    /// One request and the head of its answer. What is said for the protocol wins over what was configured.
    pub(super) async fn ask(
        &self,
        method: &Method,
        url: &Uri,
        headers: &HeaderMap,
        body: &Bytes,
    ) -> Result<Response<Incoming>, Failed> {
        let mut url = url.clone();
        for _ in 0..=REDIRECTS_MAX {
            let mut request = Request::new(Full::new(body.clone()));
            *request.method_mut() = method.clone();
            *request.uri_mut() = url.clone();
            request.headers_mut().extend(self.headers.clone());
            for (name, value) in headers {
                request.headers_mut().insert(name.clone(), value.clone());
            }
            let response = self.client.request(request).await.map_err(|error| self.failed(&error))?;
            match redirect(method, &response) {
                None => return Ok(response),
                Some(location) => url = self.follow(&url, location)?,
            }
        }
        Err(refused(format!("{} redirects more than {REDIRECTS_MAX} times", self.name())))
    }

    /// Our headers may hold credentials, which are meant for one origin.
    fn follow(&self, from: &Uri, location: &str) -> Result<Uri, Failed> {
        let to = resolve(from, location)
            .ok_or_else(|| refused(format!("{} redirects to what is no address", self.name())))?;
        if origin(&to) == origin(from) {
            return Ok(to);
        }
        let (name, to) = (self.name(), origin(&to));
        Err(refused(format!(
            "{name} redirects to {to}, which is another server: if that is the right one, configure it"
        )))
    }

    fn failed(&self, error: &legacy::Error) -> Failed {
        let is_connect = error.is_connect();
        let hyper = error.source().and_then(|source| source.downcast_ref::<hyper::Error>());
        let was_sent = !is_connect && !hyper.is_some_and(hyper::Error::is_canceled);
        let what = if is_connect { "cannot connect to" } else { "lost the connection to" };
        let why = cause(error);
        let trust = self.client.about_trust(&why);
        Failed { was_sent, is_unreachable: is_connect, why: format!("{what} {}: {why}{trust}", self.name()) }
    }
}

fn refused(why: String) -> Failed {
    Failed { was_sent: false, is_unreachable: true, why }
}

/// Where an answer sends us, if the method stays what it was: a POST that becomes a GET says nothing any more.
fn redirect<'a>(method: &Method, response: &'a Response<Incoming>) -> Option<&'a str> {
    let keeps_method = matches!(response.status(), StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT)
        || method == Method::GET && response.status().is_redirection();
    keeps_method.then(|| response.headers().get(LOCATION)?.to_str().ok())?
}

/// A reference against the address it was found at.
pub(super) fn resolve(base: &Uri, reference: &str) -> Option<Uri> {
    let reference = reference.trim();
    if reference.starts_with("http://") || reference.starts_with("https://") {
        return reference.parse().ok();
    }
    let origin = origin(base);
    if reference.starts_with("//") {
        return format!("{}:{reference}", base.scheme_str()?).parse().ok();
    }
    if reference.starts_with('/') {
        return format!("{origin}{reference}").parse().ok();
    }
    if reference.starts_with('?') {
        return format!("{origin}{}{reference}", base.path()).parse().ok();
    }
    let folder = base.path().rsplit_once('/').map_or("", |(folder, _)| folder);
    format!("{origin}{folder}/{reference}").parse().ok()
}

/// Scheme, host and port, all of them said.
pub(super) fn origin(url: &Uri) -> String {
    let scheme = url.scheme_str().unwrap_or("http");
    let host = url.host().unwrap_or_default().to_ascii_lowercase();
    match url.port_u16() {
        Some(port) if !matches!((scheme, port), ("http", 80) | ("https", 443)) => format!("{scheme}://{host}:{port}"),
        _ => format!("{scheme}://{host}"),
    }
}

/// The innermost words: the outer ones only say that something went wrong.
pub(super) fn cause(error: &dyn Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_lead_where_a_browser_would_go() {
        let table = [
            ("http://a:1/x/y", "/mcp/?s=1", "http://a:1/mcp/?s=1"),
            ("http://a:1/x/y", "z", "http://a:1/x/z"),
            ("http://a/x", "?s=2", "http://a/x?s=2"),
            ("https://a/x", "//b/c", "https://b/c"),
            ("https://a/x", "http://b/c", "http://b/c"),
        ];
        for (base, reference, leads_to) in table {
            assert_eq!(resolve(&base.parse().unwrap(), reference), Some(leads_to.parse().unwrap()), "{reference}");
        }
    }

    #[test]
    fn an_origin_says_its_port_once() {
        let table = [
            ("http://A.example:80/x", "http://a.example"),
            ("https://a.example:443", "https://a.example"),
            ("https://a.example:80", "https://a.example:80"),
        ];
        for (url, expected) in table {
            assert_eq!(origin(&url.parse().unwrap()), expected);
        }
    }

    #[test]
    fn what_cannot_be_spoken_to_is_said_without_its_secrets() {
        let client = HttpClient::new(Duration::from_secs(1));
        let no_headers = BTreeMap::new();
        for url in ["", "/mcp", "ftp://a/x", "http://user:secret@a/x"] {
            let why = Target::new(client.clone(), url, &no_headers).err().unwrap();
            assert!(!why.contains("secret"), "{why}");
        }
        let headers = BTreeMap::from([("Authorization".to_owned(), "Bearer secret\n".to_owned())]);
        let why = Target::new(client, "http://a/x", &headers).err().unwrap();
        assert!(why.contains("authorization") && !why.contains("secret"), "{why}");
    }
}
