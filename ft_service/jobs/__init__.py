"""A job's states and every decision about it: what a verb does, what comes next, what a failure
leads to. Pure.
"""
