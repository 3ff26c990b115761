"""The service as tools of the Model Context Protocol, for coding agents (FT_MCP)."""
