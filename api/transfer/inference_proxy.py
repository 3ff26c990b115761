"""Passes a request on to the operator's inference server, and its answer back while it arrives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import httpx2
from fastapi.responses import StreamingResponse

from ft_service.errors import UnavailableError
from ft_service.settings import Settings

_TIMEOUT = httpx2.Timeout(600.0, connect=5.0)
_turn = count()
"""Replicas are asked in turn."""
_PASSED_BACK = ("content-type", "retry-after", "retry-after-ms", "x-should-retry")


async def chat_completion(settings: Settings, body: Any) -> StreamingResponse:
    """Send a body to a replica of FT_INFERENCE_URL with its own key; the caller's never leaves. Where one does not answer the
    next is asked. Raises UnavailableError.
    """
    urls = settings.inference_urls
    first = next(_turn) % len(urls)
    away = UnavailableError("FT_INFERENCE_URL names no server.")
    for url in (*urls[first:], *urls[:first]):
        try:
            return await _asked(url, settings, body)
        except UnavailableError as error:
            away = error
    raise away


async def _asked(url: str, settings: Settings, body: Any) -> StreamingResponse:
    headers = {}
    if settings.inference_api_key:
        headers["authorization"] = f"Bearer {settings.inference_api_key.get_secret_value()}"
    client = httpx2.AsyncClient(timeout=_TIMEOUT, trust_env=False)
    try:
        asked = client.build_request("POST", f"{url}/chat/completions", json=body, headers=headers)
        answer = await client.send(asked, stream=True)
    except httpx2.HTTPError as error:
        await client.aclose()
        raise UnavailableError(f"The inference server (FT_INFERENCE_URL) does not answer: {error}.") from error
    except BaseException:
        await client.aclose()
        raise
    kept = {name: answer.headers[name] for name in _PASSED_BACK if name in answer.headers}
    return StreamingResponse(_chunks(client, answer), status_code=answer.status_code, headers=kept)


async def _chunks(client: httpx2.AsyncClient, answer: httpx2.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in answer.aiter_bytes():
            yield chunk
    finally:
        await answer.aclose()
        await client.aclose()
