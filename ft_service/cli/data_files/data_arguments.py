"""Arguments that the commands of `ft data` share."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from ft_service.bases.catalogue import Catalogue
from ft_service.cli.local_store import settings_with_models
from ft_service.data.formats.columns import Columns
from ft_service.data.formats.folders import dataset_files
from ft_service.data.token_options import PixelBounds, TokenOptions
from ft_service.errors import SpecError
from ft_service.spec import TrainOn
from ft_service.spec.options import PIXELS, DataOptions, TrainingOptions
from ft_service.spec.templates import check_template, named_template
from ft_service.spec.validation_errors import words_of
from ft_service.spec_files.spec_file import LocalData

MAX_LENGTH = TrainingOptions().max_length

DataFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="JSON lines, a JSON array, CSV, Parquet, or a folder of Hugging Face's datasets.",
    ),
]
Model = Annotated[
    str,
    typer.Option("--model", metavar="M", help="A base by its name, or its folder (./…, /…, ~/…)."),
]
Template = Annotated[
    str,
    typer.Option(
        "--chat-template",
        metavar="NAME|FILE",
        help="Chat template instead of the base's: a standard name, or a file.",
    ),
]
Learn = Annotated[
    TrainOn, typer.Option("--train-on", help="Which messages of a conversation are learned.")
]
MaxLength = Annotated[
    int, typer.Option("--max-length", min=8, help="training.max_length: tokens kept of a sample.")
]
Split = Annotated[str, typer.Option("--split", help="Split of a folder that has several.")]

_MAPPING = re.compile(r"data: \{([^{}]+)\}")

Column = Annotated[
    list[str],
    typer.Option(
        "--column",
        metavar="NAME=COLUMN",
        help="Name of a column in the file, such as prompt=question; or apply_chat_template=auto, "
        "images=strict, max_pixels=200000.",
    ),
]


def data_options(given: Sequence[str]) -> DataOptions:
    """Return the mapping of several `--column NAME=COLUMN`. Raises SpecError."""
    pairs = [
        (ours.strip(), theirs.strip()) for ours, _, theirs in (p.partition("=") for p in given)
    ]
    try:
        return DataOptions.model_validate(
            {
                ours: int(theirs) if ours in PIXELS and theirs.isdigit() else theirs
                for ours, theirs in pairs
            }
        )
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        named = ", ".join(DataOptions.model_fields)
        what = (
            f"{fault['loc'][0]!r} is not a column that a format has: {named}"
            if fault["type"] == "extra_forbidden"
            else None
        )
        raise SpecError(
            f"--column {' '.join(given)}: {what or words_of(fault)}.", param="column"
        ) from None


def token_options(data: DataOptions, chat_template: str, train_on: TrainOn) -> TokenOptions:
    """Return the options by which a file becomes tokens. Raises SpecError."""
    return TokenOptions(
        template_text(chat_template),
        train_on=train_on,
        columns=Columns.of(data, None),
        pixels=PixelBounds.of(data),
    )


def in_flags(message: str) -> str:
    """Return a message in which every mapping that a SPEC would have, `data: {prompt: question}`,
    is the commands' `--column prompt=question`.
    """
    return _MAPPING.sub(_flags, message)


def _flags(mapping: re.Match[str]) -> str:
    pairs = [pair.partition(": ") for pair in mapping[1].split(", ")]
    is_plain = all(between for _, between, _ in pairs)
    return (
        " ".join(f"--column {shlex.quote(f'{ours}={theirs}')}" for ours, _, theirs in pairs)
        if is_plain
        else mapping[0]
    )


def local_data(path: Path, split: str, usual: str = "train") -> LocalData:
    """Return the data at a path.

    `usual`: the split of a folder if none is asked for. Raises SpecError for a missing path, and
    for a split of a single file, DataError for a folder without the split.
    """
    whole = path.expanduser().absolute()
    if whole.is_dir():
        return LocalData(whole, dataset_files(whole, split))
    if not whole.is_file():
        raise SpecError(f"There is no file {whole}.", param="file")
    if split != usual:
        raise SpecError(
            f"--split = {split!r}: {whole.name} is a single file, and folders have splits. Leave "
            "it out.",
            param="split",
        )
    return LocalData(whole)


def template_text(given: str) -> str:
    """Return a template's text, by the name of a standard one or a file. Raises SpecError."""
    path = Path(given).expanduser()
    try:
        return (
            path.read_text(encoding="utf-8")
            if given and path.is_file()
            else named_template(check_template(given) if given else "")
        )
    except (OSError, ValueError) as error:
        raise SpecError(f"--chat-template = {given!r}: {error}.", param="chat_template") from None


def base_folder(model: str) -> str:
    """Return the folder of a base, by its name or its path. Raises SpecError."""
    if model.startswith((".", "/", "~")):
        folder = Path(model).expanduser().absolute()
        return Catalogue.find_folder(folder, to_train=False).ref().path
    return Catalogue.from_settings(settings_with_models()).find(model, to_train=False).ref().path
