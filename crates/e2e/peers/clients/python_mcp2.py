"""A client on the Python SDK 2.x: it asks for the stateless era first and falls back to the handshake."""

import line
from mcp import Client, StdioServerParameters


async def main():
    async with Client(line.URL or StdioServerParameters(**line.SETUP), cache=None) as client:

        async def call(tool, arguments):
            answer = await client.call_tool(tool, arguments)
            return line.result(answer.is_error, answer.content, answer.structured_content)

        async def names():
            return [tool.name for tool in (await client.list_tools()).tools]

        await line.serve(client.protocol_version, call, names)


line.run(main)
