"""A tokenizer as llama.cpp has it: two of its kinds, and of byte-level BPE the ways to cut text
that it knows by name.

What tokenizer.json says is compared with what llama.cpp would do. Where they cannot be shown to be
the same, the tokenizer is refused: a model that reads other tokens than it was trained on answers,
and answers badly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf import TokenType

from ft_service.bases.base_files import document_or_none, read_document
from ft_service.data.tokens.tokenize import load_tokenizer
from workers.exports.gguf_layout import refusal

_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST_OF_TEKKEN = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_BY_REGEX = {
    rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_REST}": {True: "llama-bpe", False: "dbrx"},
    rf"{_SHORT}|{_WORD}|\p{{N}}|{_REST}": {False: "qwen2"},
    rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_REST_OF_TEKKEN}": {True: "tekken"},
    rf"{_CASED[0]}{_SHORT}?|{_CASED[1]}{_SHORT}?|\p{{N}}{{1,3}}|{_REST_OF_TEKKEN}": {
        False: "gpt-4o"
    },
}
"""How text is cut before BPE → whether merges are ignored for whole words → what llama.cpp calls
it.
"""
_SPACE = "\u2581"

Pairs = list[list[str]]


@dataclass(frozen=True)
class Vocabulary:
    """`tokenizer.ggml.*` of a GGUF file."""

    model: str
    """`gpt2`: byte-level BPE; `llama`: as SentencePiece does it."""
    tokens: list[str]
    types: list[int]
    pre: str = "default"
    merges: list[str] = field(default_factory=list)
    """Empty for `llama`, which goes by scores."""
    scores: list[float] = field(default_factory=list)
    values: dict[str, int | bool | str] = field(default_factory=dict)
    """The rest, by names without `tokenizer.ggml.`."""
    chat_template: str | None = None
    notes: tuple[str, ...] = ()


def read_vocabulary(folder: Path, rows: int, chat_template: str = "") -> Vocabulary:
    """The vocabulary of a model's folder.

    `rows`: of its embedding. `chat_template`: in place of the tokenizer's own.

    Raises SpecError for a tokenizer that llama.cpp has not, or that cannot be recognised.
    """
    tokenizer: Any = load_tokenizer(str(folder), chat_template)
    given = read_document(folder / "tokenizer.json")
    tokens, types = _tokens(given, tokenizer, rows)
    values = _special(tokenizer, folder)
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
    common: dict[str, Any] = {"tokens": tokens, "types": types, "chat_template": template}
    if given["model"].get("type") != "BPE":
        raise refusal(
            f"tokenizer.json: a tokenizer of type {given['model'].get('type')!r} is not exported, "
            "only BPE"
        )
    steps = _steps(given.get("pre_tokenizer"))
    if any(step["type"] == "ByteLevel" for step in steps):
        notes = _require_plain_text(given.get("normalizer"))
        pre = pre_tokenizer(steps, ignore_merges=bool(given["model"].get("ignore_merges")))
        merges = [" ".join(pair) for pair in _merges(given)]
        if not merges:
            raise refusal(
                "the tokenizer has no merges, without which llama.cpp loads no byte-level BPE"
            )
        return Vocabulary(
            model="gpt2", pre=pre, merges=merges, values=values, notes=notes, **common
        )
    prefix = _space_before(given, steps)
    scores = scores_of(tokens, _merges(given), types)
    return Vocabulary(
        model="llama", scores=scores, values={**values, "add_space_prefix": prefix}, **common
    )


def pre_tokenizer(steps: Sequence[Mapping[str, Any]], *, ignore_merges: bool) -> str:
    """llama.cpp's name for the way in which a byte-level tokenizer cuts text.

    Raises SpecError if it has none.
    """
    before = steps[:-1]
    last = steps[-1]
    if last["type"] == "ByteLevel" and not last.get("add_prefix_space"):
        by_itself = last.get("use_regex", True)
        if not before and by_itself and not ignore_merges:
            return "gpt-2"
        if (
            len(before) == 1
            and before[0]["type"] == "Digits"
            and by_itself
            and before[0].get("individual_digits")
        ):
            return "smollm"
        if len(before) == 1 and before[0]["type"] == "Split" and not by_itself:
            split = before[0]
            known = _BY_REGEX.get(str(split["pattern"].get("Regex")), {}).get(ignore_merges)
            if known and split.get("behavior") == "Isolated" and not split.get("invert"):
                return known
    shown = json.dumps(list(steps))[:300]
    raise refusal(
        f"the tokenizer splits text in a way that llama.cpp does not know by name: {shown}"
    )


def scores_of(tokens: Sequence[str], merges: Pairs, types: Sequence[int]) -> list[float]:
    """A score for each token, by which SentencePiece's order of merges is that of the list.

    llama.cpp joins the two neighbours that make the token of the highest score, whatever they are.
    That is BPE if merges are listed by the token that they make, and if every way to make a token
    is listed. Raises SpecError otherwise.
    """
    place: dict[str, int] = {}
    last = -1
    for left, right in merges:
        rank = place.setdefault(left + right, len(place))
        if rank < last:
            raise refusal(
                "the tokenizer's merges are not in the order of the tokens that they make, as "
                "SentencePiece has them"
            )
        last = rank
    there = set(tokens)
    listed = {(left, right) for left, right in merges}
    for token in place:
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            if (
                pair[0] in there
                and pair[1] in there
                and pair not in listed
                and _is_made(pair, place)
            ):
                raise refusal(
                    f"the tokenizer makes {token!r} in fewer ways than SentencePiece would"
                )
    return [
        -float(place[token]) if token in place else 0.0 if kind != TokenType.NORMAL else -1e6
        for token, kind in zip(tokens, types, strict=True)
    ]


def _is_made(pair: tuple[str, str], place: Mapping[str, int]) -> bool:
    return all(len(part) == 1 or part in place for part in pair)


def _merges(given: Mapping[str, Any]) -> Pairs:
    return [
        pair.split(" ") if isinstance(pair, str) else list(pair)
        for pair in given["model"]["merges"]
    ]


def _steps(pre: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if pre is None:
        return []
    return list(pre["pretokenizers"]) if pre["type"] == "Sequence" else [pre]


def _tokens(given: Mapping[str, Any], tokenizer: Any, rows: int) -> tuple[list[str], list[int]]:
    """Every row's token and its type, as gguf.TokenType."""
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    if by_id and max(by_id) >= rows:
        raise refusal(
            f"the tokenizer has token {max(by_id)}, and the model only {rows} rows of embeddings"
        )
    added = {one["id"]: one for one in given.get("added_tokens", [])}
    unknown = given["model"].get("unk_token")
    tokens = []
    types = []
    for index in range(rows):
        token = by_id.get(index)
        tokens.append(f"[PAD{index}]" if token is None else token)
        if token is None:
            types.append(TokenType.UNUSED)
        elif token == unknown:
            types.append(TokenType.UNKNOWN)
        elif index in added:
            types.append(TokenType.CONTROL if added[index]["special"] else TokenType.USER_DEFINED)
        elif given["model"].get("byte_fallback") and len(token) == 6 and token.startswith("<0x"):
            types.append(TokenType.BYTE)
        else:
            types.append(TokenType.NORMAL)
    return tokens, [int(kind) for kind in types]


def _special(tokenizer: Any, folder: Path) -> dict[str, int | bool | str]:
    """Ids of special tokens, and which are put around a text."""
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "unknown": tokenizer.unk_token_id,
    }
    ids["padding"] = tokenizer.pad_token_id
    values: dict[str, int | bool | str] = {
        f"{name}_token_id": index for name, index in ids.items() if index is not None
    }
    around = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    more = len(around[0]) - len(around[1])
    values["add_bos_token"] = more > 0 and around[0][0] == ids["bos"]
    values["add_eos_token"] = more > 0 and around[0][-1] == ids["eos"]
    ends = (document_or_none(folder / "generation_config.json") or {}).get("eos_token_id")
    others = [
        end
        for end in (ends if isinstance(ends, list) else [ends])
        if isinstance(end, int) and end != ids["eos"]
    ]
    if others:
        values["eot_token_id"] = others[0]
    return values


def _require_plain_text(normalizer: Mapping[str, Any] | None) -> tuple[str, ...]:
    if normalizer is None or normalizer.get("normalizers") == []:
        return ()
    if normalizer["type"] == "NFC":
        return ("llama.cpp does not compose characters (NFC), as this tokenizer does first",)
    raise refusal(
        f"the tokenizer changes text before it is cut ({normalizer['type']}), which llama.cpp "
        "does not"
    )


def _space_before(given: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a space is put before a text.

    Raises SpecError unless the rest is what SentencePiece does.
    """
    if not given["model"].get("byte_fallback"):
        raise refusal(
            "a BPE tokenizer that works neither on bytes nor falls back to them is not exported"
        )
    normalizer = given.get("normalizer") or {}
    changes = list(normalizer.get("normalizers", [normalizer] if normalizer else []))
    prefix = False
    for change in changes:
        if change["type"] == "Prepend" and change["prepend"] == _SPACE:
            prefix = True
        elif not (
            change["type"] == "Replace"
            and change["content"] == _SPACE
            and change["pattern"].get("String") == " "
        ):
            raise refusal(
                f"the tokenizer changes text before it is cut ({change['type']}), which llama.cpp "
                "does not"
            )
    for step in steps:
        if (
            step["type"] == "Metaspace"
            and step.get("replacement") == _SPACE
            and not step.get("split", True)
        ):
            prefix = prefix or step.get("prepend_scheme") in ("first", "always")
        elif not (
            step["type"] == "Split" and step["pattern"].get("String") == " "
        ):  # of which none is left by then
            raise refusal(
                f"the tokenizer cuts text by {step['type']}, which SentencePiece in llama.cpp "
                "does not"
            )
    return prefix
