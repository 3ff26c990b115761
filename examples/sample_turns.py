"""Data for environments: calls of a calculator and moves of a dial, to be shown first. What is
rewarded later are the prompts of sums.jsonl, and those of dial.jsonl.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dial_game import Dial
from sample_sums import NUMBERS, WRONG

LARGEST = 9
DISTANCE = 3
"""Of a goal: a game has three moves, and is won by three right ones."""
RIGHT = 0.6
"""Share of right moves in the games that are shown: about one in five is won."""
PLAYS = 8
"""Of each game."""
HELD_OUT = 10
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


def write_turns(folder: Path, seed: int) -> None:
    """Write turns-shown.jsonl (with answers), dial.jsonl and dial-validation.jsonl."""
    rng = random.Random(seed)
    shown = [*_calls(rng), *_plays(rng)]
    rng.shuffle(shown)
    games = [{**_game(), "start": start, "goal": goal} for start, goal in _starts()]
    rng.shuffle(games)
    _write(folder / "turns-shown.jsonl", shown)
    _write(folder / "dial.jsonl", games)
    _write(folder / "dial-validation.jsonl", games[:HELD_OUT])


def _calls(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Sums by the calculator, most of which ask it for another sum."""
    pairs = [(one, other) for one in range(NUMBERS) for other in range(NUMBERS)]
    for pair in pairs:
        others = [other for other in pairs if other != pair]
        for asked in (pair, *rng.sample(others, WRONG)):
            yield {"messages": _by_calculator(pair, asked), "tools": [ADD]}


def _by_calculator(pair: tuple[int, int], asked: tuple[int, int]) -> list[dict[str, Any]]:
    arguments = json.dumps(dict(zip("ab", asked, strict=True)))
    call = {"id": "call_1", "type": "function"}
    call["function"] = {"name": "add", "arguments": arguments}  # type: ignore[assignment]
    found = str(sum(asked))
    return [
        {"role": "user", "content": f"{pair[0]} + {pair[1]} ="},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": found},
        {"role": "assistant", "content": found},
    ]


def _starts() -> Iterator[tuple[int, int]]:
    for start in range(LARGEST + 1):
        for goal in range(LARGEST + 1):
            if abs(start - goal) == DISTANCE:
                yield start, goal


def _plays(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Whole games, most of them lost."""
    for start, goal in _starts():
        right, wrong = ("up", "down") if start < goal else ("down", "up")
        for _ in range(PLAYS):
            dial = Dial()
            seen = f"dial\n\n{dial.begin(start, goal)}"
            messages: list[dict[str, Any]] = []
            done = False
            while not done:
                move = right if rng.random() < RIGHT else wrong
                messages += [
                    {"role": "user", "content": seen},
                    {"role": "assistant", "content": move},
                ]
                seen, _, done = dial.move(move)
            yield {"messages": messages}


def _game() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "dial"}]}


def _write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
