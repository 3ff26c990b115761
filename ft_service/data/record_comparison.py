"""Records that are nearly copies of earlier ones, and records that share a run of words with what a
model is measured by.

Words are what `words_of` makes of a text, without a base's tokenizer. Two records are near copies
if their 5-grams of words, and those of their answers, have a Jaccard similarity of 0.8 or more,
which MinHash estimates (128 permutations; candidates by locality-sensitive hashing). A record
overlaps with a text if it has half of the text's runs of 13 words, or the whole of a shorter text.
A run that several texts or many records have is boilerplate, and counts for nothing. 13 words, and
how many records make boilerplate, as in Brown et al., "Language Models are Few-Shot Learners",
2020, appendix C; half, since questions of one task begin and end alike.

Memory and time are bounded: RECORD_BYTES for each of so many records, and MOST_GRAMS of the texts.
"""

from __future__ import annotations

import json
import re
import time
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from math import inf
from typing import Any

from rensa import RMinHash, RMinHashLSH  # pyright: ignore[reportAttributeAccessIssue]

from ft_service.data.sample_kinds import (
    Conversation,
    GradedPrompt,
    Pair,
    PromptCompletion,
    Record,
    Text,
)
from ft_service.data.statistics import Comparison, Lines

GRAM = 5
"""Words of a gram by which records are compared with each other."""
RUN = 13
"""Words of a run by which a record is compared with a text."""
OVERLAP = 0.5
"""Share of a text's runs that a record has if they overlap."""
SHORTEST = 4
"""Words of the shortest text that is looked for in records."""
SIMILAR = 0.8
BANDS = 16
"""Of 8 permutations each: 95 % of the pairs with a similarity of 0.8 become candidates."""
PERMUTATIONS = 128
ANSWER_PERMUTATIONS = 64
MOST_RECORDS = 100_000
RECORD_BYTES = 3072
"""Memory of a record that is compared with later ones."""
MOST_GRAMS = 500_000
"""Runs of words of the texts, in some 50 MB."""
MOST_CHARACTERS = 100_000
"""Characters of a record that are looked at."""
SAMPLE = 1000
SAMPLE_WORDS = 200_000
"""Records at a file's beginning, and their words, by which boilerplate is known."""
COMMON_SHARE = 0.1
COMMON_LEAST = 20
"""A gram of more of these records than both is boilerplate: a part of a prompt's template."""
BOILERPLATE = 10
"""A run of words in more records than this is boilerplate."""
MOST_HITS = 4_000_000
"""Runs of all records that some text has too, in 32 MB."""
_SHARED = -1
_SEED = 1
_BY_CHARACTER = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Letters of scripts without spaces between words: each is a word."""
_WORD = re.compile(rf"[{_BY_CHARACTER}]|[^\W{_BY_CHARACTER}]+|[^\w\s]")


def words_of(text: str) -> list[str]:
    """Words, numbers and signs of a text's beginning, in lower case."""
    return _WORD.findall(text[:MOST_CHARACTERS].lower())


def most_records(memory_bytes: int) -> int:
    """How many records may be compared in a quarter of some memory."""
    return max(1, min(MOST_RECORDS, memory_bytes // 4 // RECORD_BYTES))


@cache
def suite_texts() -> Mapping[str, tuple[str, ...]]:
    """What the suites of `ft eval` ask, by their names."""
    folder = files("ft_service.data").joinpath("suites")
    found = sorted((one for one in folder.iterdir() if one.name.endswith(".jsonl")), key=str)
    return {
        f"the suite {one.name.removesuffix('.jsonl')}": tuple(
            json.loads(line)["query"] for line in one.read_text(encoding="utf-8").splitlines()
        )
        for one in found
    }


class References:
    """Runs of words of the texts that a model is measured by."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.owners: list[int] = []
        """Number of the name of each text that has long runs."""
        self.is_whole = True
        """Whether all texts are known, and not the first MOST_GRAMS runs alone."""
        self.long: dict[int, int] = {}
        """Hash of a run of RUN words → number of its text; _SHARED: several texts have it."""
        self._short: dict[int, dict[int, int]] = {}
        """Words of a shorter text → its hash → number of its name."""
        self._known: set[int] = set()

    @classmethod
    def of(cls, texts: Mapping[str, Iterable[str]]) -> References:
        """`texts`: by the name that messages have for where they are."""
        references = cls()
        for name, own in texts.items():
            for text in own:
                references.add(name, text)
        return references

    def add(self, name: str, text: str) -> None:
        words = words_of(text)
        whole = hash(tuple(words))
        if len(words) < SHORTEST or whole in self._known:
            return
        if len(self.long) + len(words) > MOST_GRAMS:
            self.is_whole = False
            return
        self._known.add(whole)
        if name not in self.names:
            self.names.append(name)
        number = self.names.index(name)
        if len(words) < RUN:
            self._short.setdefault(len(words), {}).setdefault(whole, number)
            return
        for run in set(_hashed(words, RUN)):
            self.long[run] = _SHARED if run in self.long else len(self.owners)
        self.owners.append(number)

    def found_short(self, words: Sequence[str]) -> set[int]:
        """Numbers of the names of short texts that a record has."""
        return {
            known[run]
            for length, known in self._short.items()
            for run in _hashed(words, length)
            if run in known
        }

    def found_long(self, words: Sequence[str]) -> set[int]:
        """Hashes of the runs that a record and one text have."""
        if not self.long:
            return set()
        return {run for run in _hashed(words, RUN) if self.long.get(run, _SHARED) != _SHARED}


@dataclass(frozen=True)
class _Compared:
    """A record, as it is compared with others."""

    number: int
    words: list[str]
    answer: list[str]
    tag: int
    """Equal for records with the same images and label."""
    is_copy: bool


@dataclass
class RecordComparison:
    """Compares the records of a file, one after the other, with earlier ones and with texts."""

    references: References = field(default_factory=References)
    most: int = MOST_RECORDS
    """Records that are compared; later ones are not."""
    seconds: float = inf
    """Time after which no more are."""
    records: int = 0
    """That were compared."""
    is_whole: bool = True
    """Whether all were."""
    copies: set[int] = field(default_factory=set)
    """Numbers of the records that are copies of an earlier one, or nearly."""
    near: list[int] = field(default_factory=list)
    """Numbers of those that are so nearly."""
    overlaps: dict[str, set[int]] = field(default_factory=dict)
    """Name of a text → numbers of the records that share words with it."""
    _kept: list[tuple[RMinHash, RMinHash, int]] = field(default_factory=list)
    _sample: list[_Compared] | None = field(default_factory=list)
    _sample_words: int = 0
    _common: Collection[int] = ()
    _hits: dict[int, array[int]] = field(default_factory=dict)
    """Number of a record → some of the long runs that it shares."""
    _counts: Counter[int] = field(default_factory=Counter)
    """Records that have a long run."""
    _held: int = 0

    def __post_init__(self) -> None:
        self._index = RMinHashLSH(SIMILAR, PERMUTATIONS, BANDS)
        self._spent = 0.0

    def add(self, number: int, record: Record, *, is_copy: bool = False) -> None:
        """Compare a record. `number`: of those of the file; `is_copy`: it is known to be one."""
        is_full = self.records >= self.most or self._held > MOST_HITS
        if is_full or self._spent > self.seconds:
            self.is_whole = False
            return
        began = time.perf_counter()
        self.records += 1
        whole, answer, tag = _texts(record)
        own = _Compared(number, words_of(whole), words_of(answer), tag, is_copy)
        self._find_shared(own)
        if is_copy:
            self.copies.add(number)
        elif self._sample is None:
            self._compare(own)
        else:
            self._sample.append(own)
            self._sample_words += len(own.words)
            if len(self._sample) >= SAMPLE or self._sample_words >= SAMPLE_WORDS:
                self._end_sample()
        self._spent += time.perf_counter() - began

    def finish(self) -> Comparison:
        """What was found, once the last record was added."""
        self._end_sample()
        owners = self.references.owners
        wholes = self._by_text(self.references.long)
        for number, hits in self._hits.items():
            for text, count in self._by_text(hits).items():
                if count >= OVERLAP * wholes[text]:
                    self._overlap(owners[text], number)
        self._hits = {}
        overlaps = {name: Lines.of(sorted(own)) for name, own in sorted(self.overlaps.items())}
        compared = None if self.is_whole and self.references.is_whole else self.records
        return Comparison(Lines.of(sorted(self.near)), overlaps, compared)

    def ends_if(self, is_late: bool) -> bool:
        """Whether no more records are compared, for one that stops reading then."""
        self.is_whole = self.is_whole and not is_late
        return not self.is_whole

    @property
    def left_out(self) -> set[int]:
        """Numbers of the records without which a file has neither copies nor overlaps."""
        return self.copies.union(*self.overlaps.values())

    def _find_shared(self, own: _Compared) -> None:
        for name in self.references.found_short(own.words):
            self._overlap(name, own.number)
        found = self.references.found_long(own.words)
        self._counts.update(found)
        self._held += len(found)
        if found:
            self._hits[own.number] = array("q", found)

    def _by_text(self, runs: Iterable[int]) -> Counter[int]:
        """Number of a text → how many of the runs are its own alone, and no boilerplate."""
        long = self.references.long
        own = (long[run] for run in runs if self._counts[run] <= BOILERPLATE)
        return Counter(text for text in own if text != _SHARED)

    def _overlap(self, name: int, number: int) -> None:
        self.overlaps.setdefault(self.references.names[name], set()).add(number)

    def _end_sample(self) -> None:
        """Learn what is boilerplate from the first records, and compare them."""
        if self._sample is None:
            return
        counts = Counter[int]()
        for own in self._sample:
            counts.update(set(_hashed(own.words, GRAM)))
        most = max(COMMON_LEAST, COMMON_SHARE * len(self._sample))
        self._common = {gram for gram, count in counts.items() if count > most}
        sample = self._sample
        self._sample = None
        for own in sample:
            self._compare(own)

    def _compare(self, own: _Compared) -> None:
        whole = RMinHash(num_perm=PERMUTATIONS, seed=_SEED)
        whole.update(self._grams(own.words))
        answer = RMinHash(num_perm=ANSWER_PERMUTATIONS, seed=_SEED)
        answer.update(_joined(own.answer, GRAM))
        for key in self._index.query(whole):
            other, other_answer, tag = self._kept[key]
            if (
                tag == own.tag
                and whole.jaccard(other) >= SIMILAR
                and answer.jaccard(other_answer) >= SIMILAR
            ):
                self.near.append(own.number)
                self.copies.add(own.number)
                return
        self._index.insert(len(self._kept), whole)
        self._kept.append((whole, answer, own.tag))

    def _grams(self, words: list[str]) -> list[str]:
        """The grams of a record that are no boilerplate; all, if all are."""
        if self._common:
            runs = zip(_joined(words, GRAM), _hashed(words, GRAM), strict=True)
            if own := [gram for gram, run in runs if run not in self._common]:
                return own
        return list(_joined(words, GRAM))


def _runs(words: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    """All runs of so many words; the whole, if it has fewer."""
    if len(words) < length:
        return iter([tuple(words)])
    return zip(*(words[start:] for start in range(length)), strict=False)


def _hashed(words: Sequence[str], length: int) -> Iterator[int]:
    return map(hash, _runs(words, length))


def _joined(words: Sequence[str], length: int) -> Iterator[str]:
    return map(" ".join, _runs(words, length))


def _texts(record: Record) -> tuple[str, str, int]:
    """A record's text without what the system says, which records share; its answers; and its
    tag.
    """
    match record:
        case Conversation():
            shown = tuple(picture.key for picture in record.images)
            answers = zip(record.messages, record.weights, strict=True)
            learned = [message for message, weight in answers if weight]
            return _said(record.messages), _said(learned), hash((shown, record.label))
        case PromptCompletion():
            text = f"{record.prompt}\n{record.completion}"
            return text, record.completion, hash(record.label)
        case Text():
            return record.text, record.text, 0
        case Pair():
            whole, preferred, tag = _texts(record.preferred)
            _, rejected, _ = _texts(record.rejected)
            return f"{whole}\n{rejected}", f"{preferred}\n{rejected}", tag
        case GradedPrompt():
            text = _said(record.messages)
            return text, text, 0


def asked_by(record: Record) -> str:
    """What a record asks: its text before the answer that is learned; of a document, all of it."""
    match record:
        case Conversation():
            first = next(at for at, weight in enumerate(record.weights) if weight)
            return _said(record.messages[:first])
        case PromptCompletion():
            return record.prompt
        case Pair():
            return asked_by(record.preferred)
        case Text() | GradedPrompt():
            return _texts(record)[0]


def _said(messages: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(
        part for message in messages if message["role"] != "system" for part in _parts(message)
    )


def _parts(message: Mapping[str, Any]) -> Iterator[str]:
    if thoughts := message.get("reasoning_content"):
        yield thoughts
    if message["content"]:
        yield message["content"]
    for call in message.get("tool_calls") or ():
        yield json.dumps(call["function"], ensure_ascii=False)
