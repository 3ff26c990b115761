"""Tables of rules (`tables/*.yaml`) that decide on options.

A table has one of these rules for each option:

    to: OPTION [note: TEXT]     the value becomes that option of ours
    set: {OPTION: VALUE, …}     the option becomes these values
    none: TEXT                  no effect here, and why
    check: TEXT                 not taken over; the resulting model is most likely the same
    todo: TEXT                  the user must replace it by hand, or the result may differ
    lost: TEXT                  not supported, and the result may differ
    refuse: TEXT                a file with it is not converted
    rule: NAME or [NAME, …]     a function of `conversions.py` or another …`conversions.py` decides,
                                with these arguments
    values: {"VALUE, …": RULE}  by value, as text without case; else: RULE
    if_on: RULE, if_off: RULE   for values that are on, and for those that are off (default: no
                                effect)
    usual: [VALUE, …]           `none` for these values, and the rest of the rule for others
    dpo: RULE, kto: RULE, …     only for direct preference optimisation, KTO, SimPO or ORPO

A section names its source, the file of the tool that defines the options, and may list options with
the same verdict by text: `none`, `check`, `todo`, `lost`, or `check_if_on`, `todo_if_on`,
`lost_if_on`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from ft_service.convert import conversions, data_set_conversions, reinforcement_conversions
from ft_service.convert.verdicts import (
    OFF,
    ONLY_DPO,
    ONLY_KTO,
    ONLY_ORPO,
    ONLY_SIMPO,
    Lost,
    Method,
    NoEffect,
    Refused,
    Rule,
    Source,
    Taken,
    ToCheck,
    ToDo,
    Unread,
    Verdict,
    as_number,
    as_plain,
)

_TEXTS = {"none": NoEffect, "check": ToCheck, "todo": ToDo, "lost": Lost, "refuse": Refused}
UNREAD = "it is known only when the script runs"
_IT_IS_OFF = NoEffect("it is off here too")


@dataclass(frozen=True)
class Default:
    """The tool's default of an option of ours."""

    value: Any = None
    """One value, or a mapping from method to value."""
    rule: str = ""
    """The function that returns the value instead."""
    unless: tuple[str, ...] = ()
    """The tool's options that replace the default."""
    note: str = ""


@dataclass(frozen=True)
class Table:
    """The rules for the options of one tool, and its defaults."""

    name: str
    tool: str
    title: str = ""
    version: str = ""
    """The version of the tool."""
    marks: tuple[str, ...] = ()
    """Top-level names by which a file of the tool is recognised."""
    needs: tuple[str, ...] = ()
    """Names that every file of the tool has."""
    rules: Mapping[str, Rule] = field(default_factory=dict)
    """Dotted name → rule. A name that ends in `.*` is for all options below it without a rule of
    their own.
    """
    sources: Mapping[str, str] = field(default_factory=dict)
    """Dotted name → the file of the tool that defines it."""
    defaults: Mapping[str, Default] = field(default_factory=dict)
    """Dotted name of ours → the tool's default."""
    micro_batch: int | None = None
    least_batch: int | None = None
    """Samples of a step that its default of accumulation reaches.

    None: it does not accumulate unless it is told.
    """
    says_method: str = ""
    """The option that names the method; empty: it follows from `methods`."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """Options that have an effect if they are not given → the value that they then have."""
    trains_all: tuple[str, ...] = ()
    """Options that train all weights: the tool's defaults of adapters do not apply then."""
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Method → options, or `option=value`, by which a file's method is recognised if no option
    names it.
    """
    per_method: Mapping[str, str] = field(default_factory=dict)
    """Method → the table with the rules and defaults that hold for this method only
    (`for_method`).
    """
    hydra: bool = False
    """Whether Hydra reads it: values may refer to other options (`${data.seed}`), and `_target_`
    names Python classes.
    """
    answer_key: str = "reference_answer"
    """The key of a line of data that usually holds the expected answer to a prompt."""
    differs: Mapping[str, str] = field(default_factory=dict)
    """Option → the tool's behaviour if it is not given, for which there is no option of ours."""
    examples: Mapping[str, Any] = field(default_factory=dict)
    """Frequent options with example values, for docs/from-other-tools.md."""


@cache
def load_table(name: str) -> Table:
    """The table `tables/NAME.yaml`, with the tables that it extends and includes.

    Raises ValueError for an invalid rule.
    """
    text = (files("ft_service.convert") / "tables" / f"{name}.yaml").read_text(encoding="utf-8")
    given: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    rules: dict[str, Rule] = {}
    sources: dict[str, str] = {}
    defaults: dict[str, Default] = {}
    micro_batch = given.get("micro_batch")
    methods = given.get("method", {})
    per_method = given.get("per_method", {})
    for parent in map(load_table, given.get("extends", [])):
        rules |= parent.rules
        sources |= parent.sources
        defaults |= parent.defaults
        micro_batch = micro_batch or parent.micro_batch
        methods = methods or parent.methods
        per_method = per_method or parent.per_method
    for included in given.get("include", []):
        for option, rule, source in _included(**included):
            rules[option], sources[option] = rule, source
    for section in given.get("sections", []):
        for option, rule in _of_section(section, given.get("auto", "")):
            rules[option], sources[option] = rule, section["source"]
    for option, default in given.get("defaults", {}).items():
        defaults[option] = Default(**{**default, "unless": tuple(default.get("unless", ()))})
    return Table(
        name=name,
        **{key: given.get(key, "") for key in ("tool", "title", "version", "says_method")},
        **{key: tuple(given.get(key, ())) for key in ("marks", "needs", "trains_all")},
        **{key: given.get(key, {}) for key in ("absent", "differs", "examples")},
        rules=rules,
        sources=sources,
        defaults=defaults,
        micro_batch=micro_batch,
        least_batch=given.get("least_batch"),
        methods={method: tuple(names) for method, names in methods.items()},
        per_method=per_method,
        hydra=given.get("hydra", False),
        answer_key=given.get("answer_key", Table.answer_key),
    )


def for_method(table: Table, method: str) -> Table:
    """The table with what it has for this method only: `table` itself if there is nothing."""
    if method not in table.per_method:
        return table
    own = load_table(table.per_method[method])
    return replace(
        table,
        title=own.title,
        version=own.version,
        answer_key=own.answer_key,
        rules={**table.rules, **own.rules},
        sources={**table.sources, **own.sources},
        defaults={**table.defaults, **own.defaults},
        absent={**table.absent, **own.absent},
        differs={**table.differs, **own.differs},
        examples=own.examples,
    )


def _included(
    table: str, under: list[str], only: str = "", inside: bool = False
) -> Iterator[tuple[str, Rule, str]]:
    """The options, rules and sources of another table, in a section of this file or with another
    prefix.
    """
    other = load_table(table)
    for prefix in under:
        for option, rule in other.rules.items():
            if option.startswith(only):
                judged = _inside(prefix, rule) if inside else rule
                yield f"{prefix}{option.removeprefix(only)}", judged, other.sources[option]


def _inside(prefix: str, rule: Rule) -> Rule:
    return lambda value, source: rule(value, source.inside(prefix))


_LISTS = ("none", "check", "todo", "lost")


def _of_section(section: Mapping[str, Any], auto: str) -> Iterator[tuple[str, Rule]]:
    under = section.get("under", "")
    unknown = section.keys() - {
        "source",
        "under",
        "options",
        *_LISTS,
        *(f"{kind}_if_on" for kind in _LISTS),
    }
    if unknown:
        raise ValueError(f"a section has no {', '.join(sorted(unknown))}")
    for kind in _LISTS:
        for suffix in ("", "_if_on"):
            for text, names in section.get(kind + suffix, {}).items():
                rule = compile_rule({kind: text} if not suffix else {"if_on": {kind: text}})
                yield from ((f"{under}{name}", _auto(rule, auto)) for name in names)
    for names, spec in section.get("options", {}).items():
        rule = _auto(compile_rule(spec), auto)
        yield from ((f"{under}{name}", rule) for name in str(names).split(", "))


def _auto(rule: Rule, text: str) -> Rule:
    """A rule for a tool in which "auto" means the value of the surrounding trainer."""
    return (
        rule
        if not text
        else lambda value, source: NoEffect(text) if value == "auto" else rule(value, source)
    )


ONLY: Mapping[Method, NoEffect] = {
    "dpo": ONLY_DPO,
    "kto": ONLY_KTO,
    "simpo": ONLY_SIMPO,
    "orpo": ONLY_ORPO,
}
"""Method with rules of its own → what is said of an option that another method does not read; of
several the first.
"""


def compile_rule(spec: Mapping[str, Any]) -> Rule:
    """The rule that a mapping of a table describes. Raises ValueError if it is invalid."""
    if "rule" in spec:
        return _function(spec["rule"])
    if "usual" in spec:
        usual = spec["usual"]
        here = NoEffect(spec["none"])
        rest = {key: value for key, value in spec.items() if key not in ("usual", "none", "else")}
        other = compile_rule(rest | spec.get("else", {}))
        return lambda value, source: here if _is_one_of(value, usual) else other(value, source)
    if of_methods := {name: compile_rule(spec[name]) for name in ONLY if name in spec}:
        other = next(said for name, said in ONLY.items() if name in of_methods)
        return lambda value, source: (
            of_methods[source.method](value, source) if source.method in of_methods else other
        )
    if "if_on" in spec:
        on = compile_rule(spec["if_on"])
        off: Rule = (
            compile_rule(spec["if_off"]) if "if_off" in spec else lambda value, source: _IT_IS_OFF
        )
        return lambda value, source: (off if as_plain(value) in OFF else on)(value, source)
    if "values" in spec:
        return _choice(spec["values"], compile_rule(spec["else"]))
    note = spec.get("note", "")
    if "to" in spec:
        return lambda value, source: Taken({spec["to"]: _number_of_text(value)}, note)
    if "set" in spec:
        return lambda value, source: Taken(spec["set"], note)
    for key, verdict in _TEXTS.items():
        if key in spec:
            said = verdict(spec[key])
            return lambda value, source: said
    raise ValueError(f"not a rule: {spec}")


def _choice(values: Mapping[str, Mapping[str, Any]], otherwise: Rule) -> Rule:
    rules = {
        name: compile_rule(spec)
        for names, spec in values.items()
        for name in str(names).split(", ")
    }

    def pick(value: Any, source: Source) -> Verdict:
        # YAML reads an unquoted `no` as false.
        key = "no" if as_plain(value) is False else str(value).lower()
        return rules.get(key, otherwise)(value, source)

    return pick


def function_of(name: str) -> Callable[..., Verdict]:
    """The function that a table names by `rule:`. Raises AttributeError."""
    modules = (reinforcement_conversions, data_set_conversions, conversions)
    return getattr(next((module for module in modules if hasattr(module, name)), conversions), name)


def _function(named: str | list[str]) -> Rule:
    name, *arguments = [named] if isinstance(named, str) else named
    function = function_of(name)
    return function if not arguments else lambda value, source: function(value, source, *arguments)


def _is_one_of(value: Any, usual: list[Any]) -> bool:
    plain = as_plain(value)
    number = as_number(value)
    same = any(
        plain == item and isinstance(plain, bool) == isinstance(item, bool) for item in usual
    )
    return same or (number is not None and number in map(as_number, usual))


def _number_of_text(value: Any) -> Any:
    """The value; text that is a number becomes that number, since YAML reads `1e-4`, without a dot,
    as text.
    """
    number = as_number(value) if isinstance(value, str) else None
    return (
        value
        if number is None
        else int(number)
        if number.is_integer() and "e" not in value.lower()
        else number
    )


def lookup(table: Table, name: str) -> str | None:
    """The name of a table's rule for a dotted name: the same, or the nearest section above it.

    None: there is no rule.
    """
    if name in table.rules:
        return name
    parts = name.split(".")
    sections = (".".join(parts[:length]) + ".*" for length in range(len(parts) - 1, 0, -1))
    return next((section for section in sections if section in table.rules), None)


def flatten(table: Table, body: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Options by dotted name.

    Mappings are flattened if the table has options below them; unset options are left out.
    """
    options: dict[str, Any] = {}
    for key, value in body.items():
        name = f"{prefix}{key}"
        if (
            isinstance(value, Mapping)
            and value
            and any(known.startswith(f"{name}.") for known in table.rules)
        ):
            options.update(flatten(table, value, f"{name}."))
        elif value is not None and value != "" and value != [] and value != {}:
            options[name] = value
    return _resolved(options) if table.hydra and not prefix else options


_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?(\.?[\w.]+)(?:,\s*(.*))?\}")
"""A value that is that of another option, named from the top or, with a dot, from the same section;
and its default.
"""


def _resolved(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the values of those to which others refer.

    Those whose value the file does not have are left out.
    """
    values = {name: _value(options, name, 0) for name in options}
    unset = (None, "???", {}, [])
    return {
        name: value
        for name, value in values.items()
        if value not in unset and not name.endswith("_target_")
    }


def _value(options: Mapping[str, Any], name: str, depth: int) -> Any:
    value = options.get(name)
    found = (
        _REFERENCE.fullmatch(value)
        if isinstance(value, str) and not isinstance(value, Unread)
        else None
    )
    if found is None:
        return value
    target = found[1]
    default = found[2]
    if target.startswith("."):
        target = name.rpartition(".")[0] + target
    if target in options and depth < 8:  # deeper ones are circles
        return _value(options, target, depth + 1)
    return None if default is None or "${" in default else _plain_yaml(default)


def _plain_yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def verdict_on(table: Table, source: Source, name: str) -> Verdict:
    """The verdict of a table on one option of a file."""
    rule = lookup(table, name)
    value = source[name]
    if rule is None:
        unknown = isinstance(value, Unread) and value == name
        return (
            ToDo(UNREAD)
            if unknown
            else Lost(
                f"{table.tool} has no known option of this name: check its spelling, or leave it "
                "out"
            )
        )
    verdict = table.rules[rule](value, source)
    if isinstance(value, Unread) and isinstance(verdict, Taken):
        return ToDo(f"{UNREAD}: set {', '.join(verdict.options)}")
    return verdict
