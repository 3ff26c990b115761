"""Rollouts with an environment, without a sampler: what an agent's calls are answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ft_service.agents.open_rollouts import OpenRollout, RolloutBudget, RolloutModel
from ft_service.serving.preview import PreviewModel


def new_rollout(project_id: str = "default", **budget: Any) -> OpenRollout:
    """One that has room for four calls of three tokens, in a minute."""
    given = {"turns": 4, "tokens": 12, "longest_answer": 3, "window": 64, "seconds": 60.0, **budget}
    model = RolloutModel(
        model=PreviewModel("/nowhere", name="tiny"), adapter="/step", temperature=0.5, seed=7
    )
    rollout = OpenRollout(project_id, model, RolloutBudget(**given))
    rollout.start()
    return rollout


def order_of(
    messages: Sequence[Mapping[str, Any]], max_tokens: int | None = None
) -> dict[str, Any]:
    """What the API makes of a body."""
    return {"messages": list(messages), "tools": [], "max_tokens": max_tokens, "top_p": 0.9}


def parts_of(
    tokens: Sequence[int], prompt: Sequence[int] = (1, 2), text: str = "4", **end: Any
) -> list[dict[str, Any]]:
    """All that the preview delivers of a recorded answer."""
    told = {
        **{"tokens": list(tokens), "logprobs": [-0.5] * len(tokens)},
        **{"reason": "stop", "calls": [], "truncated": False, **end},
    }
    return [
        {"kind": "begun", "prompt_tokens": len(prompt), "prompt": list(prompt)},
        {"kind": "text", "index": 0, "text": text},
        {"kind": "end", "index": 0, **told},
        {"kind": "done", "completion_tokens": len(tokens)},
    ]


def call(rollout: OpenRollout, tokens: Sequence[int] = (3, 4)) -> None:
    """A call of the model with its answer."""
    messages = [{"role": "user", "content": "2 + 2"}]
    rollout.end(rollout.begin(order_of(messages), messages, {}), parts_of(tokens))
