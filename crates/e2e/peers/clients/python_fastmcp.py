"""A client on FastMCP 4. The second argument is its mode, as for the Python SDK 2.x."""

import line
from fastmcp import Client
from fastmcp.client.transports import StdioTransport, StreamableHttpTransport


async def main():
    if line.URL:
        transport = StreamableHttpTransport(line.URL, line.HEADERS)
    else:
        transport = StdioTransport(**line.SETUP, keep_alive=False)
    async with Client(transport, cache=False, mode=line.MODE) as client:

        async def call(tool, arguments):
            answer = await client.call_tool_mcp(tool, arguments)
            return line.result(answer.is_error, answer.content, answer.structured_content)

        async def names():
            return [tool.name for tool in await client.list_tools()]

        await line.serve(client.protocol_version, call, names)


line.run(main)
