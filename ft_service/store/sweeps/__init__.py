"""Sweeps: their rows, what is asked of all their jobs at once, and how each one ends."""
