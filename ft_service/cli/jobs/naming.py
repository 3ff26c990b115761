"""Which job a word on the command line means: an id or its beginning, a suffix, a tuned model's name, or `last`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import typer

from ft_service.cli.output import connect
from ft_service.client.answers import RemoteJob
from ft_service.client.client import Client
from ft_service.errors import FtError, NotFoundError, SpecError
from ft_service.ids import new_id
from ft_service.local.parent import LAST, PREFIX, SEARCHED
from ft_service.spec import TunedName, is_tuned

_SHOWN = 5
_WHOLE = len(new_id(PREFIX))
_SHORT = 8

Fit = Callable[[RemoteJob], bool]


def _any(job: RemoteJob) -> bool:
    return True


def short_name(job: RemoteJob) -> str:
    """A job for a title: its suffix, if it has one, and as much of its id as names it."""
    short = job.id.removeprefix(PREFIX)[:_SHORT]
    return f"{job.suffix} ({short})" if job.suffix else short


def complete_job(incomplete: str) -> list[str]:
    """Words of the newest jobs that begin as typed, for the shell. An error must not disturb the prompt."""
    with contextlib.suppress(FtError, OSError), connect() as client:
        newest = client.jobs(50)
        words = [LAST, *dict.fromkeys(job.suffix for job in newest if job.suffix), *(job.id for job in newest)]
        return [word for word in words if word.startswith(incomplete)]
    return []


JobId = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="The job: its id or the beginning of it, its suffix (the newest with that), or `last`.",
        autocompletion=complete_job,
    ),
]


def find_job(client: Client, word: str, *, only_one: bool = False, fit: Fit = _any) -> str:
    """The id of the job that a word means. `only_one`: a suffix that several jobs have is not enough; `fit`: of several with
    it those come first that this can be asked of.

    Raises NotFoundError if it means none, SpecError if it means several.
    """
    if word.startswith(PREFIX) and len(word) == _WHOLE:
        return word
    if is_tuned(word):
        with contextlib.suppress(ValueError):
            return TunedName.parse(word).job_id
    return choose(word, client.jobs(1 if word == LAST else SEARCHED), only_one=only_one, fit=fit).id


def choose(word: str, jobs: Sequence[RemoteJob], *, only_one: bool = False, fit: Fit = _any) -> RemoteJob:
    """The job among some (newest first) that a word means. Raises as `find_job`."""
    if word == LAST and jobs:
        return jobs[0]
    exact = [job for job in jobs if job.id == word]
    named = [job for job in jobs if job.suffix == word]
    named = [job for job in named if fit(job)] or named
    begun = [job for job in jobs if word and (job.id.startswith(word) or job.id.startswith(PREFIX + word))]
    for found in (exact, named[:1] if not only_one else named, begun):
        if len(found) == 1:
            return found[0]
        if found:
            shown = ", ".join(f"{job.id} ({job.status})" for job in found[:_SHOWN])
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise SpecError(f"{word!r} means {len(found)} jobs: {shown}{more}. Give more of the id.", param="id")
    if not jobs:
        raise NotFoundError("There are no jobs yet. Create one: ft submit SPEC", param="id")
    raise NotFoundError(
        f"There is no job {word!r}. Give an id that `ft jobs` shows, or its beginning, a suffix, or `last`.", param="id"
    )


def find_model(client: Client, word: str) -> str:
    """The name of the model that a word means: a base or a tuned model by its name; or that of a job, which the word means as
    in every command. Raises SpecError that tells what there is."""
    try:
        client.model(word)
        return word
    except NotFoundError as error:
        unknown = error
    jobs = client.jobs(SEARCHED)
    if not is_tuned(word):
        with contextlib.suppress(NotFoundError):
            job = choose(word, jobs, fit=lambda job: job.fine_tuned_model is not None)
            if job.fine_tuned_model is None:
                message = f"model = {word!r}: job {job.id} ({job.status}) has no tuned model: wait until it has succeeded."
                raise SpecError(message, param="model", code="model_not_found")
            return job.fine_tuned_model
    tuned = [job for job in jobs if job.fine_tuned_model is not None]
    words = list(dict.fromkeys(job.suffix or job.id for job in tuned))
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    there = f" Jobs with tuned models: {', '.join(words[:_SHOWN])}{more}." if words else ""
    raise SpecError(f"{unknown.message}{there}", param="model", code=unknown.code)


@contextlib.contextmanager
def reaching(word: str, *, only_one: bool = False, fit: Fit = _any) -> Iterator[tuple[Client, str]]:
    """A client of the server, and the id of the job that a word means."""
    with connect() as client:
        yield client, find_job(client, word, only_one=only_one, fit=fit)
