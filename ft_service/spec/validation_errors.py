"""Validation errors of pydantic as sentences: all of them, each with the option, its value, the
limit and what to change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ft_service.errors import SpecError
from ft_service.spec.name_suggestions import NO_MATCH, name_for, value_for
from ft_service.wording import counted, shown_value

_LISTED = 64
"""Most faults in a message: more than people set options by hand."""
_WORDS: Mapping[str, str] = {
    **dict.fromkeys(
        ("model_type", "model_attributes_type", "dict_type"),
        "must be an object with options of its own",
    ),
    **dict.fromkeys(("int_type", "int_from_float", "int_parsing"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "list_type": "must be a list",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "string_too_short": "must have at least {characters}",
    "string_too_long": "must have at most {characters}",
    "too_short": "must have at least {entries}",
    "too_long": "must have at most {entries}",
    "finite_number": "must be a number that is not infinite",
    "string_unicode": "must be text in UTF-8 (a file's name too: rename it)",
    "string_pattern_mismatch": "must match {pattern}",
}
"""Type of a pydantic error → our text. Other types have pydantic's text."""

_PATTERNS: Mapping[str, str] = {
    r"^[A-Za-z0-9._-]+$": "may hold only letters, digits, dots, hyphens and underscores",
    r"^[._-]*[A-Za-z0-9][A-Za-z0-9._-]*$": (
        "may hold only letters, digits, dots, hyphens and underscores, and must have a letter or "
        "a digit"
    ),
}
"""Pattern → text that says what it requires."""


@dataclass(frozen=True)
class OptionFault:
    """The fault of an option."""

    place: str
    """Dotted name of the option; empty: the options as a whole."""
    text: str
    """A sentence."""
    code: str = SpecError.code


def spec_error(error: ValidationError, model: type[BaseModel]) -> SpecError:
    """All of pydantic's errors as one SpecError."""
    return joined(option_faults(error, model))


def joined(faults: Sequence[OptionFault]) -> SpecError:
    """One error for all faults, with the field and code of the first.

    Each fault has a line: missing options first, then unknown names at the top level, which may be
    their misspelling, then the others in their order.
    """
    faults = sorted(faults, key=_urgency)
    first = faults[0]
    if len(faults) == 1:
        return SpecError(first.text, param=first.place or _first_name(first.text), code=first.code)
    lines = [fault.text for fault in faults[:_LISTED]]
    if len(faults) > _LISTED:
        lines.append(f"… and {len(faults) - _LISTED} more.")
    text = "\n".join([f"{len(faults)} options are invalid:", *lines])
    return SpecError(text, param=first.place or _first_name(first.text), code=first.code)


def _urgency(fault: OptionFault) -> int:
    if fault.code == "missing_required_parameter":
        return 0
    return 1 if fault.code == "unknown_parameter" and "." not in fault.place else 2


def option_faults(
    error: ValidationError, model: type[BaseModel], unoffered: Collection[tuple[str, object]] = ()
) -> list[OptionFault]:
    """Every invalid option once, in pydantic's order.

    All accepted kinds of values are named, but of `unoffered` none: places with values that users
    cannot choose.
    """
    by_place: dict[str, list[Any]] = {}
    within: set[str] = set()
    for fault in error.errors(include_url=False):
        place = _place(fault["loc"], model)
        by_place.setdefault(place, []).append(fault)
        while place := place.rpartition(".")[0]:
            within.add(place)
    # Of a value of one of several kinds, such as a list, it is said what is wrong within, not that
    # it is none of the others.
    found = enumerate(
        (place, faults)
        for place, faults in by_place.items()
        if place not in within or not _of_kind(faults)
    )
    return [
        _fault(place, faults, model, unoffered, guess=number < _LISTED)
        for number, (place, faults) in found
    ]


def _fault(
    place: str,
    faults: list[Any],
    model: type[BaseModel],
    unoffered: Collection[tuple[str, object]],
    *,
    guess: bool,
) -> OptionFault:
    """`guess`: suggest the option that was meant.

    That is slow, and a body may have a hundred thousand unknown ones.
    """
    first = faults[0]
    if first["type"] == "extra_forbidden":
        text = f"{place}: there is no such option. Check its spelling, or leave it out."
        if elsewhere := NO_MATCH.get(place):
            text = f"{place}: there is no such option: {elsewhere}. Leave it out."
        elif meant := name_for(place, model) if guess else None:
            text = f"{place}: there is no such option; did you mean {meant}?"
        return OptionFault(place, text, "unknown_parameter")
    if first["type"] == "missing":
        return OptionFault(place, f"{place} is required.", "missing_required_parameter")
    told = [
        fault for fault in faults if fault["type"] != "int_parsing_size"
    ] or faults  # a limit says more
    choices: list[str] = [
        choice for fault in told for choice in _choices(fault) if (place, choice) not in unoffered
    ]
    said = list(
        dict.fromkeys(words_of(fault) for fault in told if fault["type"] != "literal_error")
    )
    message = _one_of([*said, *choices])
    if choices and not said:
        message = f"must be {message}"
    if not place:
        return OptionFault("", f"{message}.")
    meant = value_for(first["input"], choices) if len(choices) > 1 or said else None
    hint = f"; did you mean {meant}?" if meant else "."
    return OptionFault(place, f"{place} = {shown_value(first['input'])}: {message}{hint}")


def _of_kind(faults: Sequence[Any]) -> bool:
    """Whether all faults say that a value is of another kind."""
    return all(fault["type"].endswith("_type") for fault in faults)


def words_of(fault: Any) -> str:
    """Text for one of pydantic's errors: `must be a whole number`."""
    context = fault.get("ctx") or {}
    template = _PATTERNS.get(context.get("pattern", "")) or _WORDS.get(fault["type"])
    if template is None:
        return fault["msg"].removeprefix("Value error, ")
    length = context.get("min_length", context.get("max_length", 0))
    known = {name: _plain(value) for name, value in context.items()}
    entries = f"{length:,} {'entry' if length == 1 else 'entries'}"
    return template.format(characters=counted(length, "character"), entries=entries, **known)


def _plain(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _choices(fault: Any) -> list[str]:
    """The accepted values of a Literal; empty for other errors."""
    if fault["type"] != "literal_error":
        return []
    parts: list[str] = fault["ctx"]["expected"].replace(" or ", ", ").split(", ")
    return [_CONSTANTS.get(part, part.strip("'")) for part in parts]


_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


def _one_of(ways: Sequence[str]) -> str:
    first, *others = dict.fromkeys(ways)
    *rest, last = [first, *(way.removeprefix("must be ") for way in others)]
    return f"{', '.join(rest)} or {last}" if rest else last


def _place(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """A dotted field name from pydantic's location, without the names of union branches and
    validators.
    """
    parts: list[str] = []
    kinds: list[Any] = [model]
    for part in loc:
        models = _models_in(kinds)
        if isinstance(part, int):
            parts.append(str(part))
            kinds = [
                item
                for kind in kinds
                if get_origin(kind) is list
                for item in _kinds_of(get_args(kind)[0])
            ]
        elif branch := next(
            (own for own in models if len(models) > 1 and part in _types_of(own)), None
        ):
            kinds = [branch]
        elif field := next(
            (own.model_fields[part] for own in models if part in own.model_fields), None
        ):
            parts.append(part)
            kinds = _kinds_of(field.annotation)
        elif len(kinds) > 1:
            kinds = _branch(part, kinds)
        elif kinds and (models or get_origin(kinds[0]) is dict):
            parts.append(part[:80])
            kinds = [] if models else _kinds_of(get_args(kinds[0])[-1])
    return ".".join(parts)


def _branch(label: str, kinds: list[Any]) -> list[Any]:
    """The members of a union that a part of pydantic's location may name."""
    for name, origin in (("list[", list), ("dict[", dict)):
        if name in label:
            return [kind for kind in kinds if get_origin(kind) is origin]
    return [own for own in _models_in(kinds) if own.__name__ in label] or kinds


def _models_in(kinds: Sequence[Any]) -> list[type[BaseModel]]:
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _types_of(model: type[BaseModel]) -> Sequence[Any]:
    """The values of a model's `type`, which pydantic's locations name where `type` decides which of
    several models it is.
    """
    field = model.model_fields.get("type")
    return () if field is None else get_args(field.annotation)


def _kinds_of(annotation: Any) -> list[Any]:
    """The members of a union but None, also of unions in it, or the annotation alone; without the
    metadata of `Annotated`.
    """
    annotation = _bare(annotation)
    if get_origin(annotation) not in (Union, UnionType):
        return [annotation]
    return [
        kind for part in get_args(annotation) if part is not NoneType for kind in _kinds_of(part)
    ]


def _bare(annotation: Any) -> Any:
    """An annotation without the metadata of `Annotated`."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _first_name(message: str) -> str | None:
    word = message.split(" ", 1)[0]
    return word if "." in word else None
