from __future__ import annotations

import pytest

from ft_service.cli.jobs.job_argument import choose_job, find_job
from ft_service.client.responses import RemoteJob
from ft_service.errors import FtError, NotFoundError, SpecError
from tests.support.rest.stub_server import StubServer, job_body

NEWEST = "ftjob-abcdXY"
MIDDLE = "ftjob-abEF"
OLDEST = "ftjob-zz"
SUFFIXES = {NEWEST: "mine", MIDDLE: "mine", OLDEST: "other"}
JOBS = [
    RemoteJob.model_validate(job_body(name, suffix=suffix)) for name, suffix in SUFFIXES.items()
]


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("last", NEWEST),
        (MIDDLE, MIDDLE),
        ("ftjob-abc", NEWEST),
        ("abE", MIDDLE),
        ("z", OLDEST),
        ("other", OLDEST),
        ("mine", NEWEST),
    ],
)
def test_a_word_means_a_job(word: str, found: str) -> None:
    assert choose_job(word, JOBS).id == found


@pytest.mark.parametrize(
    ("word", "kind", "said"),
    [
        (
            "ab",
            SpecError,
            f"'ab' means 2 jobs: {NEWEST} (queued), {MIDDLE} (queued). Give more of the id.",
        ),
        ("nobody", NotFoundError, "There is no job 'nobody'. Give an id that `ft jobs` shows"),
        ("", NotFoundError, "There is no job ''."),
    ],
)
def test_what_means_several_or_none_is_said(word: str, kind: type[FtError], said: str) -> None:
    with pytest.raises(
        kind, match="^" + said.replace("(", r"\(").replace(")", r"\)").replace(".", r"\.")
    ):
        choose_job(word, JOBS)


def test_what_cannot_be_undone_needs_one_job() -> None:
    with pytest.raises(SpecError, match="'mine' means 2 jobs"):
        choose_job("mine", JOBS, only_one=True)
    unfinished = [
        RemoteJob.model_validate(job_body(name, "succeeded", suffix="mine")) for name in (NEWEST,)
    ]
    unfinished += [RemoteJob.model_validate(job_body(MIDDLE, "running", suffix="mine"))]
    assert choose_job("mine", unfinished, only_one=True, fit=lambda job: not job.over).id == MIDDLE


def test_a_whole_id_and_a_tuned_model_need_no_list() -> None:
    server = StubServer()
    whole = "ftjob-" + "a" * 24
    assert find_job(server.client(), whole) == whole
    assert find_job(server.client(), f"ft:tiny:local:mine:{'a' * 24}:ckpt-step-4") == whole
    assert server.requests == []
