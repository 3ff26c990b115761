"""Serving of tuned models: the preview on this host, the hand-off to inference servers, and exports."""
