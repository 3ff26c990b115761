"""Tinker's wire below `/api/v1`: the training loop from outside (docs/tinker.md)."""
