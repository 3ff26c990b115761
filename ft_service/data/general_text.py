"""General text and prompts, to measure what a model has forgotten.

Written for this project; licence: CC0-1.0.
"""

from __future__ import annotations

from pathlib import Path

from ft_service.spec import Prompt

LICENCE = "CC0-1.0"
_FILE = Path(__file__).with_name("general_text.txt")
_MARK = "=== "

_ASKED = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "What are the three most important things to know before buying a used car?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Translate into French: The library is closed on Sundays.",
    "A train travels 180 km in two hours. How far does it travel in five hours at the same speed?",
    "Who was Marie Curie?",
    "Give me a recipe for a simple tomato soup.",
)


def passages() -> list[str]:
    """Return the passages, of kinds that take turns: prose, facts, code, dialogue and others, in
    several languages.
    """
    _, *parts = ("\n" + _FILE.read_text(encoding="utf-8")).split("\n" + _MARK)
    return [part.partition("\n")[2].strip() for part in parts]


def prompts(*, chat: bool) -> list[Prompt]:
    """Return general prompts: as conversations, or for a base without a chat template as text to
    continue.
    """
    if chat:
        return [
            Prompt.model_validate({"messages": [{"role": "user", "content": asked}]})
            for asked in _ASKED
        ]
    return [Prompt(prompt=asked + "\n") for asked in _ASKED]
