"""Clients that have closed their connection before they had an answer."""

from __future__ import annotations

from anyio import from_thread
from fastapi import HTTPException, Request

DISCONNECTED = 499
"""Status in the log of an answer whose caller has disconnected."""


def refuse_without_client(request: Request) -> None:
    """Raise HTTPException if the client is gone.

    It sends its request again, and what this try stores besides would be a second object. Called in
    a thread of the request.
    """
    if from_thread.run(request.is_disconnected):
        raise HTTPException(
            DISCONNECTED, "The client has closed the connection; nothing was stored."
        )
