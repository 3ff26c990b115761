"""Report of the workers on one GPU, in one command: `make gpu-report`."""
