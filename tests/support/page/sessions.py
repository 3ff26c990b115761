"""Browsers without a screen: clients that sign in, and the secret of their session."""

from __future__ import annotations

import httpx2

from tests.support.rest.service import Service


def new_browser(service: Service) -> httpx2.Client:
    return httpx2.Client(
        base_url=service.url, trust_env=False, follow_redirects=False, timeout=60.0
    )


def secret_of(browser: httpx2.Client) -> str:
    (secret,) = browser.cookies.values()
    return secret
