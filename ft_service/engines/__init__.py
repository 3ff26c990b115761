"""Engines on the service's side: which jobs share one, and how an engine and its seats are started,
observed and ended.
"""
