"""Sweeps of jobs, and plans of the resources that jobs take."""
