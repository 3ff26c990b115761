"""An attempt from its start to its outcome, alone on its ranks or in an engine."""
