"""Several jobs trained on one resident base."""
