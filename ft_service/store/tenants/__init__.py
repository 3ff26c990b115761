"""Who may do what, and how much of it: projects with their limits, keys, the record of changes, and use."""
