"""How the command line waits for a person who signs in in a browser."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from ft_service.client import logins
from ft_service.client.logins import Code, SignIn
from ft_service.errors import AuthError, FtError, LimitError, UnavailableError

CODE = Code(device_code="d", user_code="u", verification_uri="https://x", expires_in=60, interval=5)
SIGNED_IN = {
    **{"status": "signed_in", "key": "k", "name": "ada", "project_id": "default"},
    **{"scope": "read", "expires_at": 1.0},
}


def waited(monkeypatch: pytest.MonkeyPatch, answers: list[Any]) -> tuple[Any, list[float]]:
    """What came of it, and the pauses."""
    told = itertools.chain(answers, itertools.repeat({"status": "pending"}))
    pauses: list[float] = []

    def call(*_: Any) -> tuple[None, Any]:
        answer = next(told)
        if isinstance(answer, Exception):
            raise answer
        return None, answer

    monkeypatch.setattr(logins, "_call", call)
    sign_in = SignIn("http://box:9/v1", CODE)
    try:
        return sign_in.wait(None, clock=lambda: sum(pauses), sleep=pauses.append), pauses
    except FtError as error:
        return error, pauses


def test_it_waits_longer_when_it_asks_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = {"status": "pending"}
    answers = [pending, LimitError("slow"), UnavailableError("gone"), LimitError("slow"), SIGNED_IN]
    login, pauses = waited(monkeypatch, answers)
    assert (login.name, pauses) == ("ada", [5, 5, 10, 10, 15])


def test_a_code_that_nobody_confirms_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    error, pauses = waited(monkeypatch, [])
    assert isinstance(error, AuthError)
    assert "not confirmed within 1 minutes" in str(error)
    assert sum(pauses) == 60


def test_a_refusal_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    error, pauses = waited(monkeypatch, [AuthError("refused")])
    assert (str(error), pauses) == ("refused", [5])
