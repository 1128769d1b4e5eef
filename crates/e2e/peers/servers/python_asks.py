"""A server on the Python SDK 1.x that asks its client a question while another call of the same client is open."""

import asyncio

from mcp.server.fastmcp import Context, FastMCP
from pydantic import BaseModel

server = FastMCP("asks")
other_began = asyncio.Event()
released = asyncio.Event()


class Name(BaseModel):
    name: str


@server.tool()
async def ask(context: Context) -> str:
    """Asks once `other` is open."""
    await other_began.wait()
    answer = await context.elicit("name?", Name)
    return f"{answer.action}: {answer.data.name}"


@server.tool()
async def other() -> str:
    """Ends when `release` is called."""
    other_began.set()
    await released.wait()
    return "other is over"


@server.tool()
async def release() -> str:
    released.set()
    return "released"


server.run()
