"""Training by commands of a client that runs the training loop."""
