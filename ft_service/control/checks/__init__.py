"""Checks, samples and statistics of data files, read by processes of their own."""
