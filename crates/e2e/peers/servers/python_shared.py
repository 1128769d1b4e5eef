"""A server on the Python SDK 1.x for many clients at once: its tool works in steps, and reports each."""

import asyncio
import os

from mcp.server.fastmcp import Context, FastMCP

server = FastMCP("shared")


@server.tool()
async def work(tag: str, steps: int, context: Context) -> str:
    for step in range(steps):
        await context.report_progress(step, steps, tag)
        await asyncio.sleep(0.01)
    return tag


@server.tool()
def pid() -> str:
    return str(os.getpid())


server.run()
