"""Environments of reinforcement learning: where the model acts for several turns before its reward
is known. Not in OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ft_service.spec.option_types import Number, Strict

_NOT_YET: Mapping[str, str] = {
    "openenv": "an OpenEnv environment",
    "mcp": "an MCP server",
}
"""Types that are refused → what they would name."""


class EndpointEnvironment(Strict):
    """An agent of the user's own. For each rollout it gets `{"rollout_id", "item", "base_url",
    "api_key", "model", "max_turns", "max_tokens", "deadline"}` by POST, asks the model by chat
    completions below `base_url` with `api_key`, and answers `{"reward": number}`, or `{}` to leave
    the reward to the grader. The request is signed as webhooks are; https, and public addresses
    only, unless the operator allows others.
    """

    type: Literal["endpoint"] = "endpoint"
    url: Annotated[str, Field(min_length=1, max_length=2048)]
    webhook_endpoint_id: Annotated[str, Field(min_length=1, max_length=64)]
    """The webhook endpoint of this project whose secret signs the requests."""
    max_turns: Annotated[int, Field(ge=1, le=1000)] = 16
    """Calls of the model in a rollout; further ones are refused with the code
    `rollout_turns_used`.
    """
    max_tokens: Annotated[int, Field(ge=1, le=1_048_576)] = 4096
    """Tokens that the model answers in a rollout, all calls together; a call gets what is left, and
    at most max_completion_length.
    """
    deadline_seconds: Annotated[Number, Field(ge=1, le=7200)] = 300.0
    """Time of a rollout, after which it has no reward, and its key opens nothing any more."""
    concurrency: Annotated[int, Field(ge=1, le=64)] = 16
    """Rollouts of the job at once."""


def refuse_unavailable(value: Any) -> Any:
    """Return an environment as it is given. Raises ValueError for a type that is not available."""
    kind = str(value.get("type")) if isinstance(value, Mapping) else ""
    if kind in _NOT_YET:
        raise ValueError(
            f"type {kind!r} is not available: {_NOT_YET[kind]} is not asked by this service "
            "itself. Give type 'endpoint' with the url of an agent that asks it (ft rollout serve)"
        )
    return value
