"""How long the sampler of an agent's rollouts has not answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ft_service.control.reinforcement import agent_rollouts
from ft_service.control.reinforcement.agent_rollouts import AgentRollouts
from ft_service.errors import FtError, UnavailableError


def test_a_sampler_is_away_until_it_has_answered_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rollouts are opened again; and calls that it has answered before do not count."""
    now = 0.0
    monkeypatch.setattr(agent_rollouts.time, "monotonic", lambda: now)
    away: list[float] = []

    def refused(_: FtError, seconds: float) -> None:
        away.append(seconds)

    nothing: Any = None
    rollouts = AgentRollouts(nothing, nothing, nothing, lambda: None, refused, lambda _: None)
    waiting: Any = SimpleNamespace(unserved=UnavailableError("busy"), answered=[1])
    opened_again: Any = SimpleNamespace(unserved=None, answered=[])
    served: Any = SimpleNamespace(unserved=None, answered=[1])
    for seen in (waiting, waiting, opened_again, waiting, served, waiting):
        rollouts._looks([seen])()
        now += 10
    assert away == [0, 10, 30, 0]
