"""A calculator as an MCP server, whose tools a job trains a model to use.

    python examples/calculator_mcp.py [--port 8901]

Jobs use it with deploy/examples/calculator.yaml. It needs the package mcp from 2.2 on.
"""

from __future__ import annotations

import argparse

from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator", log_level="WARNING")


@server.tool()
def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8901)
    server.run(transport="streamable-http", port=parser.parse_args().port)


if __name__ == "__main__":
    main()
