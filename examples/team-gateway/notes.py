"""Notes of the team, in one file."""

from pathlib import Path

from mcp.server import MCPServer

NOTES = Path("notes.txt")
server = MCPServer("notes")


@server.tool()
def add(text: str) -> str:
    """Add a note."""
    with NOTES.open("a") as file:
        file.write(text + "\n")
    return "added"


@server.tool()
def search(word: str) -> str:
    """Find the notes that contain a word."""
    lines = NOTES.read_text().splitlines() if NOTES.exists() else []
    return ", ".join(line for line in lines if word in line) or "nothing found"


server.run()
