"""The samples of a job on its ranks: mapped from what the service tokenised when it examined the
files.

Where there is no such set (it was pruned, a pod does not see it, other libraries are installed
here), one rank of each host makes it in the run directory, and the others wait for that.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ft_service.bases.cache_folder import Cache
from ft_service.data import token_folder
from ft_service.data.examiner import Examiner
from ft_service.data.formats.reading import open_data
from ft_service.data.token_options import TokenOptions
from ft_service.data.tokens.token_cache import find, tokens_key
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.token_set_files import damage
from ft_service.data.tokens.tokenize import trainable
from ft_service.data.tokens.training_set.split import Split, split_off
from ft_service.data.tokens.training_set.windows import are_whole, in_windows
from ft_service.errors import DataError
from ft_service.rundir.directory import RunDir
from ft_service.rundir.manifest import ORIGINS, Origins
from ft_service.spec import DataFileRef, JobSpec
from workers.base.rank_objects import alone, from_all, together
from workers.ranks.runtime import OutsideError

BEAT_SECONDS = 1.0
"""How often ranks that wait hear of the one that tokenises: a collective may not take longer than
the job's limit for it.
"""


def job_samples(
    run: RunDir, spec: JobSpec, warn: Callable[[str], None] = lambda text: None
) -> tuple[TokenSet, TokenSet]:
    """Training and validation samples, as training takes them; none of a job without files.

    Called by all ranks together.

    `warn`: called with a sentence for each stored set that is damaged, and made again.

    Raises DataError on all ranks for a file that cannot be trained on, SpecError for a tokenizer
    that cannot be used.
    """
    given = spec.training_data
    file = spec.validation_data
    if given is None:
        return TokenSet.of([]), TokenSet.of([])
    with (
        ThreadPoolExecutor(1, "tokenise") as threads,
        closing(Examiner(tokens=run.path(token_folder.IN_RUN))) as examiner,
    ):
        make = partial(_made, threads, examiner, spec)
        training = _samples(run, spec, given, make, warn)
        validation = None if file is None else _samples(run, spec, file, make, warn)
    if (split := Split.of(spec)) is not None:
        file = given
        training, validation = split_off(training, split, file.name)
    begun = run.read(ORIGINS, Origins)
    known = {} if begun is None else {data.role: data.samples for data in begun.data}
    used = as_trained(training, given, spec, known.get("training"))
    if file is None or validation is None:
        return used, TokenSet.of([])
    return used, as_trained(validation, file, spec, known.get("validation"))


def as_trained(
    samples: TokenSet, file: DataFileRef, spec: JobSpec, begun: int | None = None
) -> TokenSet:
    """The samples of a file as training and validation take them: what is learned whole in windows,
    other samples cut.

    `begun`: how many the job's first attempt took. Those of version 0.2 took pairs whose answers
    are the same after the cut, and their jobs go on with them, since steps and order depend on the
    number. Raises DataError if none has anything to learn.
    """
    split = spec.loss is None and spec.sampled_for is None and are_whole(samples)
    windows = in_windows(samples, spec.training.max_length) if split else samples
    usable = trainable(
        windows,
        file,
        spec.longest_sample,
        pairs=spec.in_pairs,
        alike=begun is not None,
    )
    if begun is None or len(usable) == begun:
        return usable
    return trainable(windows, file, spec.longest_sample, pairs=spec.in_pairs)


def remove_own(run: RunDir) -> None:
    """Remove what the job's ranks tokenised themselves, once no rank reads it."""
    shutil.rmtree(run.path(token_folder.IN_RUN), ignore_errors=True)


def _samples(
    run: RunDir,
    spec: JobSpec,
    file: DataFileRef,
    make: Callable[[DataFileRef], Iterator[None]],
    warn: Callable[[str], None],
) -> TokenSet:
    """All samples of a file, uncut, as they were when they were stored.

    `make`: tokenises it into the run directory.
    """
    pairs = spec.in_pairs
    key = tokens_key(spec.model.path, file.sha256, TokenOptions.of(spec), pairs=pairs)
    shared = os.environ.get(token_folder.FOLDER)
    folders = [*([Path(shared)] if shared else []), run.path(token_folder.IN_RUN)]

    def look() -> TokenSet | None:
        return next(
            (found.samples for folder in folders if (found := find(folder, key)) is not None), None
        )

    for fault in _without_damaged(folders, key):
        warn(f"{file.name}: its stored tokens {fault}. They are not used, and made again.")
    samples = look()
    if not all(from_all(samples is not None)):
        makes = samples is None and _is_first_here()
        together(make(file) if makes else iter(()))
        samples = samples or look()
    if not all(from_all(samples is not None)):
        raise OutsideError(
            f"{file.name}: its tokens are not on all ranks; they were written to {folders[-1]}."
        )
    assert samples is not None, "it is on every rank"
    if len(set(from_all(samples.digest))) > 1:
        raise DataError(
            f"{file.name}: the hosts of the job make different tokens of it. Install the same "
            "versions of transformers and "
            "tokenizers on all of them.",
            code="tokens_differ",
        )
    return samples


def _without_damaged(folders: list[Path], key: str) -> list[str]:
    """Read all of the set that would be used, once a host, and take what is damaged out of the way.

    Returns what was wrong, by each host that it was on. Called by all ranks together.

    The set was right when it was stored; every job would train on a bit that has changed since.
    """
    faults: dict[Path, str] = {}

    def read() -> Iterator[None]:
        for folder in list(folders):
            found = find(folder, key)
            if found is None:
                continue
            fault = yield from _with_beats(damage(found.entry.folder))
            found.entry.close()
            if fault is None:
                return
            faults[folder] = fault
            # The service makes it again for the next job. What others read, or what cannot be
            # written here, stays.
            if not Cache(folder).remove(key) and folder == folders[-1]:
                raise OutsideError(f"{folder / key}: its tokens {fault}, and it cannot be removed.")

    together(read() if _is_first_here() else iter(()))
    damaged = from_all({str(folder): fault for folder, fault in faults.items()})
    for named in damaged:
        folders[:] = [
            folder for folder in folders if str(folder) not in named or folder == folders[-1]
        ]
    return [fault for named in damaged for fault in named.values()]


def _with_beats(work: Generator[None, None, str | None]) -> Generator[None, None, str | None]:
    """The same, coming back now and then only."""
    due = time.monotonic() + BEAT_SECONDS
    while True:
        try:
            next(work)
        except StopIteration as ended:
            return ended.value
        if time.monotonic() >= due:
            yield
            due = time.monotonic() + BEAT_SECONDS


def _is_first_here() -> bool:
    """Whether this is the first rank of its host."""
    return int(os.environ.get("LOCAL_RANK") or (0 if alone() else dist.get_rank())) == 0


def _made(
    threads: ThreadPoolExecutor, examiner: Examiner, spec: JobSpec, file: DataFileRef
) -> Iterator[None]:
    """Tokenise a file; comes back now and then. Raises FtError, OSError."""
    made = threads.submit(tokenise, spec, file, examiner)
    while wait([made], BEAT_SECONDS).not_done:
        yield
    made.result()


def tokenise(spec: JobSpec, file: DataFileRef, examiner: Examiner) -> None:
    """Have a file of a job tokenised into the folder of an examiner, which has limits around what
    chat template and data may do. Raises DataError for data that cannot be trained on, SpecError,
    UnavailableError, OSError.
    """
    options = TokenOptions.of(spec)
    pairs = spec.in_pairs
    data = open_data(Path(file.path), file.files, options.columns)
    gone = next((path for path in data.paths if not path.is_file()), None)
    if gone is not None:
        raise DataError(f"{file.name}: the file is gone from {gone}.", code="file_missing")
    if data.digest() != file.sha256:
        raise DataError(
            f"{file.name}: the file has changed since the job was submitted.", code="file_changed"
        )
    request = examiner.request(
        file, Path(file.path), spec.model.path, spec.longest_sample, options, pairs=pairs
    )
    folder = Path(request.tokens)
    folder.mkdir(parents=True, exist_ok=True)
    report = examiner.examine(request)
    if (error := report.error("training_file", file.name)) is not None:
        raise DataError(error.message, code=error.code)
    token_set = find(folder, tokens_key(spec.model.path, file.sha256, options, pairs=pairs))
    if token_set is None:
        raise OSError(errno.ENOSPC, "no room for its tokens", str(folder))
    token_set.entry.close()
