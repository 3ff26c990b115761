"""Data files on the command line: a job's, for commands that need no server, and `ft data`."""
