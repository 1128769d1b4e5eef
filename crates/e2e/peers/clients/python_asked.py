"""A client on the Python SDK 1.x with parallel calls: it answers a question only after the other calls have ended.

The first argument is the address of a gateway with `python_asks.py` behind it under the name `s`. Prints the answers.
"""

import asyncio
import sys

from mcp import ClientSession, types
from mcp.client.streamable_http import streamablehttp_client


async def main():
    calls = {}

    async def asked(_context, _params):
        calls["release"] = asyncio.create_task(session.call_tool("s__release", {}))
        await asyncio.gather(calls["release"], calls["other"])
        return types.ElicitResult(action="accept", content={"name": "Ann"})

    async with streamablehttp_client(sys.argv[1]) as (read, write, *_):
        async with ClientSession(read, write, elicitation_callback=asked) as session:
            await session.initialize()
            calls["ask"] = asyncio.create_task(session.call_tool("s__ask", {}))
            calls["other"] = asyncio.create_task(session.call_tool("s__other", {}))
            for name in ["ask", "other"]:
                answer = await calls[name]
                print(f"{name}: {answer.isError}: {answer.content[0].text}")


asyncio.run(asyncio.wait_for(main(), 60))
