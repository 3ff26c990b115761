"""A Python function as an agent: loaded, signed for, and asked."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from ft_service.agents.hosting import hosting, load_function
from ft_service.errors import SpecError
from ft_service.host.signed_post import SignedMessage

SECRET = "whsec_c2VjcmV0"
EXAMPLE = Path(__file__).parents[3] / "examples/sums_agent.py"


@pytest.mark.parametrize("source", [None, "1 / 0", "x = 1", "def rollout(client, item): ..."])
def test_a_file_without_such_a_function_is_refused(tmp_path: Path, source: str | None) -> None:
    path = tmp_path / "own.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(SpecError) as refused:
        load_function(path)
    assert refused.value.param == "agent"


def test_the_example_is_one() -> None:
    assert load_function(EXAMPLE).__name__ == "rollout"


async def rollout(client: Any, item: Mapping[str, Any]) -> Any:
    if item["kind"] == "fails":
        raise RuntimeError("mine")
    return {"number": 0.5, "none": None, "of calls": (1, 0.5), "text": "1,2"}[item["kind"]]


def test_what_a_function_returns_is_the_reward() -> None:
    message = {"base_url": "http://127.0.0.1:9/v1", "api_key": "k", "deadline": time.time() + 60}
    with hosting(rollout, secret=SECRET) as url, httpx2.Client(trust_env=False) as client:

        def answer(body: bytes, secret: str = SECRET) -> httpx2.Response:
            headers = SignedMessage("rollout_1", body, [secret]).headers(int(time.time()))
            return client.post(url, content=body, headers=headers)

        answers = [
            answer(json.dumps({**message, "item": {"kind": kind}}).encode())
            for kind in ("number", "none", "of calls", "fails", "text")
        ]
        assert [(own.status_code, own.json()) for own in answers] == [
            (200, {"reward": 0.5}),
            (200, {}),
            (200, {"rewards": [1.0, 0.5]}),
            (500, {"error": "RuntimeError: mine"}),
            (500, {"error": "ValueError: could not convert string to float: '1,2'"}),
        ]
        assert answer(b"{}", "whsec_b3RoZXI=").status_code == 401
        assert answer(b"{}").status_code == 400
