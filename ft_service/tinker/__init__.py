"""The training loop from outside: what a Tinker client sends, and how it reaches the ranks and
comes back.
"""
