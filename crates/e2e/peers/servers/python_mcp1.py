"""A server on the Python SDK 1.x, which refuses every call before the whole handshake."""

import os

from mcp.server.fastmcp import FastMCP

VERSION = "1"
server = FastMCP("matrix")


@server.tool()
def echo(text: str) -> str:
    return text


@server.tool()
def version() -> str:
    return VERSION


@server.tool()
def pid() -> str:
    return str(os.getpid())


@server.tool()
def exit42() -> str:
    os._exit(42)


server.run()
