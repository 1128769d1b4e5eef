"""A client on the Python SDK 1.x, which knows only the handshake."""

import line
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamablehttp_client


async def main():
    connected = streamablehttp_client(line.URL, line.HEADERS) if line.URL else stdio_client(StdioServerParameters(**line.SETUP))
    async with connected as (read, write, *_):
        async with ClientSession(read, write) as session:
            opened = await session.initialize()

            async def call(tool, arguments):
                answer = await session.call_tool(tool, arguments)
                return line.result(answer.isError, answer.content, answer.structuredContent)

            async def progress(tool, arguments, hear):
                async def heard(progress, total, message):
                    hear(message)

                answer = await session.call_tool(tool, arguments, progress_callback=heard)
                return line.result(answer.isError, answer.content, answer.structuredContent)

            async def names():
                return [tool.name for tool in (await session.list_tools()).tools]

            await line.serve(opened.protocolVersion, call, names, progress)


line.run(main)
