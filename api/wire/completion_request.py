"""Completion requests in OpenAI's older format, a text to be continued, and the orders for the
preview made from them. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from api.wire.chat_request import (
    PREVIEW_LACKS,
    Refused,
    StopText,
    Streamed,
    parse_fields,
    refuse_stream_options,
)
from ft_service.errors import SpecError
from ft_service.spec import Number

MOST_PROMPTS = 32
_REFUSED: Refused = {
    "best_of": ((1,), PREVIEW_LACKS),
    "suffix": (("",), PREVIEW_LACKS),
    "logit_bias": (({},), PREVIEW_LACKS),
    "presence_penalty": ((0,), PREVIEW_LACKS),
    "frequency_penalty": ((0,), PREVIEW_LACKS),
}
"""Unsupported fields of OpenAI's API: values without effect, and the message for any other
value.
"""

Text = Annotated[str, Field(min_length=1, max_length=1_000_000)]
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, max_length=1_000_000)
]
Several = Field(min_length=1, max_length=MOST_PROMPTS)


class Completion(Streamed):
    """Body of a completion for the preview. A stream of it is sent when it is whole."""

    model: str
    prompt: Text | TokenIds | Annotated[list[Text], Several] | Annotated[list[TokenIds], Several]
    """One text or its tokens, or several; each has `n` continuations."""
    max_tokens: Annotated[int, Field(ge=0)] = 16
    """Limit of tokens of one continuation; 0, with echo: only the prompt's tokens."""
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1, le=4)] = 1
    stop: StopText | Annotated[list[StopText], Field(max_length=4)] = ""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    echo: bool = False
    """Whether the prompt is part of the answer, and its tokens are among those with
    log-probabilities.
    """
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Likeliest tokens to name at each place. None: no log-probabilities."""
    add_special_tokens: bool = True
    """Not in OpenAI's API; vLLM's. Whether a text begins with the tokens with which the base's
    tokenizer begins texts; false for one that has them, as chat templates write them.
    """
    return_token_ids: bool = False
    """Not in OpenAI's API; vLLM's. Whether a choice has `prompt_token_ids` and `token_ids`, the
    token that ends it included.
    """
    processor: bool = False
    """Not in OpenAI's API. Answer on the CPU, at low priority, while training has every slot."""

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, a text or tokens."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return list(self.prompt)  # pyright: ignore[reportReturnType]

    def order(self, prompt: str | list[int], adapter: str | None) -> dict[str, Any]:
        """The order for the preview's process (workers/serving/engine.py).

        `adapter`: a PEFT folder; None: the base alone.
        """
        return {
            "op": "text",
            "prompt": prompt,
            "adapter": adapter,
            "n": self.n,
            "max_tokens": max(1, self.max_tokens),
            "add_special_tokens": self.add_special_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop": [
                stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop) if stop
            ],
            "seed": None if self.seed is None else self.seed % 2**63,
            "top_logprobs": self.logprobs,
            "echo": self.echo,
            "recorded": self.return_token_ids,
        }


def parse_completion(body: Mapping[str, Any]) -> Completion:
    """Parse a body; a null field counts as missing.

    Raises SpecError naming the field, its value and the limit.
    """
    parsed = parse_fields(body, Completion, _REFUSED)
    refuse_stream_options(parsed)
    if parsed.max_tokens == 0 and not parsed.echo:
        raise SpecError(
            "max_tokens = 0 without echo: there would be no answer. Ask for at least 1.",
            param="max_tokens",
        )
    return parsed
