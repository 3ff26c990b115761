"""What a job will take, before it runs: bytes per rank, bytes on the wire, time. Reads headers only; needs no torch."""
