"""`ft data`: data files before they are trained on."""
