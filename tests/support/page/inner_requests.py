"""Requests of the page to the API, within its process."""

from __future__ import annotations

from typing import Any

import pytest

from api.page.inner_api import InnerApi


def requests_of_page(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the paths that the page gets from now on, as they come."""
    paths: list[str] = []
    real = InnerApi.get

    async def get(self: InnerApi, path: str, **query: Any) -> Any:
        paths.append(path)
        return await real(self, path, **query)

    monkeypatch.setattr(InnerApi, "get", get)
    return paths
