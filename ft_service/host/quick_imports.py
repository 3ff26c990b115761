"""Imports of large packages, without Python's garbage collector.

Nearly everything that an import makes stays for good. The collector goes through all of it again
and again while torch and transformers are imported: a fifth of the time that a process takes to
start.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def begin_imports() -> None:
    """Collect no garbage from now on."""
    gc.disable()


def end_imports() -> None:
    """Collect garbage again, but for what there is so far, which the collector never looks at."""
    gc.freeze()
    gc.enable()


@contextmanager
def quick_imports() -> Iterator[None]:
    """The same around imports, also among other ones that are made so."""
    collects = gc.isenabled()
    begin_imports()
    try:
        yield
    finally:
        if collects:
            end_imports()
