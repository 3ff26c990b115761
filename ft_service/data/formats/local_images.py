"""Pictures in files of their own, beside a data file on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ft_service.data.image_limits import most_bytes
from ft_service.data.image_part import place_of_url, refuse_large, refuse_other_types
from ft_service.data.line_errors import LineError
from ft_service.data.sample_kinds import Conversation, Pair, Picture, Record
from ft_service.wording import shown_value


def with_files_read(record: Record, folder: Path) -> Record:
    """The record with the bytes of those of its pictures that are paths. `folder`: the data file's,
    below which relative ones are. Raises LineError with the place of one that cannot be read.
    """
    if isinstance(record, Pair):
        answers = (with_files_read(own, folder) for own in (record.preferred, record.rejected))
        preferred, rejected = (own for own in answers if isinstance(own, Conversation))
        return Pair(preferred, rejected)
    if not isinstance(record, Conversation):
        return record
    pictures = tuple(
        picture if picture.path is None else _read(picture.path, folder, picture.detail, place)
        for picture, place in zip(record.images, record.image_places, strict=True)
    )
    return replace(record, images=pictures)


def _read(name: str, folder: Path, detail: str, place: str) -> Picture:
    place = place_of_url(place)
    path = folder / name
    try:
        path = path.resolve()
        if not Path(name).is_absolute() and not path.is_relative_to(folder.resolve()):
            raise LineError(
                place,
                f"is {shown_value(name)}, which leads out of {folder}, the data file's folder: "
                "write its absolute path",
            )
        if not path.is_file():
            why = "is no file" if path.exists() else "does not exist"
            raise LineError(
                place,
                f"is {shown_value(name)}, and {path} {why}: relative paths are below the data "
                "file's folder",
            )
        refuse_large(path.stat().st_size, place)
        with path.open("rb") as file:
            data = file.read(most_bytes() + 1)
    except (OSError, ValueError, RuntimeError) as error:  # no right to it, a zero byte, a loop
        raise LineError(place, f"is {shown_value(name)}, which cannot be read: {error}") from None
    refuse_large(len(data), place)
    refuse_other_types(data, place)
    return Picture.of(data, detail)
