"""The list of jobs: what is painted first, and whose jobs a key may look at."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx2
import openai
import pytest
from sqlalchemy import update

from api.http.sessions import token_of
from api.routes.page import data_page
from ft_service.jobs.states import Phase, State
from ft_service.store.records import NewEvent, NewKey, Scope
from ft_service.store.tables import jobs
from tests.support.page.sessions import secret_of
from tests.support.rest.service import METRICS, TRAINING, Service, put

LINKED = re.compile(r'<a href="/jobs/(ftjob-\w+)"')


@pytest.fixture
def opened(service: Service) -> Iterator[dict[str, httpx2.Client]]:
    """Browsers that are signed in with keys of two projects: PROJECT SCOPE → browser."""
    service.store.projects.ensure_project("theirs", "local")
    browsers = {}
    holders: tuple[tuple[str, Scope], ...] = (
        ("default", "admin"),
        ("default", "submit"),
        ("theirs", "admin"),
    )
    for project, scope in holders:
        _, key = service.store.keys.create_key(NewKey(project_id=project, name="k", scope=scope))
        browsers[f"{project} {scope}"] = browser = httpx2.Client(
            base_url=service.url, trust_env=False, timeout=60.0
        )
        browser.post("/sign-in", data={"key": key})
    yield browsers
    for browser in browsers.values():
        browser.close()


@pytest.fixture
def their_job(service: Service, opened: dict[str, httpx2.Client]) -> str:
    client = service.client(
        service.store.keys.create_key(NewKey(project_id="theirs", name="k", scope="submit"))[1]
    )
    file = client.files.create(file=("train.jsonl", TRAINING), purpose="fine-tune")
    return client.fine_tuning.jobs.create(
        model="tiny", training_file=file.id, suffix="their-job"
    ).id


def test_what_a_screen_holds_is_painted_first_and_then_all_of_it(
    client: openai.OpenAI, training_file: str, opened: dict[str, httpx2.Client]
) -> None:
    made = [
        client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
        for _ in range(22)
    ]
    painted = opened["default submit"].get("/jobs").text
    assert LINKED.findall(painted) == made[:1:-1]
    assert 'hx-get="/page/live/jobs?&seen=" hx-trigger="load delay' in painted
    assert LINKED.findall(opened["default submit"].get("/page/live/jobs?").text) == made[::-1]


def test_the_list_is_ordered_by_the_loss_that_it_shows(
    service: Service, client: openai.OpenAI, training_file: str, opened: dict[str, httpx2.Client]
) -> None:
    made = [
        client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
        for _ in range(4)
    ]
    for job_id, loss in zip(made, (0.9, 0.3, 0.6), strict=False):
        metrics = METRICS.model_copy(update={"train_loss": loss})
        event = NewEvent(level="info", message="Step 5/20", metrics=metrics)
        service.store.jobs.add_events(service.store.jobs.get_job("default", job_id), [event])
    client.fine_tuning.jobs.cancel(made[2])
    with service.store.writing() as connection:
        connection.execute(update(jobs).values(attempt=1))
    browser = opened["default submit"]
    by_loss = browser.get("/page/live/jobs?sort=loss").text
    assert LINKED.findall(by_loss) == [made[1], made[0], made[3], made[2]]
    assert "sort=loss&seen=" in by_loss.replace("&amp;", "&"), "it stays when it refreshes itself"
    assert LINKED.findall(browser.get("/page/live/jobs?sort=size").text)[0] == made[3]
    form = browser.get("/jobs?sort=loss").text
    assert '<option value="loss" selected>Lowest loss first</option>' in form


def test_what_is_unfinished_stands_above_all_others_and_nothing_is_left_out(
    service: Service, client: openai.OpenAI, training_file: str, opened: dict[str, httpx2.Client]
) -> None:
    made = [
        client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
        for _ in range(5)
    ]
    for job_id in (made[0], made[3], made[4]):
        client.fine_tuning.jobs.cancel(job_id)
    browser = opened["default submit"]
    listed = browser.get("/page/live/jobs?").text
    assert LINKED.findall(listed) == [made[2], made[1], made[4], made[3], made[0]]
    assert re.findall(r'scope="rowgroup">(\w+)<', listed) == ["Unfinished", "Earlier"]
    older = browser.get(f"/page/live/jobs?after={made[3]}").text
    assert LINKED.findall(older) == [made[2], made[1], made[0]], "in their order"
    assert LINKED.findall(browser.get("/page/live/jobs?status=cancelled").text) == [
        made[4],
        made[3],
        made[0],
    ]


def test_jobs_are_searched_by_name(
    client: openai.OpenAI, training_file: str, opened: dict[str, httpx2.Client]
) -> None:
    nightly, other = (
        client.fine_tuning.jobs.create(model="tiny", training_file=training_file, suffix=suffix).id
        for suffix in ("Nightly-7", "x")
    )
    found = opened["default submit"].get("/jobs?suffix=night").text
    assert (LINKED.findall(found), other in found) == ([nightly], False)
    assert 'name="suffix" value="night"' in found


def test_a_job_that_is_over_is_deleted_on_the_page(
    service: Service, client: openai.OpenAI, training_file: str, opened: dict[str, httpx2.Client]
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    browser = opened["default submit"]
    headers = {"x-csrf-token": token_of(secret_of(browser)), "hx-request": "true"}
    assert 'id="verb-delete"' not in browser.get(f"/jobs/{job_id}").text
    assert browser.post(f"/jobs/{job_id}/delete", headers=headers).status_code == 400, (
        "it is not over"
    )
    client.fine_tuning.jobs.cancel(job_id)
    assert 'id="verb-delete"' in browser.get(f"/jobs/{job_id}").text
    deleted = browser.post(f"/jobs/{job_id}/delete", headers=headers)
    assert (deleted.status_code, deleted.headers["hx-redirect"]) == (204, "/jobs")
    assert browser.get(f"/jobs/{job_id}").status_code == 404


def test_a_managing_key_looks_at_another_projects_list_and_at_no_more(
    service: Service, opened: dict[str, httpx2.Client], their_job: str
) -> None:
    managing = opened["default admin"]
    own = managing.get("/jobs").text
    assert '<option value="theirs">' in own
    assert their_job not in own
    for path in ("/jobs?project=theirs", "/page/live/jobs?project=theirs"):
        text = managing.get(path).text
        assert "their-job" in text
        assert their_job in text
        assert not LINKED.findall(text), "only its own project's keys open it"
        assert 'name="job"' not in text
    assert managing.get(f"/jobs/{their_job}").status_code == 404
    assert managing.get(f"/v1/fine_tuning/jobs/{their_job}").status_code == 404


@pytest.mark.parametrize("whose", ["default submit", "theirs admin"])
def test_no_other_key_looks_at_another_projects_list(
    whose: str, opened: dict[str, httpx2.Client], their_job: str, service: Service
) -> None:
    other = "theirs" if whose.startswith("default") else "default"
    assert opened["default admin"].get("/page/live/jobs?project=theirs").status_code == 200, (
        "and it is remembered"
    )
    browser = opened[whose]
    assert 'name="project"' not in browser.get("/jobs").text
    for path in (
        f"/jobs?project={other}",
        f"/page/live/jobs?project={other}",
        f"/v1/fine_tuning/jobs?project={other}",
    ):
        answer = browser.get(path)
        assert answer.status_code == 404, path
        assert (
            f"There is no project &#39;{other}&#39;" in answer.text
            or f"There is no project '{other}'" in answer.text
        )


def test_a_project_of_another_organisation_is_none(service: Service) -> None:
    service.store.projects.ensure_project("rival", "rivals")
    for project in ("rival", "nothing"):
        answer = service.http("GET", f"/v1/fine_tuning/jobs?project={project}")
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            404,
            f"There is no project '{project}' in this organisation.",
        )
    assert service.http("GET", "/v1/fine_tuning/jobs?project=default").json()["data"] == []


def test_a_job_that_stops_cannot_be_paused_again(
    service: Service, client: openai.OpenAI, browser: httpx2.Client, training_file: str
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    running = {"state": State.RUNNING, "attempt": 1, "host": "h"}
    put(service, job_id, phase=Phase.TRAINING, **running)
    assert "verb-pause" in browser.get(f"/jobs/{job_id}").text
    put(service, job_id, phase=Phase.STOPPING, **running)
    assert "verb-pause" not in browser.get(f"/jobs/{job_id}").text


@pytest.mark.parametrize("inference_url", ["http://vllm/v1", ""])
def test_only_a_tuned_model_is_offered_to_try(
    service: Service,
    client: openai.OpenAI,
    browser: httpx2.Client,
    training_file: str,
    inference_url: str,
) -> None:
    service.use(service.settings.model_copy(update={"inference_url": inference_url}))
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    client.fine_tuning.jobs.cancel(job_id)
    opened = browser.get(f"/jobs/{job_id}/checkpoints").text
    assert "Cancelled" in opened
    assert "model=None" not in opened
    assert "It cannot be tried here" not in opened


def test_list_and_job_say_the_same_time_left_whatever_the_last_step_took(
    service: Service, client: openai.OpenAI, browser: httpx2.Client, training_file: str
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    for step, seconds in enumerate((10.0, 10.0, 10.0, 10.0, 60.0), 1):
        metrics = METRICS.model_copy(
            update={"step": step, "total_steps": 1005, "step_seconds": seconds}
        )
        event = NewEvent(level="info", message=f"Step {step}/1005", metrics=metrics)
        put(service, job_id, event, state=State.RUNNING, phase=Phase.TRAINING, attempt=1, host="h")
    now = service.store.now()
    ends = client.fine_tuning.jobs.retrieve(job_id).estimated_finish
    assert ends is not None
    assert 19_900 < ends - now < 20_000, "1000 steps of 20 s in the mean"
    times = [
        re.findall(r'data-until="([^"]+)"', browser.get(path).text)
        for path in ("/page/live/jobs?", f"/jobs/{job_id}")
    ]
    assert len({minute[:15] for found in times for minute in found}) <= 2
    assert all(times)


def test_a_form_works_without_scripts_and_what_no_form_sends_is_refused_on_a_page(
    client: openai.OpenAI, training_file: str, browser: httpx2.Client
) -> None:
    """Browsers send fields that were left empty, too."""
    logs = (
        f"/jobs/{client.fine_tuning.jobs.create(model='tiny', training_file=training_file).id}/logs"
    )
    shown = browser.get(logs, params={"attempt": "", "rank": ""})
    assert shown.status_code == 200
    assert "Nothing was printed yet." in shown.text
    wrong = browser.get(logs, params={"rank": "first"})
    assert (wrong.status_code, wrong.headers["content-type"]) == (400, "text/html; charset=utf-8")
    assert "rank = &#39;first&#39;: must be a whole number" in wrong.text


def test_a_list_is_filtered_by_a_pair_or_not_at_all(browser: httpx2.Client) -> None:
    assert browser.get("/jobs", params={"metadata": "team=red"}).status_code == 200
    refused = browser.get("/jobs", params={"metadata": "team"})
    assert refused.status_code == 400
    assert "metadata = &#39;team&#39;: filter by a pair, as key=value." in refused.text


def test_the_list_of_files_goes_on(
    client: openai.OpenAI,
    training_file: str,
    browser: httpx2.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_page, "_FILES", 1)
    newer = client.files.create(file=("newer.jsonl", TRAINING), purpose="fine-tune").id
    first = browser.get("/data").text
    assert (newer in first, training_file in first) == (True, False)
    [older] = re.findall(r'<a href="(/data\?after=[^"]+)" rel="next">Older</a>', first)
    second = browser.get(older).text
    assert (newer in second, training_file in second) == (False, True)
    assert 'rel="next"' not in second
    assert '<a href="/data">Newest</a>' in second
