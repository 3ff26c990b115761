"""Hosts that agents tell of, and what of each attempt runs on which of them."""
