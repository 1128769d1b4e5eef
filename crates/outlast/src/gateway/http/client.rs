//! Pooled connections to HTTP servers, with TLS where the address says so. Every wait has a limit.

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
    proxy::ProxyConnector,
    resolver::{Connector, Resolver},
};

/// Common servers close a connection that was idle for 5 s. A request on a connection that is being closed would be
/// lost.
const IDLE_MAX: Duration = Duration::from_secs(4);
/// A peer that vanished is noticed after three of these.
const KEEPALIVE: Duration = Duration::from_secs(20);
/// More redirects are an error.
const REDIRECTS_MAX: usize = 5;

/// One for the whole gateway: all links share its connections.
#[derive(Clone)]
pub struct HttpClient {
    proxied: ProxyConnector,
    connect_max: Duration,
    plain: Plain,
    /// Created for the first address with TLS: the root certificates are a large part of an idle gateway's memory.
    secure: Arc<OnceLock<(Secure, Vec<String>)>>,
}

type Plain = Client<Timely<ProxyConnector>, Full<Bytes>>;
type Secure = Client<Timely<tls::Connector>, Full<Bytes>>;

/// The system's own TLS and root certificates, where the system has them.
#[cfg(any(windows, target_os = "macos"))]
mod tls {
    use super::super::proxy::ProxyConnector;

    pub type Connector = hyper_tls::HttpsConnector<ProxyConnector>;

    pub fn over(connector: ProxyConnector) -> (Connector, Vec<String>) {
        let mut connector = hyper_tls::HttpsConnector::new_with_connector(connector);
        connector.https_only(true);
        (connector, Vec::new())
    }
}

/// On other systems the TLS library and the root certificates are compiled in: nothing needs to be installed.
#[cfg(not(any(windows, target_os = "macos")))]
mod tls {
    use super::super::proxy::ProxyConnector;

    pub(super) type Connector = hyper_rustls::HttpsConnector<ProxyConnector>;

    /// With the errors in the root certificates that the user named.
    pub(super) fn over(connector: ProxyConnector) -> (Connector, Vec<String>) {
        let (roots, problems) = super::super::trust::roots();
        let config = rustls::ClientConfig::builder_with_provider(rustls::crypto::ring::default_provider().into())
            .with_safe_default_protocol_versions()
            .expect("its own versions fit")
            .with_root_certificates(roots)
            .with_no_client_auth();
        let builder = hyper_rustls::HttpsConnectorBuilder::new().with_tls_config(config).https_only().enable_http1();
        (builder.wrap_connector(connector), problems)
    }
}

impl HttpClient {
    pub fn new(connect_max: Duration) -> HttpClient {
        let mut connector = Connector::new_with_resolver(Resolver);
        connector.enforce_http(false);
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(connect_max));
        connector.set_keepalive(Some(KEEPALIVE));
        connector.set_keepalive_interval(Some(KEEPALIVE));
        connector.set_keepalive_retries(Some(3));
        let proxied = ProxyConnector::new(connector);
        let plain = builder().build(Timely { connector: proxied.clone(), max: connect_max });
        HttpClient { proxied, connect_max, plain, secure: Arc::default() }
    }

    fn request(&self, request: Request<Full<Bytes>>) -> legacy::ResponseFuture {
        if request.uri().scheme_str() != Some("https") {
            return self.plain.request(request);
        }
        let (secure, _) = self.secure.get_or_init(|| {
            let (connector, problems) = tls::over(self.proxied.clone());
            (builder().build(Timely { connector, max: self.connect_max }), problems)
        });
        secure.request(request)
    }

    /// Why a certificate is not trusted, and what to do.
    fn about_trust(&self, why: &str) -> String {
        let problems = self.secure.get().map_or(&[][..], |(_, problems)| problems);
        match why.contains("UnknownIssuer") {
            false => String::new(),
            true if problems.is_empty() => {
                "; its certificate is not signed by a trusted authority: SSL_CERT_FILE can name a file with the root certificate".into()
            }
            true => format!("; {}", problems.join("; ")),
        }
    }
}

impl fmt::Debug for HttpClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpClient").finish_non_exhaustive()
    }
}

/// Connects within a time limit: a peer may accept a connection and never finish the handshake of TLS or of a tunnel.
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

/// One server with the headers of every request. The headers are secret and are never shown.
pub(super) struct Target {
    client: HttpClient,
    pub(super) url: Uri,
    headers: HeaderMap,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) struct Failed {
    /// Whether a part of the request may have reached the server.
    pub(super) was_sent: bool,
    /// The server cannot be reached, or the address is not allowed.
    pub(super) is_unreachable: bool,
    pub(super) why: String,
}

impl Target {
    pub(super) fn new(client: HttpClient, url: &str, headers: &BTreeMap<String, String>) -> Result<Target, String> {
        let url: Uri = url.parse().map_err(|error| format!("its url is not valid: {error}"))?;
        let authority = url.authority().ok_or("its url names no host")?;
        if !matches!(url.scheme_str(), Some("http" | "https")) {
            return Err("its url does not begin with http:// or https://".into());
        }
        if authority.as_str().contains('@') {
            return Err("its url contains a user name or password: put them into `headers`".into());
        }
        let mut checked = HeaderMap::new();
        for (name, value) in headers {
            let name = HeaderName::try_from(name).map_err(|_| format!("`{name}` is not a valid name of a header"))?;
            // The value may be a secret, so it is not repeated.
            let mut value = HeaderValue::try_from(value).map_err(|_| {
                format!("the value of its header `{name}` contains a line break or another control character")
            })?;
            value.set_sensitive(true);
            checked.insert(name, value);
        }
        Ok(Target { client, url, headers: checked })
    }

    /// The address without secrets: a query may contain a key.
    pub(super) fn name(&self) -> String {
        origin(&self.url)
    }

    /// One request and the head of its answer. Headers of the protocol override configured ones.
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

    /// The headers may contain credentials, which are meant for one origin.
    fn follow(&self, from: &Uri, location: &str) -> Result<Uri, Failed> {
        let to = resolve(from, location)
            .ok_or_else(|| refused(format!("{} redirects to an address that is not valid", self.name())))?;
        if origin(&to) == origin(from) {
            return Ok(to);
        }
        let (name, to) = (self.name(), origin(&to));
        Err(refused(format!("{name} redirects to another server, {to}: if this is correct, use that address in `url`")))
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

/// One POST to an address, for a caller that needs no connection after it. The status of the answer, or why there is none;
/// the answer's body is not read.
pub(crate) async fn post(
    url: &str,
    headers: &BTreeMap<String, String>,
    body: Bytes,
    connect_max: Duration,
) -> Result<StatusCode, String> {
    let target = Target::new(HttpClient::new(connect_max), url, headers)?;
    let answer = target.ask(&Method::POST, &target.url, &HeaderMap::new(), &body).await;
    answer.map(|answer| answer.status()).map_err(|failed| failed.why)
}

fn refused(why: String) -> Failed {
    Failed { was_sent: false, is_unreachable: true, why }
}

/// The target of a redirect that keeps the method: a POST that becomes a GET would lose its body.
fn redirect<'a>(method: &Method, response: &'a Response<Incoming>) -> Option<&'a str> {
    let keeps_method = matches!(response.status(), StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT)
        || method == Method::GET && response.status().is_redirection();
    keeps_method.then(|| response.headers().get(LOCATION)?.to_str().ok())?
}

/// A reference, resolved against the address where it was found.
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

/// Scheme, host and port, including default ports.
pub(super) fn origin(url: &Uri) -> String {
    let scheme = url.scheme_str().unwrap_or("http");
    let host = url.host().unwrap_or_default().to_ascii_lowercase();
    match url.port_u16() {
        Some(port) if !matches!((scheme, port), ("http", 80) | ("https", 443)) => format!("{scheme}://{host}:{port}"),
        _ => format!("{scheme}://{host}"),
    }
}

/// The innermost cause: the outer texts only say that an error occurred.
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
    fn references_are_resolved_as_in_a_browser() {
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
    fn an_origin_contains_its_port_once() {
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
    fn an_unusable_address_is_reported_without_its_secrets() {
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
