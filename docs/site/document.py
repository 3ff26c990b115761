"""The service's OpenAPI document, which the reference pages are made of."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from api.app import create_app
from ft_service.settings import Settings
from ft_service.store.sql import Store


@cache
def openapi_document() -> dict[str, Any]:
    """The document as `ft serve` answers it at /openapi.json, whatever the environment says."""
    with tempfile.TemporaryDirectory() as home:
        settings = Settings.model_construct(home=Path(home), models=[Path(home)])
        return create_app(settings, Store(f"sqlite:///{home}/ft.db")).openapi()
