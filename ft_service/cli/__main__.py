"""Entry point of `python -m ft_service.cli`, the same as `ft`."""

from __future__ import annotations

from ft_service.cli import main

main()
