"""Near copies, and words that records share with what a model is measured by."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ft_service.data import record_comparison
from ft_service.data.record_comparison import (
    RECORD_BYTES,
    RecordComparison,
    References,
    asked_by,
    most_records,
    suite_texts,
    words_of,
)
from ft_service.data.sample_kinds import (
    Conversation,
    Pair,
    Picture,
    PromptCompletion,
    Record,
    Text,
)
from ft_service.data.statistics import Comparison

VOCABULARY = [f"word{number}" for number in range(4000)]


def texts(count: int, words: int = 60, seed: int = 0) -> list[list[str]]:
    drawn = random.Random(seed)
    return [drawn.choices(VOCABULARY, k=words) for _ in range(count)]


def chat(asked: str, answer: str, system: str = "", **options: Any) -> Conversation:
    turns = [("system", system)] * bool(system) + [("user", asked), ("assistant", answer)]
    messages = tuple({"role": role, "content": content} for role, content in turns)
    return Conversation(messages, (*(0,) * (len(turns) - 1), 1), **options)


def compared(records: Iterable[Record], **options: Any) -> tuple[RecordComparison, Comparison]:
    comparison = RecordComparison(**options)
    for number, record in enumerate(records, 1):
        comparison.add(number, record)
    return comparison, comparison.finish()


def near(*records: Record) -> set[int]:
    return compared(records)[0].copies


def changed(words: Sequence[str], *places: int) -> list[str]:
    return [f"other{place}" if place in places else word for place, word in enumerate(words)]


def similarity(first: Sequence[str], second: Sequence[str]) -> float:
    grams = [
        {tuple(own[start : start + 5]) for start in range(len(own) - 4)} for own in (first, second)
    ]
    return len(grams[0] & grams[1]) / len(grams[0] | grams[1])


def test_planted_near_copies_are_found_and_no_others() -> None:
    """By the exact similarity of their 5-grams: more than 0.9 is found, less than 0.65 is not."""
    records = texts(1500)
    wanted, excused = set[int](), set[int]()
    drawn = random.Random(1)
    for number in range(1500, 1800):
        source = records[drawn.randrange(1500)]
        planted = changed(source, *drawn.sample(range(60), drawn.choice((0, 1, 2, 4, 8))))
        alike = similarity(source, planted)
        if alike > 0.9:
            wanted.add(number + 1)
        elif alike > 0.65:
            excused.add(number + 1)
        records.append(planted)
    found = near(*(Text(" ".join(words)) for words in records))
    assert len(wanted) > 50
    assert wanted <= found
    assert found <= wanted | excused


def test_what_is_learned_must_be_nearly_the_same() -> None:
    asked = " ".join(texts(1)[0])
    answer, other = (" ".join(words) for words in texts(2, 12, seed=3))
    assert near(chat(asked, answer), chat(asked, answer.upper())) == {2}
    assert near(chat(asked, answer), chat(asked, other)) == set()
    pair = Pair(chat(asked, answer), chat(asked, other))
    assert near(pair, Pair(chat(asked, other), chat(asked, "No."))) == set()
    assert near(pair, pair) == {2}
    good = PromptCompletion(asked, answer, label=True)
    assert near(good, replace(good, label=False)) == set()
    images = [(Picture.of(bytes([number])),) for number in range(2)]
    shown = [chat(asked, answer, images=own) for own in images]
    assert near(*shown) == set()
    assert near(shown[0], shown[0]) == {2}


def test_a_prompts_template_does_not_make_records_alike() -> None:
    system, template = (" ".join(words) for words in texts(2, 300, seed=5))
    short = [" ".join(words) for words in texts(60, 30, seed=6)]
    with_system = [chat(words, words, system=system) for words in short]
    assert near(*with_system) == set()
    templated = [chat(f"{template}\n{words}", words) for words in short]
    assert near(*templated) == set()
    assert near(*templated, templated[7]) == {61}


def test_words_are_those_of_scripts_without_spaces_too() -> None:
    assert words_of("What's 12+7? Nein.") == [*("what", "'", "s", "12", "+", "7", "?", "nein", ".")]
    assert words_of("東京は abc") == ["東", "京", "は", "abc"]


def test_records_overlap_with_texts_of_which_they_have_half_the_runs_or_a_short_whole() -> None:
    held_out = texts(3, 40, seed=8)
    references = References.of(
        {
            "held.jsonl": [" ".join(words) for words in held_out],
            "prompts": ["What is the capital of Freedonia?", "Hi there"],
        }
    )
    before, after, other = texts(3, 20, seed=9)
    records = [
        Text(" ".join([*before, *held_out[0][5:31], *after])),  # 14 of 28 runs
        Text(" ".join([*other, *held_out[1][5:30], *other])),
        chat("what IS the capital of Freedonia?", "Fredville."),
        chat("Hi there", "Hello"),
        Text(" ".join(held_out[2])),
    ]
    comparison, found = compared(records, references=references)
    assert {name: lines.first for name, lines in found.overlaps.items()} == {
        "held.jsonl": (1, 5),
        "prompts": (3,),
    }
    assert comparison.left_out == {1, 3, 5}
    assert found.compared is None


def test_a_run_that_many_records_or_several_texts_have_is_boilerplate() -> None:
    run = " ".join(texts(1, 20, seed=10)[0])
    own = [" ".join(words) for words in texts(12, 20, seed=11)]

    def overlaps(records: list[str], *held_out: str) -> tuple[int, ...]:
        references = References.of({"held.jsonl": held_out})
        _, found = compared(map(Text, records), references=references)
        return found.overlaps["held.jsonl"].first if found.overlaps else ()

    templated = [f"{run} {words}" for words in own]
    assert overlaps(templated[:3], run) == (1, 2, 3)
    assert overlaps(templated, run) == ()
    assert overlaps(templated[1:4], f"{run} {own[5]}", f"{run} {own[0]}") == ()
    assert overlaps(templated, templated[0], templated[5], templated[5]) == (1, 6)


def test_what_a_record_asks_is_what_stands_before_its_answer() -> None:
    asked = chat("Who?", "I.", system="Be brief.")
    assert asked_by(asked) == "Who?"
    assert asked_by(Pair(asked, asked)) == "Who?"
    assert asked_by(PromptCompletion("Who?", "I.")) == "Who?"
    assert asked_by(Text("All of it.")) == "All of it."


def test_suites_are_known_by_what_they_ask() -> None:
    references = References.of(suite_texts())
    assert {"the suite arithmetic", "the suite facts"} <= set(references.names)
    _, found = compared([chat("The capital of France is", "Paris.")], references=references)
    assert set(found.overlaps) == {"the suite facts"}


def test_records_time_and_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [Text(" ".join(words)) for words in texts(5)]
    comparison, found = compared([*records, records[0]], most=5)
    assert (found.compared, comparison.copies) == (5, set())
    assert compared(records, seconds=0.0)[1].compared == 1
    references = References.of({"held.jsonl": [" ".join(texts(1)[0])]})
    monkeypatch.setattr(record_comparison, "MOST_HITS", 10)
    assert compared(records, references=references)[1].compared == 1
    monkeypatch.setattr(record_comparison, "MOST_GRAMS", 10)
    references = References.of({"held.jsonl": ["a b c d", " ".join(texts(1)[0])]})
    assert compared(records, references=references)[1].compared == 5
    assert most_records(4 * RECORD_BYTES * 7) == 7
    assert most_records(2**60) == record_comparison.MOST_RECORDS


def test_a_record_takes_the_memory_that_is_said() -> None:
    """Measured in a process of its own: the most that it had."""
    script = """
import random, resource
from ft_service.data.record_comparison import RECORD_BYTES, RecordComparison
from ft_service.data.sample_kinds import Text
def used():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
drawn = random.Random(0)
def add(comparison, count):
    for number in range(count):
        comparison.add(number, Text(" ".join(str(drawn.random()) for _ in range(4))))
comparison = RecordComparison()
add(comparison, 1000)
before = used()
add(comparison, 10_000)
print((used() - before) / 10_000 / RECORD_BYTES)
"""
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert float(said) < 1
