"""Chat lines to tokens: the tokenizer's own chat template, and a target mask that covers what the assistant says.

The mask comes from rendering prefixes: what the template adds between "up to this answer, with the generation prompt" and
"including this answer" is what the model must learn to produce, its end-of-turn token included. That needs no support from
the template but that later turns do not rewrite earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ft_service.chatlines import Sample, parse_line
from ft_service.errors import DataError, SpecError
from ft_service.rundir import sha256_of
from ft_service.spec import DataFileRef
from workers.data.batches import Tokens

Span = tuple[int, int]


@dataclass(frozen=True)
class Dataset:
    """A tokenised data file."""

    samples: list[Tokens]
    truncated: int
    """Samples that lost tokens to max_length."""
    dropped: int
    """Samples left out because no target was left of them."""
    longest: int
    """Tokens of the longest sample, before any were cut."""
    lost_tokens: int
    """Tokens that were cut, of all samples."""

    def summary(self, name: str) -> str:
        """What is trained on, in one sentence; `name`: the file's."""
        tokens, targets = sum(len(s.ids) for s in self.samples), sum(s.target_count for s in self.samples)
        return (
            f"{name}: {len(self.samples):,} samples of {tokens:,} tokens, {targets:,} of them the assistant's to learn; "
            f"the longest sample has {self.longest:,} tokens."
        )

    def warnings(self, name: str, max_length: int) -> list[str]:
        """What is not trained on, and why."""
        found = []
        if self.truncated:
            found.append(
                f"{name}: {self.truncated:,} samples were cut to training.max_length = {max_length} tokens; "
                f"{self.lost_tokens:,} tokens are lost. A larger max_length keeps them."
            )
        if self.dropped:
            found.append(f"{name}: {self.dropped:,} samples are left out: no assistant token within {max_length} tokens.")
        return found


def load_tokenizer(model_path: str) -> PreTrainedTokenizerBase:
    """The base's tokenizer. Raises SpecError if it is not a fast one or has no chat template."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise SpecError(
            "The base's tokenizer has no tokenizer.json, which is needed to find the assistant's tokens.", param="model"
        )
    if tokenizer.chat_template is None:
        raise SpecError("The base's tokenizer has no chat template, so chat lines cannot be rendered.", param="model")
    return tokenizer


def load_dataset(tokenizer: PreTrainedTokenizerBase, file: DataFileRef, max_length: int) -> Dataset:
    """Read, render and tokenise a file. Raises DataError if it changed since submission or leaves nothing to train on."""
    path = Path(file.path)
    if not path.is_file():
        raise DataError(f"{file.name}: the file is gone from {path}.", code="file_missing")
    if sha256_of(path) != file.sha256:
        raise DataError(f"{file.name}: the file has changed since the job was submitted.", code="file_changed")
    with path.open(encoding="utf-8") as lines:
        samples = [(number, parse_line(line)) for number, line in enumerate(lines, start=1) if line.strip()]
    tokenized = list(tokenize(tokenizer, samples, file.name))
    kept = [Tokens(t.ids[:max_length], t.targets[:max_length]) for t in tokenized]
    usable = [t for t in kept if t.target_count]
    if not usable:
        raise DataError(f"{file.name}: no sample has an assistant token within training.max_length = {max_length} tokens.")
    lengths = [len(t.ids) for t in tokenized]
    return Dataset(
        samples=usable,
        truncated=sum(length > max_length for length in lengths),
        dropped=len(kept) - len(usable),
        longest=max(lengths),
        lost_tokens=sum(max(0, length - max_length) for length in lengths),
    )


def tokenize(tokenizer: PreTrainedTokenizerBase, samples: Sequence[tuple[int, Sample]], filename: str) -> Iterable[Tokens]:
    """Tokens of (line number, sample) pairs. Raises DataError, naming the line, where the template rewrites earlier turns."""
    rendered = [render(tokenizer, sample, f"{filename} line {number}") for number, sample in samples]
    encoded = tokenizer([text for text, _ in rendered], add_special_tokens=False, return_offsets_mapping=True)
    for (_, spans), ids, offsets in zip(rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        yield Tokens(np.asarray(ids, dtype=np.int32), _inside(np.asarray(offsets).reshape(-1, 2)[:, 0], spans))


def render(tokenizer: PreTrainedTokenizerBase, sample: Sample, where: str) -> tuple[str, list[Span]]:
    """A sample's text and the character spans of the answers to learn."""
    messages = list(sample.messages)
    _require_tools_in_template(tokenizer, sample, where)
    template = partial(_template, tokenizer, where, list(sample.tools) or None)
    full = template(messages)
    spans: list[Span] = []
    for i, (message, weight) in enumerate(zip(messages, sample.weights, strict=True)):
        if message["role"] != "assistant" or not weight:
            continue
        before = template(messages[:i], add_generation_prompt=True)
        until = full if i == len(messages) - 1 else template(messages[: i + 1])
        if not (until.startswith(before) and full.startswith(until)):
            raise DataError(
                f"{where}: the base's chat template writes the conversation up to message {i + 1} differently once more "
                "follows, so its tokens cannot be told apart. Split the conversation, or give that message weight 0."
            )
        spans.append((len(before), len(until)))
    return full, spans


def _require_tools_in_template(tokenizer: PreTrainedTokenizerBase, sample: Sample, where: str) -> None:
    """Templates leave out what they do not know, and the model would learn to call tools that it was not told of."""
    given: Any = tokenizer.chat_template
    source = given if isinstance(given, str) else " ".join(given.values())
    for used, word, what in (
        (bool(sample.tools), "tools", "definitions of tools"),
        (sample.calls_tools, "tool_calls", "calls"),
    ):
        if used and word not in source:
            raise DataError(
                f"{where}: the base's chat template has no place for {what}, so they would be left out. Train on a base whose "
                "template knows tools, or leave the line out."
            )


def _template(
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    tools: list[Any] | None,
    messages: list[Any],
    add_generation_prompt: bool = False,
) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # templates raise what they like, to refuse roles and orders
        raise DataError(f"{where}: the base's chat template refuses this conversation: {error}") from error
    assert isinstance(text, str)
    return text


def _inside(starts: np.ndarray, spans: list[Span]) -> np.ndarray:
    """Which tokens begin inside one of the spans. `starts` [tokens]: character offset of each token's beginning."""
    inside = np.zeros(len(starts), dtype=bool)
    for first, end in spans:
        inside |= (starts >= first) & (starts < end)
    return inside
