"""What the commands of `ft data` are given, and what it names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ft_service.bases.catalogue import Catalogue
from ft_service.cli.local_store import settings_with_models
from ft_service.data.formats.folders import dataset_files
from ft_service.errors import SpecError
from ft_service.local.spec_file import LocalData
from ft_service.spec import TrainOn
from ft_service.spec.options import TrainingOptions
from ft_service.spec.templates import check_template, named_template

MAX_LENGTH = TrainingOptions().max_length

DataFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="JSON lines, a JSON array, CSV, Parquet, or a folder of Hugging Face's datasets.")
]
Model = Annotated[str, typer.Option("--model", metavar="M", help="A base by its name, or its folder (./…, /…, ~/…).")]
Template = Annotated[
    str, typer.Option("--chat-template", metavar="NAME|FILE", help="In place of the base's: a standard one's name, or a file.")
]
Learn = Annotated[TrainOn, typer.Option("--train-on", help="What is learned of a conversation.")]
MaxLength = Annotated[int, typer.Option("--max-length", min=8, help="training.max_length: tokens kept of a sample.")]
Split = Annotated[str, typer.Option("--split", help="Of a folder that has several.")]


def local_data(path: Path, split: str) -> LocalData:
    """Raises SpecError for a path where nothing is, DataError for a folder without such a split."""
    whole = path.expanduser().absolute()
    if whole.is_dir():
        return LocalData(whole, dataset_files(whole, split))
    if not whole.is_file():
        raise SpecError(f"There is no file {whole}.", param="file")
    return LocalData(whole)


def template_text(given: str) -> str:
    """A template's text, by the name of a standard one or a file's. Raises SpecError."""
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
    """The folder of a base, by its name or its path. Raises SpecError."""
    if model.startswith((".", "/", "~")):
        folder = Path(model).expanduser().absolute()
        return Catalogue([folder.parent]).find(folder.name, to_train=False).ref().path
    return Catalogue.from_settings(settings_with_models()).find(model, to_train=False).ref().path
