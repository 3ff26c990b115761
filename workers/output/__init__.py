"""Output of a job: events, checkpoints, the adapter. Written by rank 0 or by all ranks together."""
