"""Samples and micro-batches.

A global batch is a list of samples; only its split over ranks depends on their number.
"""
