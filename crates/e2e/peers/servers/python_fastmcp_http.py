"""A server on FastMCP 4 over HTTP, in both eras. The port is its argument."""

import os
import sys

from fastmcp import FastMCP

server = FastMCP("matrix")


@server.tool()
def echo(text: str) -> str:
    return text


@server.tool()
def pid() -> str:
    return str(os.getpid())


server.run(transport="http", host="127.0.0.1", port=int(sys.argv[1]), show_banner=False)
