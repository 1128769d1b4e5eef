"""A counter for each client: the process keeps it."""

from mcp.server import MCPServer

server = MCPServer("counter")
count = 0


@server.tool()
def next_number() -> str:
    """Count up, and return the new number."""
    global count
    count += 1
    return str(count)


server.run()
