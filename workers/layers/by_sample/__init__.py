"""Layers that mix tokens in ways of their own, each sample of the micro-batch in hand by itself."""
