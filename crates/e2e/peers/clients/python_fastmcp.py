"""A client on FastMCP 4."""

import line
from fastmcp import Client
from fastmcp.client.transports import StdioTransport


async def main():
    async with Client(line.URL or StdioTransport(**line.SETUP, keep_alive=False), cache=False) as client:

        async def call(tool, arguments):
            answer = await client.call_tool_mcp(tool, arguments)
            return line.result(answer.is_error, answer.content, answer.structured_content)

        async def names():
            return [tool.name for tool in await client.list_tools()]

        await line.serve(client.protocol_version, call, names)


line.run(main)
