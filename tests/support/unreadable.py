"""What may lie in the place of a document: of a disk that lost bits, of a worker that went mad, of
somebody who means harm.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

GARBAGE: dict[str, bytes | None] = {
    "empty": b"",
    "zeros": bytes(300),
    "no_text": b"\xff\xfe\x00{}",
    "no_json": b"{]",
    "cut_off": b'{"generation": 1, "de',
    "no_object": b"[1, 2, 3]",
    "null": b"null",
    "other_fields": b'{"of": "tomorrow"}',
    "nested": b"[" * 200_000,
    "many_digits": b'{"attempt": ' + b"9" * 10_000 + b"}",
    "large": b'{"attempt": "' + b"x" * (2 * 1024**2) + b'"}',
    "folder": None,
    "pipe": None,
    "link": None,
    "dangling": None,
}
"""Name of a kind → the file's contents; None: it is not a regular file."""


def put_garbage(path: Path, kind: str) -> None:
    """Put it there, in place of what is."""
    body = GARBAGE[kind]
    if body is None:
        put_in_place(path, kind)
        return
    _clear(path)
    path.write_bytes(body)


def put_in_place(path: Path, kind: str) -> None:
    """Something that is no document: "pipe", "folder", "link", "dangling", or a file that is too
    "large" for one.
    """
    _clear(path)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        (path / "inside").mkdir(parents=True)
    elif kind == "link":
        path.symlink_to("/etc/hostname")
    elif kind == "dangling":
        path.symlink_to("nowhere")
    else:
        with path.open("wb") as file:
            file.truncate(2**40)


def _clear(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
