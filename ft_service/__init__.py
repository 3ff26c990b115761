"""The core of ft-service: job specs, states, store, launchers, reconciler and command line.

No torch, no web framework.
"""

__version__ = "0.2.0"
