"""Commands that run or plan a job without a server."""
