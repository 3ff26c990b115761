"""Launchers start, observe and end attempts: one protocol, and one module per place where workers
run.
"""
