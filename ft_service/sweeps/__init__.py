"""Sweeps: jobs that differ in a few options, compared by validation loss. Pure.

asked     what `sweep` of a create body asks for: options, values, and the bodies of the jobs
drawing   values at random, from a seed
course    how far a job of a sweep has come
halving   which jobs have no hope, by successive halving; and which is the best
"""
