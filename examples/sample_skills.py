"""Pre-training text of the sample base model: generic small skills in chat form.

The skills are copying, looking up a field, and answering about a short text in plain words.
Together they make the in-context copying that tuning builds on. They never write JSON, so the
base does not know the tuned task; it only knows that task's words and punctuation as loose pieces.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from sample_task import CALM, OPENINGS, ORDERS, REQUESTS, SYSTEM, URGENT, Message
from sample_words import ADJECTIVES, ANIMALS, CITIES, DAYS, MOODS, NAMES, NOUNS, TOPICS, items

ITEMS = items()

PIECES = (
    '{"',
    '":"',
    '","',
    '":',
    ',"',
    '"}',
    "}",
    "{",
    '"',
    ":",
    ",",
    ";",
    "(",
    ")",
    "=",
    "-",
    "#",
)
"""Punctuation that is only ever copied in random order."""


def _task_words() -> list[str]:
    """The words of the tuned task's messages and answers, without their sentences."""
    texts = [*OPENINGS, *ORDERS, *URGENT, *CALM, SYSTEM, *REQUESTS]
    texts += [text for group in REQUESTS.values() for text in group]
    words = set(re.findall(r"[A-Za-z]+", re.sub(r"\{\w+\}", " ", " ".join(texts))))
    return sorted(words | {"intent", "item", "urgent", "true", "false", "null"})


WORDS = sorted(
    {
        *_task_words(),
        *NAMES,
        *ADJECTIVES,
        *NOUNS,
        *(word for group in TOPICS.values() for word in group),
    }
)

Turn = tuple[str, str]
"""What the user says and what the assistant answers."""


def _number(rng: random.Random, digits: int | None = None) -> str:
    """A number of `digits` digits (2 to 6 where none is given), with no leading zero."""
    digits = digits or rng.randint(2, 6)
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


MARKS = (
    ("", "", ""),
    ("", "", ""),
    (" in quotes", '"', '"'),
    (" in brackets", "(", ")"),
    (" in dashes", "-", "-"),
    (" in stars", "*", "*"),
)
"""What the user asks for, and what then stands left and right of each value of the answer.

Marks make the base copy a word with and without a space before it."""


def copy_words(rng: random.Random) -> Turn:
    """Repeats random words and numbers."""
    words = [
        rng.choice(WORDS) if rng.random() < 0.75 else _number(rng) for _ in range(rng.randint(1, 9))
    ]
    text = rng.choice((" ", " ", ", ", "; ")).join(words)
    return rng.choice(("Repeat: ", "Say: ", "Copy this: ", "Write again: ")) + text, text


def copy_pieces(rng: random.Random) -> Turn:
    """Repeats words, numbers and punctuation in a random order without spaces between them."""
    parts: list[str] = []
    for _ in range(rng.randint(2, 7)):
        parts.append(rng.choice(PIECES))
        parts.append(rng.choice((rng.choice(WORDS), rng.choice(ITEMS), _number(rng))))
    text = "".join(parts)
    return rng.choice(("Repeat: ", "Say: ", "Copy this: ", "Write again: ")) + text, text


def quote(rng: random.Random) -> Turn:
    """Repeats a thing between the marks that the user asks for."""
    style, left, right = rng.choice(MARKS)
    text = rng.choice((rng.choice(ITEMS), rng.choice(WORDS), _number(rng)))
    return f"Put {text}{style}.", f"{left}{text}{right}"


def _fields(rng: random.Random) -> dict[str, str]:
    """Two to four named values."""
    values = {
        "name": rng.choice(NAMES),
        "city": rng.choice(CITIES),
        "item": rng.choice(ITEMS),
        "thing": rng.choice(ITEMS),
        "code": _number(rng),
        "order": _number(rng, rng.choice((4, 5, 5, 6))),
        "day": rng.choice(DAYS),
        "animal": rng.choice(ANIMALS),
        "price": _number(rng, 2),
    }
    return {key: values[key] for key in rng.sample(list(values), rng.randint(2, 4))}


def look_up(rng: random.Random) -> Turn:
    """Gives one or several of the named values, in the order in which they are asked for."""
    fields = _fields(rng)
    equals, end = rng.choice(((": ", ", "), (" = ", "; "), (" is ", ", "), (" ", ". ")))
    text = end.join(f"{key}{equals}{value}" for key, value in fields.items())
    wanted = rng.sample(list(fields), rng.randint(1, min(3, len(fields))))
    style, left, right = rng.choice(MARKS)
    if rng.random() < 0.5:
        answer = ", ".join(f"{left}{fields[key]}{right}" for key in wanted)
        return f"{text}. Give {' and '.join(wanted)}{style}.", answer
    answer = "; ".join(f"{key} is {left}{fields[key]}{right}" for key in wanted)
    return f"{text}. Tell {' and '.join(wanted)}{style}.", answer


def read_story(rng: random.Random) -> Turn:
    """Answers a question about a short text with a short sentence."""
    name = rng.choice(NAMES)
    city = rng.choice(CITIES)
    item = rng.choice(ITEMS)
    number = _number(rng)
    price = _number(rng, 2)
    day = rng.choice(DAYS)
    text = rng.choice(
        (
            f"{name} from {city} bought a {item} on {day} for {price} euros, ticket {number}.",
            f"On {day} {name} paid {price} euros for the {item}. Ticket {number}. {name} lives in "
            f"{city}.",
            f"The {item} with ticket {number} is for {name} in {city}. It costs {price} euros on "
            f"{day}.",
            f"I am {name}. In {city} I saw a {item} (ticket #{number}) and paid {price} euros "
            f"last {day}.",
        )
    )
    style, left, right = rng.choice(MARKS)
    question, answer = rng.choice(
        (
            ("Who is it?", f"It is {name}."),
            ("What is the thing?", f"The thing is the {item}."),
            (f"Which thing{style}?", f"{left}{item}{right}"),
            (f"Which ticket{style}?", f"{left}{number}{right}"),
            ("What is the ticket number?", f"The number is {number}."),
            ("Which city?", f"The city is {city}."),
            ("What is the price?", f"It is {price} euros."),
            (f"Thing and ticket{style}?", f"{left}{item}{right} / {left}{number}{right}"),
            (f"Ticket and thing{style}?", f"{left}{number}{right} / {left}{item}{right}"),
        )
    )
    return f"{text} {question}", answer


def find(rng: random.Random) -> Turn:
    """Finds the number or the item between random words."""
    words = [rng.choice(WORDS) for _ in range(rng.randint(3, 14))]
    things = {"number": _number(rng), "item": rng.choice(ITEMS)}
    kind = rng.choice(list(things))
    for thing in things.values():
        words.insert(rng.randint(0, len(words)), thing)
    style, left, right = rng.choice(MARKS)
    return f"Find the {kind}{style}: {' '.join(words)}", f"{left}{things[kind]}{right}"


def has_word(rng: random.Random) -> Turn:
    """Says whether a word is among others."""
    words = rng.sample(WORDS, rng.randint(2, 8))
    wanted = rng.choice(words) if rng.random() < 0.5 else rng.choice(WORDS)
    yes, no = rng.choice((("yes", "no"), ("true", "false")))
    answer = yes if wanted in words else no
    return f"{' '.join(words)}. Is {wanted} there, {yes} or {no}?", answer


def _facts(rng: random.Random, topic: str) -> str:
    """A sentence about a person, a thing and one word of a topic."""
    name = rng.choice(NAMES)
    item = rng.choice(ITEMS)
    word = rng.choice(TOPICS[topic])
    return rng.choice(
        (
            f"{name} talks about {word} near the {item}.",
            f"The {item} of {name} has to do with {word}.",
            f"We sat by the {item} and {name} thought of {word}, number {_number(rng)}.",
            f"Is it {word}? I gave {name} {_number(rng)} euros and the {item}.",
        )
    )


def judge(rng: random.Random) -> Turn:
    """Names the topic or the mood of a short text, or says whether it is a given one."""
    topic = rng.choice(list(TOPICS))
    mood = rng.choice(list(MOODS))
    parts = [_facts(rng, topic), rng.choice(MOODS[mood])]
    rng.shuffle(parts)
    text = " ".join(parts)
    kind, label = rng.choice((("topic", topic), ("mood", mood)))
    style, left, right = rng.choice(MARKS)
    if rng.random() < 0.5:
        return f"{text} Give the {kind}{style}.", f"{left}{label}{right}"
    if rng.random() < 0.5:
        return f"{text} Give the topic and the mood{style}.", ", ".join(
            f"{left}{label}{right}" for label in (topic, mood)
        )
    asked = label if rng.random() < 0.5 else rng.choice(list(TOPICS if kind == "topic" else MOODS))
    return f"{text} Is the {kind} {asked}, true or false?", str(asked == label).lower()


SKILLS: tuple[tuple[Callable[[random.Random], Turn], float], ...] = (
    (copy_words, 4.0),
    (copy_pieces, 3.0),
    (quote, 0.5),
    (look_up, 3.0),
    (read_story, 3.0),
    (find, 2.0),
    (has_word, 0.7),
    (judge, 3.0),
)
"""Each skill with its weight in the mixture."""

SYSTEMS = ("You are a helpful assistant.", "Answer in one line.", "Be short.")


def make_chat(rng: random.Random) -> list[Message]:
    """One chat of the mixture; half of them begin with a system message."""
    skill = rng.choices([s for s, _ in SKILLS], [w for _, w in SKILLS])[0]
    question, answer = skill(rng)
    chat: list[Message] = []
    if rng.random() < 0.5:
        chat.append({"role": "system", "content": rng.choice(SYSTEMS)})
    chat.append({"role": "user", "content": question})
    chat.append({"role": "assistant", "content": answer})
    return chat
