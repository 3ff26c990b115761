"""Sweeps: jobs that differ in a few options, compared by validation loss. Pure.

search_space  the options and values of a `sweep` in a create body, and the bodies of its jobs
halving       results of a sweep's jobs, early stopping by successive halving, and the best job
"""
