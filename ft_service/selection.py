"""Which modules of a base the options of a job name: the one rule, for the plan before a job and for the worker in it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ft_service.errors import SpecError
from ft_service.spec import PrecisionOptions, WeightFormat, match_pattern


def assign_formats(names: Sequence[str], precision: PrecisionOptions) -> dict[str, WeightFormat]:
    """Format of every linear layer inside the decoder layers, which `names` lists by full module name.

    Raises SpecError for a pattern that matches none of them.
    """
    formats: dict[str, WeightFormat] = dict.fromkeys(names, precision.default)
    for pattern, weight_format in precision.overrides.items():
        matched = match_pattern(pattern, names)
        if not matched:
            like = f" (their names look like {names[0]!r})" if names else ""
            raise SpecError(
                f"precision.overrides: the pattern {pattern!r} matches no linear layer inside the decoder layers{like}.",
                param="precision.overrides",
            )
        formats.update(dict.fromkeys(matched, weight_format))
    return formats


def choose_targets(names: Sequence[str], wanted: str | Sequence[str]) -> list[str]:
    """The modules that get an adapter. `names`: every linear layer but the output head; `wanted`: lora.target_modules.

    Raises SpecError for a name or pattern that matches none.
    """
    if wanted == "all-linear":
        return list(names)
    if isinstance(wanted, str):
        chosen = match_pattern(wanted, names)
        missing = [] if chosen else [wanted]
    else:
        chosen = [n for n in names if any(n == w or n.endswith(f".{w}") for w in wanted)]
        missing = [w for w in wanted if not any(n == w or n.endswith(f".{w}") for n in names)]
    if missing or not chosen:
        kinds = ", ".join(sorted({re.sub(r".*\.", "", name) for name in names}))
        raise SpecError(
            f"lora.target_modules: {missing or wanted!r} matches no linear layer of this model; it has {kinds}.",
            param="lora.target_modules",
        )
    return chosen
