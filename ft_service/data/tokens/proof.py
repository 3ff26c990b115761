"""What must hold of a sample's tokens before anything is learned from it. Each of these has ruined trainings in silence."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ft_service.data.line_errors import LineError
from ft_service.data.token_options import TokenOptions
from ft_service.data.tokens.marked import Span
from ft_service.data.tokens.render import turn_ends
from ft_service.data.tokens.sample import Tokens

_SHOWN = 40


class SampleText(NamedTuple):
    """A record as text, and the character spans of it that are learned."""

    text: str
    spans: list[Span]
    is_chat: bool
    """A chat template has written it."""


class Proof:
    """The checks of one base's samples."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: TokenOptions) -> None:
        named: Any = tokenizer
        self._ends = turn_ends(tokenizer)
        self._begin: tuple[int | None, str | None] = named.bos_token_id, named.bos_token
        self._end: str | None = named.eos_token
        self._everything = options.train_on == "everything"

    def require(self, sample: SampleText, tokens: Tokens) -> Tokens:
        """The tokens, if they may be learned. Raises LineError that shows what is wrong."""
        self._require_one_begin(sample, tokens)
        if not tokens.target_count:
            raise LineError("", f"none of its tokens is learned: {_shown(sample.text)}")
        if sample.is_chat:
            if not self._everything and tokens.targets[1:].all():
                raise LineError(
                    "",
                    f"all of its tokens are learned, as if there were no prompt: {_shown(sample.text)}. If that is meant, "
                    "ask for training.train_on = 'everything'",
                )
            self._require_end_of_turn(sample)
        return tokens

    def _require_one_begin(self, sample: SampleText, tokens: Tokens) -> None:
        number, name = self._begin
        if number is not None and len(tokens.ids) > 1 and (tokens.ids[:2] == number).all():
            who = "chat template" if sample.is_chat else "tokenizer"
            raise LineError("", f"begins with {name} twice: the base's {who} writes it before every text. Leave it out")

    def _require_end_of_turn(self, sample: SampleText) -> None:
        if any(sample.text[first:end].rstrip().endswith(self._ends) for first, end in sample.spans):
            return
        learned = sample.text[slice(*sample.spans[-1])]
        own = f", or with the base's own {self._end}" if self._end else ""
        raise LineError(
            "",
            f"no end-of-turn token is learned: what is learned ends with {learned[-_SHOWN:]!r}, so the tuned model would not "
            f"stop. Give a chat_template that ends answers with a special token of the base's tokenizer{own}",
        )


def _shown(text: str) -> str:
    return repr(text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]} … {text[-_SHOWN:]}")
