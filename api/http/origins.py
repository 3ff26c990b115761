"""Whose page sends a request."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from fastapi import Request


def address_parts(address: str) -> SplitResult | None:
    """Return the parts of a client's address. None: it is none, such as `//[`."""
    try:
        return urlsplit(address)
    except ValueError:
        return None


def other_origin(request: Request) -> str | None:
    """Return the Origin of a request that the page of another address sends; None: its own page
    does, or no browser.
    """
    origin = request.headers.get("origin")
    if origin is None:
        return None
    sender = address_parts(origin)
    own = sender is not None and sender.netloc == request.headers.get("host")
    return None if own else origin
