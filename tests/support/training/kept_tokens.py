"""Tokens of data files, made once for all attempts of a test process, by one process: it takes a
second to start. Other examiners of that test process can take it over from each other.
"""

from __future__ import annotations

import contextlib
import shutil
from contextlib import closing
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from ft_service.data import token_folder
from ft_service.data.current_task import CurrentTask
from ft_service.data.examiner import Examiner
from ft_service.data.token_options import TokenOptions
from ft_service.data.tokens.token_cache import tokens_key
from ft_service.errors import FtError
from ft_service.host.helper_process import HelperProcess
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.spec import DataFileRef, JobSpec
from workers.data.token_sets import tokenise


def give_tokens(run: RunDir, spec: JobSpec) -> None:
    """Put the tokens of a job's files into its run directory, as an earlier attempt leaves them.

    Files that are not as the spec says, or cannot be trained on, are left to the ranks, which
    report that.
    """
    for file in spec.data_files:
        path = Path(file.path)
        if path.is_file() and sha256_of(path) == file.sha256:
            with contextlib.suppress(FtError):
                entry = _entry(spec, file)
                folder = run.path(token_folder.IN_RUN) / entry.name
                if not folder.exists():
                    shutil.copytree(entry, folder)


def _entry(spec: JobSpec, file: DataFileRef) -> Path:
    folder = Path(_folder().name)
    key = tokens_key(spec.model.path, file.sha256, TokenOptions.of(spec), pairs=spec.in_pairs)
    if not (folder / key).is_dir():
        with closing(KeptExaminer(tokens=folder)) as examiner:
            tokenise(spec, file, examiner)
    return folder / key


class KeptExaminer(Examiner):
    """One that leaves its process, if that is as it was, to the next."""

    _left: list[tuple[HelperProcess, CurrentTask | None]] = []  # noqa: RUF012

    def start(self) -> None:
        if self._process is None and self._left:
            self._process, self._current_task = self._left.pop()
        super().start()

    def close(self) -> None:
        process = self._process
        if not self._closed and process is not None and process.exit_code is None:
            self._left.append((process, self._current_task))
            self._process = self._current_task = None
        super().close()


def end_examiner() -> None:
    """End the process, as every session of tests has to."""
    while KeptExaminer._left:
        KeptExaminer._left.pop()[0].close()


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="ft-tokens-")
