"""Variables of chat templates that a job sets, `chat_template_kwargs`, as lines in front of the
template's text.

So the text says all, wherever it goes: training, evaluation, preview, hand-off and exports. The
lines are defaults: a server that is asked with other values uses those.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field, StrictBool, StrictInt, StrictStr

GIVEN = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables that every conversation sets."""
_KEYWORDS = (
    "true",
    "false",
    "none",
    "and",
    "or",
    "not",
    "in",
    "is",
    "if",
    "else",
    "for",
    "set",
    "loop",
    "self",
)
_LINE = re.compile(r"\{%- set ([A-Za-z_][A-Za-z0-9_]*) = \1 if \1 is defined else [^\n]* -?%\}\n")


def _check_name(name: str) -> str:
    if name in GIVEN or name.endswith("_token"):
        raise ValueError("is set by every conversation or by the tokenizer")
    if name.lower() in _KEYWORDS:
        raise ValueError("is a word of the template language")
    return name


VariableName = Annotated[
    str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$"), AfterValidator(_check_name)
]
VariableValue = (
    StrictBool
    | Annotated[StrictInt, Field(ge=-(2**53), le=2**53)]
    | Annotated[float, Field(strict=True, allow_inf_nan=False)]
    | Annotated[StrictStr, Field(max_length=1000)]
)
Variables = Annotated[dict[VariableName, VariableValue], Field(min_length=1, max_length=16)]


def with_variables(template: str, variables: Mapping[str, bool | int | float | str]) -> str:
    """A template's text that sets variables unless they are given.

    Those that it sets so already are replaced.
    """
    return before(without_variables(template), variables)


def before(template: str, variables: Mapping[str, bool | int | float | str]) -> str:
    """A template's text that sets variables unless they are given.

    They stand before those that it sets so already.
    """
    lines = "".join(
        f"{{%- set {name} = {name} if {name} is defined else {_literal(value)} %}}\n"
        for name, value in variables.items()
    )
    return lines + template


def variables_of(template: str) -> list[str]:
    """The variables that lines in front of a template's text set."""
    names: list[str] = []
    at = 0
    while (line := _LINE.match(template, at)) is not None:
        names.append(line[1])
        at = line.end()
    return names


def without_variables(template: str) -> str:
    """A template's text without these lines."""
    at = 0
    while (line := _LINE.match(template, at)) is not None:
        at = line.end()
    return template[at:]


def _literal(value: bool | int | float | str) -> str:
    return json.dumps(value, ensure_ascii=False)
