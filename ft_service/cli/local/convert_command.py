"""`ft convert`: convert other tools' configurations to a SPEC."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ft_service.cli.output import Json, print_error, print_json, print_note
from ft_service.convert import Conversion, convert_file
from ft_service.convert.convert import OUTCOMES
from ft_service.convert.verdicts import Method
from ft_service.errors import SpecError


def register(app: typer.Typer) -> None:
    app.command("convert")(convert)


def convert(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Another tool's configuration (YAML, JSON), script (.sh) or Unsloth program "
            "(.py, .ipynb).",
        ),
    ],
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            metavar="N",
            min=1,
            max=4096,
            help="GPUs that trained together: the batch size is over all of them.",
        ),
    ] = None,
    method: Annotated[
        Method | None,
        typer.Option(
            "--method", help="Method of a file that does not say it itself (TRL, Transformers)."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="SPEC", help="Write the SPEC to this file.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the file that --out names.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Print another tool's configuration or training script as a SPEC, and what becomes of each of
    its options. The tools are Accelerate, DeepSpeed, Transformers, TRL, verl, Axolotl,
    LLaMA-Factory, ms-swift, torchtune, and Unsloth in Python. Scripts are read and never run. Exits
    with 0 where nothing that changes the result is lost, with 1 where something is to be done or is
    not supported (it says what), and with 64 where the file is not converted at all.
    """
    if force and out is None:
        raise SpecError(
            "--force overwrites the file that --out names: give --out SPEC too, or leave it out."
        )
    outcome = convert_file(file, gpus=gpus, method=method)
    if out is not None:
        _write(out, outcome.spec_yaml(), force)
    if as_json:
        print_json(_document(outcome))
    elif out is None:
        print(outcome.spec_yaml(), end="")
    else:
        print_note(f"Wrote {out}.")
    lost = outcome.open()
    if not lost:
        return 0
    said = (
        "an option is not taken over"
        if len(lost) == 1
        else f"{len(lost)} options are not taken over"
    )
    where = "the comments above" if out is None else f"the comments of {out}"
    return print_error(
        f"{said}, and the result may differ: {', '.join(lost)}. Why, and what to do, is in "
        f"{where}.",
        1,
    )


def _write(path: Path, text: str, force: bool) -> None:
    """Write the SPEC. Raises SpecError if the file cannot be written, or already exists."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise SpecError(
            f"{path} is there already: name another file, or overwrite it with --force."
        ) from None
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}.") from None


def _document(outcome: Conversion) -> dict[str, object]:
    return {
        "file": outcome.file,
        "tool": outcome.tool,
        "format": outcome.format,
        "spec": outcome.body,
        "notes": outcome.notes,
        "options": [
            {
                "option": one.option,
                "value": one.value,
                "outcome": OUTCOMES[type(one.verdict)],
                "text": one.line(),
                "source": one.source or None,
            }
            for one in outcome.decisions
        ],
        "defaults": [
            {"option": one.option, "value": one.value, "note": one.note or None}
            for one in outcome.defaults
        ],
    }
