"""Admission: a create body becomes stored jobs, or is refused and nothing is stored; its plan."""
