"""Commands for the jobs of a server: submit, list, show, watch, stop, compare, download and
remove.
"""
