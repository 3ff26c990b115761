"""The cost of a job before it runs: bytes per rank, bytes on the wire, time.

Reads headers only; needs no torch.
"""
