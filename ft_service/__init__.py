"""The core of ft-service: job specs, states, store, launchers, reconciler and command line.

No torch, no web framework.
"""

__version__ = "0.3.0"
"""The newest release: its images are what deploy/ names."""
NEXT = "0.4.0"
"""The release that this code is to become (ft_service/version.py); empty in a release."""
