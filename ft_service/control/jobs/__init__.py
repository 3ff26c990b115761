"""The reconciler and its turns: a job is validated, placed, observed, and its results are taken
in.
"""
