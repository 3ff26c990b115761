"""SPEC files: what they ask for, and the bases, data and tuned models on this host that they
name.
"""
