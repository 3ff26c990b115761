"""Arguments of commands that take a SPEC: the file itself, or a data file, and options on the
command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ft_service.cli.output import load_settings
from ft_service.data.hub_data import FOLDER
from ft_service.errors import SpecError
from ft_service.spec_files.spec_file import (
    SpecFile,
    load_spec_file,
    may_be_base,
    parse_option,
    spec_of_base,
)

SpecOrData = Annotated[
    Path,
    typer.Argument(
        metavar="SPEC|DATA",
        help="YAML file, whose paths are relative to it; or a data file, with --model.",
    ),
]
SpecDataOrBase = Annotated[
    Path,
    typer.Argument(
        metavar="SPEC|DATA|BASE",
        help="YAML file, whose paths are relative to it; a data file, with --model; or a base's "
        "name alone, such as ORG/NAME.",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="OPTION=VALUE",
        help="Set an option of the SPEC, such as training.learning_rate=1e-4; several times for "
        "several.",
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="M",
        help="The SPEC's model: a base; or a job (ID, suffix, `last`) to continue.",
    ),
]
Suffix = Annotated[
    str | None,
    typer.Option("--suffix", metavar="NAME", help="The SPEC's suffix: a name for job and model."),
]


MaxCost = Annotated[
    float | None,
    typer.Option(
        metavar="AMOUNT",
        help="What each job may cost, in the server's currency: then it pauses at a checkpoint.",
    ),
]


def with_max_cost(changes: list[str] | None, max_cost: float | None) -> list[str]:
    """Return the changes with the limit of the cost, if it is given."""
    return [*(changes or ()), *([] if max_cost is None else [f"max_cost={max_cost:.15g}"])]


def load_spec_arguments(
    spec: Path,
    changes: list[str] | None = None,
    model: str | None = None,
    suffix: str | None = None,
    *,
    sweep: bool | None = False,
    bases: bool = False,
) -> SpecFile:
    """Read the SPEC with the options of the command line.  `sweep`: as for `load_spec_file`;
    `bases`: whether a base's name in place of the SPEC stands for a job on it without data. Raises
    SpecError as that does, and for an option given twice.
    """
    options: dict[str, Any] = {
        name: value for name, value in (("model", model), ("suffix", suffix)) if value is not None
    }
    for text in changes or ():
        name, value = parse_option(text)
        if name in options:
            ways = (
                f"--{name} and --set {name} are both given"
                if name in ("model", "suffix")
                else f"--set {name} is given twice"
            )
            raise SpecError(f"{ways}: keep one.", param=name)
        options[name] = value
    if bases and may_be_base(spec) and "model" not in options:
        return spec_of_base(str(spec), options)
    return load_spec_file(
        spec, sweep=sweep, options=options, datasets=load_settings().home / FOLDER
    )
