"""Commands for tuned models once they are there."""
