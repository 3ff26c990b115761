"""All that replaces a function, a class or the forward of another package; one file a patch, one
place to look when upstream changes.

The docstring of a patch says what it replaces and why, the version it was written for, and the test
that fails when upstream changes. tests/test_patches.py finds replacements elsewhere.
"""
