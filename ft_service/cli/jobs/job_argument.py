"""Job of a command-line argument: an id or its beginning, a suffix, a tuned model's name, or
`last`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import typer

from ft_service.cli.output import connect
from ft_service.client.client import Client
from ft_service.client.responses import RemoteJob
from ft_service.errors import FtError, NotFoundError, SpecError
from ft_service.ids import new_id
from ft_service.spec import TunedName, is_tuned
from ft_service.spec_files.parent import LAST, PREFIX, SEARCHED

_SHOWN = 5
_WHOLE = len(new_id(PREFIX))
_SHORT = 8

Fit = Callable[[RemoteJob], bool]


def _any(job: RemoteJob) -> bool:
    return True


def short_name(job: RemoteJob) -> str:
    """Return a short name for titles: what the job is called, if anything, and the beginning of
    its id.
    """
    short = job.id.removeprefix(PREFIX)[:_SHORT]
    called = job.name or job.suffix
    return f"{called} ({short})" if called else short


def complete_job(incomplete: str) -> list[str]:
    """Return shell completions from the newest jobs. An error must not disturb the prompt."""
    with contextlib.suppress(FtError, OSError), connect() as client:
        newest = client.jobs(50)
        words = [
            LAST,
            *dict.fromkeys(called for job in newest if (called := job.name or job.suffix)),
            *(job.id for job in newest),
        ]
        return [word for word in words if word.startswith(incomplete)]
    return []


_ARGUMENT = typer.Argument(
    metavar="ID",
    help="The job: its id or the beginning of it, its name or suffix (the newest with that), or "
    "`last`.",
    autocompletion=complete_job,
    show_default=False,
)
JobId = Annotated[str, _ARGUMENT]
OneJobId = Annotated[str | None, _ARGUMENT]
"""The same where an option may take its place."""


def find_job(client: Client, word: str, *, only_one: bool = False, fit: Fit = _any) -> str:
    """Return the id of the job that a word means.

    `only_one`: reject a suffix that several jobs have; `fit`: of several jobs with a suffix, prefer
    those for which it is true.

    Raises NotFoundError if no job matches, SpecError if several do.
    """
    if word.startswith(PREFIX) and len(word) == _WHOLE:
        return word
    if is_tuned(word):
        with contextlib.suppress(ValueError):
            return TunedName.parse(word).job_id
    return choose_job(
        word, client.jobs(1 if word == LAST else SEARCHED), only_one=only_one, fit=fit
    ).id


def choose_job(
    word: str, jobs: Sequence[RemoteJob], *, only_one: bool = False, fit: Fit = _any
) -> RemoteJob:
    """Return the job that a word means among some (newest first). Raises as `find_job`."""
    if word == LAST and jobs:
        return jobs[0]
    exact = [job for job in jobs if job.id == word]
    named = [job for job in jobs if word in (job.name, job.suffix)]
    named = [job for job in named if fit(job)] or named
    by_prefix = [job for job in jobs if word and job.id.startswith((word, PREFIX + word))]
    for matching in (exact, named[:1] if not only_one else named, by_prefix):
        if len(matching) == 1:
            return matching[0]
        if matching:
            shown = ", ".join(f"{job.id} ({job.status})" for job in matching[:_SHOWN])
            more = f" and {len(matching) - _SHOWN} more" if len(matching) > _SHOWN else ""
            raise SpecError(
                f"{word!r} means {len(matching)} jobs: {shown}{more}. Give more of the id.",
                param="id",
            )
    if not jobs:
        raise NotFoundError("There are no jobs yet. Create one: ft submit SPEC", param="id")
    raise NotFoundError(
        f"There is no job {word!r}. Give an id that `ft jobs` shows, or its beginning, a suffix, "
        "or `last`.",
        param="id",
    )


def find_model(client: Client, word: str) -> str:
    """Return the name of the model that a word means: a base or a tuned model by its name, or that
    of a job, as in every command. Raises SpecError that lists the available ones.
    """
    try:
        client.model(word)
        return word
    except NotFoundError as error:
        unknown = error
    jobs = client.jobs(SEARCHED)
    if not is_tuned(word):
        with contextlib.suppress(NotFoundError):
            job = choose_job(word, jobs, fit=lambda job: job.fine_tuned_model is not None)
            if job.fine_tuned_model is None:
                message = (
                    f"model = {word!r}: job {job.id} ({job.status}) has no tuned model: "
                    "wait until it has succeeded."
                )
                raise SpecError(message, param="model", code="model_not_found")
            return job.fine_tuned_model
    tuned = [job for job in jobs if job.fine_tuned_model is not None]
    words = list(dict.fromkeys(job.suffix or job.id for job in tuned))
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    there = f" Jobs with tuned models: {', '.join(words[:_SHOWN])}{more}." if words else ""
    raise SpecError(f"{unknown.message}{there}", param="model", code=unknown.code)


@contextlib.contextmanager
def connect_to_job(
    word: str, *, only_one: bool = False, fit: Fit = _any
) -> Iterator[tuple[Client, str]]:
    """Yield a client of the server, and the id of the job that a word means."""
    with connect() as client:
        yield client, find_job(client, word, only_one=only_one, fit=fit)
