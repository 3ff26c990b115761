"""Starting, watching and ending attempts: one protocol, one module for each place where workers run."""
