"""The run directory: the only contract between the service and the workers. directory.py lists what
is in it.
"""
