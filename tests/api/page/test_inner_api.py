"""The page's requests to the API: paths and queries arrive unchanged, with the visitor's session,
and refusals are raised.
"""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.testclient import TestClient

from api.http.middleware import INNER
from api.page.inner_api import Api, ApiError


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()

    @app.api_route("/v1/{path:path}", methods=["GET", "POST", "DELETE"])
    async def api(path: str, request: Request) -> Any:
        if path == "text":
            return PlainTextResponse("pl\N{LATIN SMALL LETTER A WITH DIAERESIS}in")
        if path == "refused":
            error = {"message": "Not now.", "code": "busy"}
            return JSONResponse({"error": error}, 503, headers={"retry-after": "7"})
        return {
            "path": path,
            "query": request.query_params.multi_items(),
            "method": request.method,
            "body": (await request.body()).decode(),
            "cookie": request.headers.get("cookie"),
            "other": request.headers.get("x-other"),
            "client": request.client and request.client.host,
            "inner": INNER in request.scope,
        }

    return app


def test_a_request_arrives_as_it_was_meant(app: FastAPI) -> None:
    name = "ft:a/b?c#d%2F\N{SNOWMAN} \x01"

    @app.get("/view")
    async def view(api: Api) -> Any:
        read = await api.get(f"/v1/{name}", limit=5, after=None, job=["x", "y&z"])
        return [
            read,
            await api.post("/v1/made", {"a": [1]}),
            await api.delete("/v1/gone"),
            await api.text("/v1/text"),
        ]

    headers = {"cookie": "session=1", "x-other": "kept from it"}
    read, made, gone, text = TestClient(app).get("/view", headers=headers).json()
    assert read["path"] == name
    assert read["query"] == [["limit", "5"], ["job", "x"], ["job", "y&z"]]
    assert (read["cookie"], read["other"], read["client"], read["inner"]) == (
        "session=1",
        None,
        "testclient",
        True,
    )
    assert (made["method"], made["body"], gone["method"]) == ("POST", '{"a":[1]}', "DELETE")
    assert text == "pl\N{LATIN SMALL LETTER A WITH DIAERESIS}in"


def test_a_refusal_is_raised_with_its_words(app: FastAPI) -> None:
    @app.get("/view")
    async def view(api: Api) -> Any:
        with pytest.raises(ApiError, match="Not now") as refused:
            await api.find("/v1/refused")
        return [refused.value.status, refused.value.error["code"], refused.value.retry_after]

    assert TestClient(app).get("/view").json() == [503, "busy", 7]
