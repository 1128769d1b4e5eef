//! Looks up the host names of backends. It replaces hyper's own resolver, which panics when no thread can be started.

use std::{
    io,
    net::{SocketAddr, ToSocketAddrs},
    pin::Pin,
    task::{Context, Poll},
    vec,
};

use hyper_util::client::legacy::connect::{HttpConnector, dns::Name};
use outlast_os::offload::look_up;
use tower_service::Service;

/// Connects by name or address.
pub(super) type Connector = HttpConnector<Resolver>;

#[derive(Clone, Debug)]
pub(super) struct Resolver;

impl Service<Name> for Resolver {
    type Response = vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        // The port is set by the connector.
        let addresses = look_up(move || (name.as_str(), 0).to_socket_addrs());
        Box::pin(async { addresses.await? })
    }
}
