"""Pictures: a base's frozen towers, the features that they give, and what micro-batches hold of
them.
"""
