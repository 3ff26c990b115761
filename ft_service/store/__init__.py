"""Database of the service: projects, keys, files, jobs, their events and checkpoints, and who holds
which slot.
"""
