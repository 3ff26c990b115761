"""Chat lines to tokens: the tokenizer's own chat template, and a target mask that covers what the assistant says.

The mask comes from rendering prefixes: what the template adds between "up to this answer, with the generation prompt" and
"including this answer" is what the model must learn to produce, its end-of-turn token included. That needs no support from
the template but that later turns do not rewrite earlier ones.

Whoever trains and whoever only counts (examine.py) uses this module, so nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ft_service.chatlines import Sample
from ft_service.dataset import Fault, read_samples
from ft_service.errors import DataError, SpecError
from ft_service.lines import LineError
from ft_service.rundir import sha256_of
from ft_service.spec import DataFileRef
from ft_service.tokens.sample import Tokens

Span = tuple[int, int]
Rendered = tuple[str, list[Span]]
"""A sample's text, and the character spans of the answers to learn."""

CHUNK_SAMPLES = 256
CHUNK_CHARACTERS = 512 * 1024
"""Text that is tokenised at once: enough to keep all processors busy, and a bound on memory, of which tokens take some hundred
times as much."""


def load_tokenizer(model_path: str) -> PreTrainedTokenizerBase:
    """The base's tokenizer. Raises SpecError if it cannot be loaded, is not a fast one or has no chat template."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # it raises what its files make it raise
        raise SpecError(f"The base's tokenizer cannot be loaded: {error}", param="model") from error
    if not tokenizer.is_fast:
        raise SpecError(
            "The base's tokenizer has no tokenizer.json, which is needed to find the assistant's tokens.", param="model"
        )
    if tokenizer.chat_template is None:
        raise SpecError("The base's tokenizer has no chat template, so chat lines cannot be rendered.", param="model")
    return tokenizer


def load_dataset(tokenizer: PreTrainedTokenizerBase, file: DataFileRef, max_length: int) -> list[Tokens]:
    """The samples of a file, cut to `max_length` tokens; those that have no target then are left out.

    Raises DataError if it changed since submission, has a line that cannot be trained on, or leaves nothing to train on.
    """
    path = Path(file.path)
    if not path.is_file():
        raise DataError(f"{file.name}: the file is gone from {path}.", code="file_missing")
    if sha256_of(path) != file.sha256:
        raise DataError(f"{file.name}: the file has changed since the job was submitted.", code="file_changed")
    usable: list[Tokens] = []
    with path.open("rb") as lines:
        for found in tokenize(tokenizer, read_samples(lines)):
            if isinstance(found, Fault):
                raise DataError(f"{file.name}: {found}.")
            kept = found.cut(max_length)
            if kept.target_count:
                usable.append(kept)
    if not usable:
        raise DataError(f"{file.name}: {nothing_to_learn(max_length)}.")
    return usable


def nothing_to_learn(max_length: int) -> str:
    return f"no sample has an assistant token within training.max_length = {max_length} tokens"


def tokenize(tokenizer: PreTrainedTokenizerBase, samples: Iterable[tuple[int, Sample | Fault]]) -> Iterator[Tokens | Fault]:
    """Tokens of every numbered sample, or why it has none: its own fault, or one that the chat template finds.

    While one chunk becomes tokens, in a thread that needs no Python, this one renders the next: leave the tokenizer alone until
    the end.
    """
    with ThreadPoolExecutor(1, "tokenize") as beside:
        ahead: tuple[list[Rendered | Fault], Future[list[Encoding]]] | None = None
        for chunk in _chunks(tokenizer, samples):
            begun = chunk, beside.submit(_encoded, tokenizer, chunk)
            if ahead is not None:
                yield from _tokens(*ahead)
            ahead = begun
        if ahead is not None:
            yield from _tokens(*ahead)


def _chunks(
    tokenizer: PreTrainedTokenizerBase, samples: Iterable[tuple[int, Sample | Fault]]
) -> Iterator[list[Rendered | Fault]]:
    chunk: list[Rendered | Fault] = []
    characters = 0
    for number, sample in samples:
        found = sample if isinstance(sample, Fault) else _rendered(tokenizer, number, sample)
        chunk.append(found)
        characters += 0 if isinstance(found, Fault) else len(found[0])
        if len(chunk) == CHUNK_SAMPLES or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    yield chunk


def _rendered(tokenizer: PreTrainedTokenizerBase, number: int, sample: Sample) -> Rendered | Fault:
    try:
        return render(tokenizer, sample)
    except LineError as error:
        return Fault(number, error.field, error.reason)


def _encoded(tokenizer: PreTrainedTokenizerBase, chunk: list[Rendered | Fault]) -> list[Encoding]:
    """Of those that were rendered."""
    texts = [found[0] for found in chunk if not isinstance(found, Fault)]
    options: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
    return (tokenizer(texts, **options).encodings or []) if texts else []


def _tokens(chunk: list[Rendered | Fault], encoded: Future[list[Encoding]]) -> Iterator[Tokens | Fault]:
    encodings = iter(encoded.result())
    for found in chunk:
        if isinstance(found, Fault):
            yield found
            continue
        encoding = next(encodings)
        starts = np.fromiter(map(itemgetter(0), encoding.offsets), np.int64, len(encoding))
        yield Tokens(np.asarray(encoding.ids, dtype=np.int32), _inside(starts, found[1]))


def render(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> Rendered:
    """Raises LineError for what the base's chat template does not take."""
    messages = list(sample.messages)
    _require_tools_in_template(tokenizer, sample)
    template = partial(_template, tokenizer, list(sample.tools) or None)
    full = template(messages)
    spans: list[Span] = []
    for i, (message, weight) in enumerate(zip(messages, sample.weights, strict=True)):
        if message["role"] != "assistant" or not weight:
            continue
        before = template(messages[:i], add_generation_prompt=True)
        until = full if i == len(messages) - 1 else template(messages[: i + 1])
        if not (until.startswith(before) and full.startswith(until)):
            raise LineError(
                "",
                f"the base's chat template writes the conversation up to message {i + 1} differently once more follows, so its "
                "tokens cannot be told apart. Split the conversation, or give that message weight 0",
            )
        spans.append((len(before), len(until)))
    return full, spans


def _require_tools_in_template(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> None:
    """Templates leave out what they do not know, and the model would learn to call tools that it was not told of."""
    given: Any = tokenizer.chat_template
    source = given if isinstance(given, str) else " ".join(given.values())
    for used, word, what in (
        (bool(sample.tools), "tools", "definitions of tools"),
        (sample.calls_tools, "tool_calls", "calls"),
    ):
        if used and word not in source:
            raise LineError(
                "",
                f"the base's chat template has no place for {what}, so they would be left out. Train on a base whose template "
                "knows tools, or leave the line out",
            )


def _template(
    tokenizer: PreTrainedTokenizerBase, tools: list[Any] | None, messages: list[Any], add_generation_prompt: bool = False
) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt)
    except ImportError:  # no fault of the conversation's
        raise
    except Exception as error:  # templates raise what they like, to refuse roles and orders
        raise LineError("", f"the base's chat template refuses this conversation: {error}") from error
    assert isinstance(text, str)
    return text


def _inside(starts: np.ndarray, spans: list[Span]) -> np.ndarray:
    """Which tokens begin inside one of the spans. `starts` [tokens]: character offset of each token's beginning."""
    inside = np.zeros(len(starts), dtype=bool)
    for first, end in spans:
        inside |= (starts >= first) & (starts < end)
    return inside
