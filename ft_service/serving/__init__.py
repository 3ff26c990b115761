"""Serving of tuned models: the preview on this host, the hand-off to inference servers,
exports, and the worker processes that make their files."""
