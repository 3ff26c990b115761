"""Sweeps: from a create body to their jobs, and what becomes of these."""
