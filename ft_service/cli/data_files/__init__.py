"""`ft data`: inspect data files before training."""
