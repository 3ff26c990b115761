"""Templates of graders: text with `{{ item.key }}` and `{{ sample.output_text }}`.

Time is linear in the length of the template and of what is filled in, which is limited. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ft_service.graders.grades import NO_JSON, Case, ErrorKind, GradingError, written

MOST_FILLED = 2**20
"""Characters of a text with its values, at most: it may name an answer hundreds of times."""
_PATH = re.compile(r"(item|sample)((?:\.\w+|\[\d{1,9}\])+)")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_SAMPLE = ("output_text", "output_json", "output_tools", "choices", "messages", "calls")

Variable = tuple[str | int, ...]
"""The steps to a value: `("item", "answers", 0)`."""


class TemplateError(ValueError):
    """A template names what no answer and no item can have."""


def check_template(template: str) -> None:
    """Raise TemplateError for a template that is wrong for every answer."""
    _parts(template)


def filled(template: str, case: Case, most: int = MOST_FILLED) -> str:
    """The template with its values.

    Raises GradingError for a value that is missing, and for more than `most` characters.
    """
    texts: list[str] = []
    left = most
    for part in _parts(template):
        texts.append(part if isinstance(part, str) else _text(_value(part, case)))
        left -= len(texts[-1])
        if left < 0:
            raise GradingError(
                "other_error", f"texts with their values have more than {MOST_FILLED:,} characters"
            )
    return "".join(texts)


@lru_cache(maxsize=256)
def _parts(template: str) -> Sequence[str | Variable]:
    """Text and variables in turn."""
    parts: list[str | Variable] = []
    at = 0
    while (begin := template.find("{{", at)) >= 0 and (end := template.find("}}", begin)) >= 0:
        parts += [template[at:begin], _variable(template[begin + 2 : end].strip())]
        at = end + 2
    return (*parts, template[at:])


def _variable(text: str) -> Variable:
    match = _PATH.fullmatch(text)
    steps = [key or int(index) for key, index in _STEP.findall(match[2])] if match else []
    is_named = match and (
        match[1] == "item"
        or (steps[0] in _SAMPLE and (len(steps) == 1 or steps[0] != "output_text"))
    )
    if not match or not is_named:
        raise TemplateError(
            f"{{{{ {text[:200]} }}}} names nothing; there are sample.output_text, "
            "sample.output_json.KEY, "
            "sample.output_tools[0].function.name, sample.choices[0] and item.KEY; with an "
            "environment sample.messages[0] and sample.calls[0]"
        )
    return (match[1], *steps)


def _value(variable: Variable, case: Case) -> Any:
    namespace, first, *steps = variable
    missing: ErrorKind = "invalid_variable_error" if namespace == "item" else "sample_parse_error"
    value: Any = case.item
    if namespace == "sample":
        value = getattr(case.sample, str(first))
    else:
        steps = [first, *steps]
    for step in steps:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            value = NO_JSON
    if value is NO_JSON:
        raise GradingError(missing, f"{{{{ {_shown(variable)} }}}} is not there")
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else written(value)


def _shown(variable: Variable) -> str:
    return (
        str(variable[0])
        + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in variable[1:])[
            :200
        ]
    )
