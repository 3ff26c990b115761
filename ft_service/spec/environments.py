"""Environments of reinforcement learning: where the model acts for several turns before its reward
is known. Not in OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ft_service.spec.option_types import Number, Strict

WebhookEndpointId = Annotated[str, Field(min_length=1, max_length=64)]


class _Environment(Strict):
    """What every environment has: an address, and a rollout's budgets."""

    url: Annotated[str, Field(min_length=1, max_length=2048)]
    """https, and public addresses only, unless the operator allows others."""
    max_turns: Annotated[int, Field(ge=1, le=1000)] = 16
    """Calls of the model in a rollout. An agent's further ones are refused with the code
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


class _Rewarding(_Environment):
    """An environment that gives rewards."""

    supervision: Literal["outcome", "process"] = "outcome"
    """What is rewarded, in DeepSeekMath's words (arXiv 2402.03300, section 4.1). outcome: a whole
    rollout. process: each call of the model; the advantage of a call's tokens is the sum of its
    reward and those of later calls, each less the mean over all calls of the prompt's rollouts
    (with scale_rewards = group, divided by the standard deviation over them). Without a grader.
    """


class EndpointEnvironment(_Rewarding):
    """An agent of the user's own. For each rollout it gets `{"rollout_id", "item", "base_url",
    "api_key", "model", "max_turns", "max_tokens", "deadline"}` by POST, asks the model by chat
    completions, or completions, below `base_url` with `api_key`, and answers `{"reward": number}`,
    or `{}` to leave the reward to the grader; with supervision = process `{"rewards": [number,
    …]}`, one for each call that was answered. The request is signed as webhooks are.
    """

    type: Literal["endpoint"] = "endpoint"
    webhook_endpoint_id: WebhookEndpointId
    """The webhook endpoint of this project whose secret signs the requests."""


class PlayedEnvironment(_Environment):
    """An environment without an agent: the service itself takes turns between the model and it."""

    webhook_endpoint_id: WebhookEndpointId | None = None
    """The webhook endpoint of this project whose secret signs the requests (of OpenEnv the one that
    opens a connection); None: they are not signed.
    """
    max_answer_bytes: Annotated[int, Field(ge=1, le=262_144)] = 16_384
    """Bytes of the text of one answer of the environment that the model reads; what is beyond is
    cut off, and the text says so.
    """


class McpEnvironment(PlayedEnvironment):
    """The tools of an MCP server, by streamable HTTP, in a session for each rollout. A prompt
    offers them as the chat template writes tools; what the model calls is carried out, and its
    answer is a message of the role `tool`. An answer without a call ends the rollout, and the
    grader rewards it.
    """

    type: Literal["mcp"]


class OpenEnvEnvironment(PlayedEnvironment, _Rewarding):
    """An environment of OpenEnv, by its WebSocket `<url>/ws`, in a session for each rollout.

    `reset` gets the keys of the prompt's line and a seed that is the same for all answers to a
    prompt; each answer is a `step`. A rollout ends when the environment is done, and its reward is
    the sum of those of its steps; if none has one, the grader gives it. With supervision = process
    a step's reward is that of the call whose answer it was, and 0 where the step has none.
    """

    type: Literal["openenv"]
    action_field: Annotated[str, Field(min_length=1, max_length=64)] | None = "message"
    """The field of the action that an answer's text is put into; None: the text is the action, an
    object in JSON.
    """
    observation_field: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """The field of the observation that the model reads, as text; None: all of it, as JSON."""


def _type_of(value: Any) -> str:
    """The type, which may be left out for an agent."""
    given = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return "endpoint" if given is None else str(given)


Environment = Annotated[
    Annotated[EndpointEnvironment, Tag("endpoint")]
    | Annotated[McpEnvironment, Tag("mcp")]
    | Annotated[OpenEnvEnvironment, Tag("openenv")],
    Discriminator(
        _type_of,
        custom_error_type="environment_type",
        custom_error_message="must have a type that is known: an environment has a type: endpoint, "
        "mcp or openenv",
    ),
]
