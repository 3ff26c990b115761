"""`ft quickstart`: one fine-tuning job from upload to adapter, on this machine.

It starts a server for itself, talks to it with the `openai` client, and stops it again. Ctrl-C
pauses the job at a checkpoint; the next run continues from there.
"""

from __future__ import annotations

import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ft_service.cli.output import Json, load_settings, print_json_line, print_text
from ft_service.errors import FtError, SpecError
from ft_service.installation import SAMPLE_DATA, SAMPLE_MODELS, SAMPLE_SPEC

CALLED = "ft quickstart"
NEEDED = ("openai", "matplotlib", "fastapi", "uvicorn", "torch", "transformers", "peft")
"""Packages of the extras quickstart, api and workers, without which it would fail half-way."""


def register(app: typer.Typer) -> None:
    app.command("quickstart")(quickstart)


def quickstart(
    called: Annotated[
        str, typer.Option("--called", hidden=True, help="What the user typed, for messages.")
    ] = CALLED,
    copy: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Only write its SPEC and data into a folder, to be changed and submitted by hand.",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Fine-tune the sample base on this machine, from upload to adapter, with a server of its own.

    Ctrl-C pauses the job; the next run continues it.
    """
    if copy is not None:
        spec = copy_sample(copy)
        if as_json:
            print_json_line({"spec": str(spec)})
        else:
            print_text(
                f"{spec} is what the quickstart trains. To look at it, and to run it: ft plan "
                f"{spec}; ft run {spec}"
            )
        return 0
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise FtError(
            f"The quickstart needs {', '.join(missing)}: pip install "
            "'ft-service[quickstart,api,workers]'."
        )
    if not (SAMPLE_SPEC.is_file() and SAMPLE_MODELS.is_dir()):
        raise FtError(f"This installation has no sample base: {SAMPLE_MODELS} is missing.")
    home = load_settings().home
    if not as_json:
        print_text(
            "ft-service quickstart: fine-tune a small sample model on this machine. Ctrl-C "
            "pauses.\n"
        )
    # It takes a second or two: the first line should not wait for it.
    from ft_service.cli.quickstart.quickstart_flow import main

    return main(home, called=called, as_json=as_json)


def copy_sample(folder: Path) -> Path:
    """Write the quickstart's SPEC, and the data that it names, into a folder; return the SPEC.

    Raises SpecError, OSError.
    """
    spec = folder / SAMPLE_SPEC.name
    text = SAMPLE_SPEC.read_text(encoding="utf-8")
    beside = f"{os.path.relpath(SAMPLE_DATA, SAMPLE_SPEC.parent)}/"
    names = re.findall(rf"{re.escape(beside)}(\S+)", text)
    if taken := [name for name in (spec.name, *names) if (folder / name).exists()]:
        raise SpecError(
            f"--copy = {str(folder)!r}: {taken[0]} is there already; name another folder.",
            param="copy",
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(SAMPLE_DATA / name, folder / name)
    spec.write_text(text.replace(beside, ""), encoding="utf-8")
    return spec
