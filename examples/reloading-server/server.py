"""An MCP server whose rules change often: see README.md."""

from mcp.server import MCPServer
from mcp.types import ToolAnnotations

VAT = 0.19
PRICES = {"tea": 4.20, "coffee": 5.90}

server = MCPServer("prices")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def price(item: str) -> str:
    """The price of an item, with VAT."""
    if item not in PRICES:
        return f"no such item; known are {', '.join(sorted(PRICES))}"
    return f"{item}: {PRICES[item] * (1 + VAT):.2f}"


server.run()
