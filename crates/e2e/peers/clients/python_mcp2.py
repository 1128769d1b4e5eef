"""A client on the Python SDK 2.x.

The second argument is its mode: `auto`, its default, asks for the stateless era first and falls back to the handshake; `legacy` knows
only the handshake.
"""

import line
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client


async def main():
    if line.URL:
        server = streamable_http_client(line.URL, http_client=create_mcp_http_client(line.HEADERS))
    else:
        server = StdioServerParameters(**line.SETUP)
    async with Client(server, cache=None, mode=line.MODE) as client:

        async def call(tool, arguments):
            answer = await client.call_tool(tool, arguments)
            return line.result(answer.is_error, answer.content, answer.structured_content)

        async def names():
            return [tool.name for tool in (await client.list_tools()).tools]

        await line.serve(client.protocol_version, call, names)


line.run(main)
