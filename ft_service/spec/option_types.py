"""Types of option values."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import re2
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_Patterns = TypeVar("_Patterns", bound=Collection[str])

LEAST_EPSILON = 1e-30
"""Least epsilon of AdamW, which divides in fp32: below 1e-45 it would be 0, and 0 / 0 where a
gradient is 0.
"""
GREEDY = 1e-5
"""Temperatures below are 0, here and in vLLM: logits divided by them would be infinite in fp32."""
TrainOn = Literal["all_assistant", "last_assistant", "everything"]


def compile_pattern(pattern: str) -> Any:
    """An RE2 pattern (linear time, whatever the pattern). Raises re2.error."""
    options = re2.Options()
    options.log_errors = False
    return re2.compile(pattern, options)


class Strict(BaseModel):
    """Base class of user input: unknown keys are errors, values are not coerced across types,
    instances are frozen.
    """

    model_config = ConfigDict(
        use_attribute_docstrings=True,
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
    )


class NullableSections(Strict):
    """User input in which a section may be null, which counts as absent: clients write so what they
    leave out, and a job's `method` as it is shown has its other methods as null.
    """

    @model_validator(mode="before")
    @classmethod
    def _without_null_sections(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {
            name: given
            for name, given in value.items()
            if given is not None or not cls._is_section(name)
        }

    @classmethod
    def _is_section(cls, name: Any) -> bool:
        """Whether an option of this name holds options of its own."""
        held = cls.model_fields[name].annotation if name in cls.model_fields else None
        return isinstance(held, type) and issubclass(held, BaseModel)


MOST_PATTERNS = 256
PATTERN_CHARACTERS = 10_000
"""Most patterns of an option, and most characters of them together: to match them against a base's
thousand names takes seconds at most, whatever they are. With a thousand characters for each of a
thousand patterns it would take minutes.
"""
MOST_NAMES = 10_000
"""Most names in a list of modules: more than any base has layers."""


def _check_pattern(value: object) -> object:
    if isinstance(value, str):
        _limit_characters([value])
        try:
            compile_pattern(value)
        except re2.error as error:
            why = (
                error.args[0].decode(errors="replace")
                if error.args and isinstance(error.args[0], bytes)
                else error
            )
            raise ValueError(f"must be a pattern that RE2 accepts ({why})") from None
    return value


def _limit_characters(patterns: Collection[str]) -> None:
    characters = sum(map(len, patterns))
    if characters > PATTERN_CHARACTERS:
        raise ValueError(
            f"must have at most {PATTERN_CHARACTERS} characters in patterns, not {characters}"
        )


def _limit_patterns(patterns: _Patterns) -> _Patterns:
    if len(patterns) > MOST_PATTERNS:
        raise ValueError(
            f"must have at most {MOST_PATTERNS} patterns, not {len(patterns)}; one can match many "
            "modules: a|b"
        )
    _limit_characters(patterns)
    return patterns


Pattern = Annotated[str, BeforeValidator(_check_pattern)]
"""A regular expression in RE2's syntax (linear time), matched against the whole module name."""
FewPatterns = AfterValidator(_limit_patterns)
"""On a list of patterns, or an object whose keys they are: as many as can be matched in seconds."""
Names = Annotated[list[str], Field(max_length=MOST_NAMES)]
"""Names of modules."""


def _number(value: object) -> object:
    """Convert to a float where possible: JSON and YAML write 1 for 1.0, and YAML 1.1 reads `2e-4`
    as a string.
    """
    if isinstance(value, bool):
        return value
    if not isinstance(value, int | str):
        return value
    try:
        return float(value)
    except ValueError:
        return value
    except OverflowError:  # the error message then says that it is infinite
        return math.inf if isinstance(value, int) and value > 0 else -math.inf


Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]


def _word_off(value: object) -> object:
    """Convert False to "off": YAML 1.1 reads `off` as false."""
    return "off" if value is False else value


AutoOrOff = Annotated[Literal["auto", "off"], BeforeValidator(_word_off)]


def match_pattern(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that an RE2 pattern matches as a whole, in their order."""
    compiled = compile_pattern(pattern)
    return [name for name in names if compiled.fullmatch(name)]
