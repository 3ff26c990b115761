"""The machine that a process runs on: its GPUs, its processes, and how their lives are tied
together.
"""
