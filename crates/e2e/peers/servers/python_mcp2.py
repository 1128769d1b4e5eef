"""A server on the Python SDK 2.x, which speaks both eras."""

import os

from mcp.server.mcpserver import MCPServer

VERSION = "1"
server = MCPServer("matrix")


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
