"""Verdicts on one option of another tool, and the small rules from which the tables are made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ft_service.errors import SpecError
from ft_service.spec import parse_request


@dataclass(frozen=True)
class Taken:
    """The option's meaning is kept, by options of ours: dotted name → value."""

    options: Mapping[str, Any]
    remark: str = ""


@dataclass(frozen=True)
class NotNeeded:
    """Leaving the option out changes nothing here."""

    reason: str


@dataclass(frozen=True)
class NotSupported:
    """The option asks for what this service does not do. `reason` says why, and what to do instead."""

    reason: str
    changes_result: bool = True
    """Whether the model that results may be another without it."""


Verdict = Taken | NotNeeded | NotSupported


class Source(dict[str, Any]):
    """Every option of a file by its dotted name, for rules that look at more than one."""

    def number(self, *names: str) -> int | None:
        """The first of some options that is a whole number. None: none is."""
        for name in names:
            value = as_number(self.get(name))
            if value is not None:
                return int(value)
        return None


Rule = Callable[[Any, Source], Verdict]
Table = Mapping[str, Rule]
"""Dotted name → rule. A name that ends in `.*` speaks for every option below it that has no rule of its own."""

OFF: tuple[Any, ...] = (None, False, "", "no", "none", "NO", "off", 0, [], {})


def needless(reason: str) -> Rule:
    return lambda value, source: NotNeeded(reason)


BY_LENGTH = needless("packed rows have no padding that it would save; with packing: false training.group_by_length does")


def refused(reason: str, *, changes_result: bool = True) -> Rule:
    return lambda value, source: NotSupported(reason, changes_result)


def takes(name: str, convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    return lambda value, source: Taken({name: convert(value)})


def means(**options: Any) -> Rule:
    """A rule: taken over as fixed options. `__` in a name stands for the dot."""
    return lambda value, source: Taken({name.replace("__", "."): given for name, given in options.items()})


def unless(usual: Collection[Any], reason: str, otherwise: str, *, changes_result: bool = True) -> Rule:
    """A rule: not needed at its usual values, not supported at any other."""
    otherwise_not = NotSupported(otherwise, changes_result)
    return lambda value, source: NotNeeded(reason) if as_plain(value) in usual else otherwise_not


def unless_off(otherwise: str, *, changes_result: bool = True) -> Rule:
    return unless(OFF, "it is off here too", otherwise, changes_result=changes_result)


def switch(on: Rule, off: Rule | None = None) -> Rule:
    """A rule of two: one where the option is on, another where it is off (default: not needed)."""
    without = off or needless("it is off here too")
    return lambda value, source: (without if as_plain(value) in OFF else on)(value, source)


def choice(rules: Mapping[str, Rule], otherwise: Rule) -> Rule:
    """A rule by value, as text without case; YAML reads an unquoted `no` as false."""

    def pick(value: Any, source: Source) -> Verdict:
        key = "no" if as_plain(value) is False else str(value).lower()
        return rules.get(key, otherwise)(value, source)

    return pick


def as_plain(value: Any) -> Any:
    """A value, with the text that tools write for a truth value replaced by that truth value."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value


def as_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def lookup(table: Table, name: str) -> Rule | None:
    """The rule for a dotted name: its own, or that of the nearest section above it that has one."""
    if name in table:
        return table[name]
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        rule = table.get(".".join(parts[:length]) + ".*")
        if rule is not None:
            return rule
    return None


def flatten(table: Table, body: Mapping[str, Any], prefix: str = "") -> Source:
    """Options by dotted name. A mapping is entered where the table knows options below it."""
    options = Source()
    for key, value in body.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and any(known.startswith(f"{name}.") for known in table):
            options.update(flatten(table, value, f"{name}."))
        else:
            options[name] = value
    return options


def verdict_on(table: Table, source: Source, name: str) -> Verdict:
    """The verdict on one option of a file."""
    value, rule = source[name], lookup(table, name)
    if value is None or value == {}:
        return NotNeeded("it is not set")
    if rule is None:
        return NotSupported("no option of that name is known: check its spelling, or leave it out")
    verdict = rule(value, source)
    return available(verdict) if isinstance(verdict, Taken) else verdict


def available(taken: Taken) -> Taken | NotSupported:
    """`taken` where this version accepts such options, else its refusal in the words of the spec's own validation."""
    try:
        parse_request(body_of(taken.options))
    except SpecError as error:
        if error.code == "unknown_parameter":
            return NotSupported(f"this version has no such option ({', '.join(taken.options)}): leave it out")
        return NotSupported(error.message.removesuffix("."))
    return taken


def body_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """A create body of dotted options, with placeholders for what no other tool's file says."""
    body: dict[str, Any] = {"model": "MODEL", "training_file": "TRAINING.jsonl"}
    for name, value in options.items():
        section, _, key = name.rpartition(".")
        target = body.setdefault(section, {}) if section else body
        target[key] = value
    return body


def samples_per_step(value: Any, source: Source, micro: str, ranks: str | None = None) -> Verdict:
    """Options for gradient accumulation: a step is defined by its samples here, not by its rounds."""
    rounds, size, world = as_number(value), source.number(micro), source.number(ranks) if ranks else None
    if rounds is None:
        return NotNeeded("a step's micro-batches follow from training.batch_size and the number of ranks")
    if size is None or world is None:
        shown = f"{size} x {int(rounds)}" if size else f"samples of a micro-batch x {int(rounds)}"
        return NotSupported(f"a step is defined by its samples over all ranks: set training.batch_size to {shown} x ranks")
    return Taken({"training.batch_size": size * int(rounds) * world}, f"{size} x {int(rounds)} x {world} ranks")


CHOSEN = "training.tokens_per_micro_batch: auto takes what fits"
"""In place of another tool's size of micro-batches."""


def micro_batch(value: Any, source: Source, accumulation: str) -> Verdict:
    """Options for the samples of a micro-batch: they count in a step's samples, and how many go through the model at once is
    chosen by memory.
    """
    if source.number(accumulation) is not None:
        return NotNeeded(f"{CHOSEN}; {accumulation} tells of a step")
    return NotSupported(
        f"{CHOSEN}; a step is defined by its samples over all ranks: set training.batch_size to {value} x ranks"
    )
