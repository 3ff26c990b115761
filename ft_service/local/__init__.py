"""A job without a server: run directories in the foreground."""
