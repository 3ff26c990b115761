"""Base models: where they are, how their files are laid out, and which of their modules a job's
options name.
"""
