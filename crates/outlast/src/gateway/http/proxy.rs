//! Connects to a server directly, or through a tunnel of the proxy that the environment names.

use std::{
    error::Error,
    net::IpAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use hyper::Uri;
use hyper_util::client::{legacy::connect::proxy::Tunnel, proxy::matcher::Matcher};
use tower_service::Service;

use super::resolver::Connector;

type BoxError = Box<dyn Error + Send + Sync>;

/// `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`, with their usual meaning; loopback addresses never use a
/// proxy.
#[derive(Clone)]
pub(super) struct ProxyConnector {
    direct: Connector,
    proxies: Arc<Matcher>,
}

impl ProxyConnector {
    pub(super) fn new(direct: Connector) -> ProxyConnector {
        ProxyConnector { direct, proxies: Arc::new(Matcher::from_env()) }
    }

    #[cfg(test)]
    fn with(proxies: Matcher) -> ProxyConnector {
        ProxyConnector { direct: Connector::new_with_resolver(super::resolver::Resolver), proxies: Arc::new(proxies) }
    }

    /// The tunnel to a server, if a proxy is used.
    fn tunnel(&self, to: &Uri) -> Result<Option<Tunnel<Connector>>, BoxError> {
        let Some(proxy) = self.proxies.intercept(to).filter(|_| !is_loopback_host(to)) else { return Ok(None) };
        let scheme = proxy.uri().scheme_str().unwrap_or_default();
        if scheme != "http" {
            // The address may contain a password, so it is not repeated.
            return Err(
                format!("the proxy in the environment uses {scheme}, which is not supported; only http is").into()
            );
        }
        let tunnel = Tunnel::new(proxy.uri().clone(), self.direct.clone());
        Ok(Some(match proxy.basic_auth() {
            Some(auth) => tunnel.with_auth(auth.clone()),
            None => tunnel,
        }))
    }
}

impl Service<Uri> for ProxyConnector {
    type Response = <Connector as Service<Uri>>::Response;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.direct.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        match self.tunnel(&to) {
            Ok(None) => {
                let connecting = self.direct.call(to);
                Box::pin(async { connecting.await.map_err(Into::into) })
            }
            Ok(Some(mut tunnel)) => {
                let connecting = tunnel.call(with_port(to));
                Box::pin(async { connecting.await.map_err(|error| format!("through the proxy: {error}").into()) })
            }
            Err(error) => Box::pin(async { Err(error) }),
        }
    }
}

/// The port of a tunnel is 443 by default.
fn with_port(to: Uri) -> Uri {
    if to.port().is_some() || to.scheme_str() != Some("http") {
        return to;
    }
    format!("http://{}:80", to.host().unwrap_or_default()).parse().unwrap_or(to)
}

/// This machine, by any of its names.
fn is_loopback_host(to: &Uri) -> bool {
    let host = to.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_addresses_use_a_supported_proxy_and_loopback_none() {
        let proxies = || Matcher::builder().all("http://proxy:3128").no("near.example,10.0.0.0/8").build();
        let table = [
            ("https://far.example/mcp", true),
            ("http://far.example/mcp", true),
            ("https://near.example/mcp", false),
            ("https://10.1.2.3/mcp", false),
            ("http://localhost:1/mcp", false),
            ("http://127.0.0.1:1/mcp", false),
            ("http://[::1]:1/mcp", false),
        ];
        for (url, is_through) in table {
            let tunnel = ProxyConnector::with(proxies()).tunnel(&url.parse().unwrap()).unwrap();
            assert_eq!(tunnel.is_some(), is_through, "{url}");
        }
        for (url, at) in
            [("http://a", Some(80)), ("http://a:81", Some(81)), ("https://a", None), ("http://[::2]", Some(80))]
        {
            assert_eq!(with_port(url.parse().unwrap()).port_u16(), at, "{url}");
        }
        let socks = ProxyConnector::with(Matcher::builder().all("socks5://me:secret@proxy:1080").build());
        let why = socks.tunnel(&"https://far.example".parse().unwrap()).err().unwrap().to_string();
        assert!(why.contains("socks5") && !why.contains("secret"), "{why}");
    }
}
