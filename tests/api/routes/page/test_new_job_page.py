"""The form of a new job as it is served: what it offers to choose from, and how files are told
apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest

from api.http.sessions import TOKEN_HEADER, token_of
from api.page import job_form
from api.routes.page import new_job_page
from ft_service.bases.catalogue import Catalogue
from ft_service.bases.describing import Descriptions
from tests.support.bases import TINY, save_base
from tests.support.describing import described_here
from tests.support.rest.service import Service
from tests.support.rollouts import method


def test_bases_that_cannot_be_tuned_are_not_offered_nor_named_by_a_refusal(
    service: Service, client: openai.OpenAI, browser: httpx2.Client, training_file: str
) -> None:
    folder = service.settings.models[0]
    save_base(folder / "no-decoder")
    (folder / "no-decoder/config.json").write_text(json.dumps(TINY | {"model_type": "t5"}))
    assert "no-decoder" in [model.id for model in client.models.list()], "with the reason why not"
    bases = re.search(r'<select id="model".*?</select>', browser.get("/new").text, re.DOTALL)
    assert bases is not None
    assert "tiny" in bases[0]
    assert "no-decoder" not in bases[0]
    with pytest.raises(
        openai.BadRequestError, match=r"There are: meta-llama/Llama-3\.2-1B, tiny"
    ) as refused:
        client.fine_tuning.jobs.create(model="absent", training_file=training_file)
    assert "no-decoder" not in str(refused.value)


def test_files_of_one_name_differ_by_when_they_came(
    browser: httpx2.Client, client: openai.OpenAI
) -> None:
    made = [
        client.files.create(file=("chat.jsonl", b'{"text": "a"}\n'), purpose="fine-tune")
        for _ in range(2)
    ]
    offered = re.findall(r'<option value="file-[^>]*>([^<]*)<', browser.get("/new").text)
    assert len(set(offered)) == len(made), "for training and for validation"
    assert all(re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", text) for text in offered)


def test_run_again_keeps_files_that_are_not_among_the_newest_and_says_which_were_deleted(
    client: openai.OpenAI,
    browser: httpx2.Client,
    training_file: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without its validation file in the form, the same job would be created without validation."""
    monkeypatch.setattr(new_job_page, "MOST_FILES", 1)
    line = (
        json.dumps({"messages": [{"role": r, "content": "a"} for r in ("user", "assistant")]})
        + "\n"
    ).encode()
    validation = client.files.create(file=("validation.jsonl", line), purpose="fine-tune").id
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=training_file, validation_file=validation
    )
    client.files.create(file=("newer.jsonl", line), purpose="fine-tune")
    opened = browser.get(f"/new?again={job.id}").text
    assert re.findall(r'<option value="(file-[^"]*)" selected', opened) == [
        training_file,
        validation,
    ]
    assert "was deleted" not in opened
    client.files.delete(validation)
    opened = browser.get(f"/new?again={job.id}").text
    assert re.findall(r'<option value="(file-[^"]*)" selected', opened) == [training_file]
    assert "The validation file of that job was deleted." in opened


def test_prompts_are_checked_as_those_of_reinforcement(
    browser: httpx2.Client, client: openai.OpenAI
) -> None:
    line = {"messages": [{"role": "user", "content": "1 + 1 ="}], "answer": "2"}
    prompts = client.files.create(
        file=("prompts.jsonl", (json.dumps(line) + "\n").encode() * 4), purpose="fine-tune"
    )
    headers = {TOKEN_HEADER: token_of(*browser.cookies.values())}
    form = {"model": "tiny", "training_file": prompts.id, "other": json.dumps({"method": method()})}
    plan = browser.post("/new/plan", data=form, headers=headers).text
    assert "cannot be trained on" not in plan
    assert "Peak memory per GPU" in plan


@pytest.mark.parametrize("param", ["training_file", "validation_file"])
def test_a_job_is_not_created_with_a_file_that_the_form_calls_unusable(
    browser: httpx2.Client, client: openai.OpenAI, training_file: str, param: str
) -> None:
    unknown = client.files.create(
        file=("own.csv", b"ask,say\n" + b"one,two\n" * 4), purpose="fine-tune"
    ).id
    headers = {TOKEN_HEADER: token_of(*browser.cookies.values())}
    form = {"model": "tiny", "training_file": training_file, param: unknown}
    refused = browser.post("/new", data=form, headers=headers)
    assert refused.status_code == 400
    assert f"The {param.replace('_', ' ')} cannot be trained on." in refused.text
    assert not client.fine_tuning.jobs.list().data
    mapped = browser.post(
        "/new", data=form | {"data": "{instruction: ask, output: say}"}, headers=headers
    )
    assert (mapped.status_code == 400) == (param == "validation_file"), (
        "the mapping is of both files"
    )


def test_yaml_is_read_and_written_beside_the_event_loop(
    browser: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte of it takes many seconds, in which the server would answer nobody."""
    where: dict[str, bool] = {}

    def noted(name: str) -> Callable[..., Any]:
        function = getattr(job_form, name)

        def call(*given: Any) -> Any:
            with contextlib.suppress(RuntimeError):
                where[name] = asyncio.get_running_loop() is not None
            where.setdefault(name, False)
            return function(*given)

        return call

    for name in ("body_of", "yaml_text", "fields_of"):
        monkeypatch.setattr(job_form, name, noted(name))
    headers = {TOKEN_HEADER: token_of(*browser.cookies.values())}
    assert (
        browser.post(
            "/new/plan", data={"model": "tiny", "other": "a: ["}, headers=headers
        ).status_code
        == 200
    )
    assert browser.post("/new/plan", data={"model": "tiny"}, headers=headers).status_code == 200
    assert browser.get("/new").status_code == 200
    assert where == {"body_of": False, "yaml_text": False, "fields_of": False}


def test_a_base_that_is_being_examined_is_offered_with_a_note_and_a_job_on_it_is_taken(
    service: Service, client: openai.OpenAI, browser: httpx2.Client, training_file: str
) -> None:
    descriptions = Descriptions(None, "tests")
    catalogue = Catalogue.from_settings(service.settings, descriptions)
    service.app.state.services = replace(service.app.state.services, catalogue=catalogue)
    opened = browser.get("/new").text
    assert '<option value="tiny">tiny (being examined)</option>' in opened
    headers = {TOKEN_HEADER: token_of(*browser.cookies.values())}
    form = {"model": "tiny", "training_file": training_file}
    plan = browser.post("/new/plan", data=form, headers=headers).text
    assert "This base is being examined." in plan
    assert 'role="alert"' not in plan
    assert 'hx-trigger="load delay:5s"' in plan, "the plan is asked for again"
    made = browser.post("/new", data=form, headers=headers | {"hx-request": "true"})
    assert (
        client.fine_tuning.jobs.retrieve(made.headers["hx-redirect"].removeprefix("/jobs/")).model
        == "tiny"
    )
    folder = service.settings.models[0] / "tiny"
    descriptions.add(folder, described_here(folder))
    assert '<option value="tiny">tiny</option>' in browser.get("/new").text
    assert "Peak memory per GPU" in browser.post("/new/plan", data=form, headers=headers).text


def test_values_to_try_create_a_sweep_after_a_plan_of_its_jobs(
    client: openai.OpenAI, browser: httpx2.Client, training_file: str
) -> None:
    headers = {TOKEN_HEADER: token_of(*browser.cookies.values()), "hx-request": "true"}
    form = {
        "model": "tiny",
        "training_file": training_file,
        "validation_file": training_file,
        "sweep": "lora.r: [4, 8, 16]",
    }
    plan = browser.post("/new/plan", data=form, headers=headers).text
    assert "3 jobs" in plan
    assert "Peak memory per GPU" in plan
    refused = browser.post("/new/plan", data=form | {"sweep": "lora.q: [4]"}, headers=headers).text
    assert "Not ready" in refused
    assert "lora.q" in refused
    made = browser.post("/new", data=form, headers=headers)
    address = made.headers["hx-redirect"]
    assert address.startswith("/sweeps/ftsweep-")
    sweep = client.get(f"/fine_tuning{address}", cast_to=dict[str, Any])
    assert [job["values"] for job in sweep["jobs"]] == [{"lora.r": r} for r in (4, 8, 16)]


def test_a_base_that_nothing_here_can_describe_is_shown_with_the_way_out(
    service: Service, browser: httpx2.Client, training_file: str
) -> None:
    descriptions = Descriptions(None, None, missing="Install the <workers>.")
    catalogue = Catalogue.from_settings(service.settings, descriptions)
    service.app.state.services = replace(service.app.state.services, catalogue=catalogue)
    headers = {TOKEN_HEADER: token_of(*browser.cookies.values())}
    plan = browser.post(
        "/new/plan", data={"model": "tiny", "training_file": training_file}, headers=headers
    ).text
    assert "Install the &lt;workers&gt;." in plan
    assert "hx-post" not in plan, "to ask again does not help"


@pytest.mark.parametrize("loss", ["dpo", "simpo", "orpo"])
def test_the_card_of_pairs_has_a_choice_of_losses(
    browser: httpx2.Client, client: openai.OpenAI, loss: str
) -> None:
    line = {"prompt": "1 + 1 =", "chosen": "2", "rejected": "3"}
    pairs = client.files.create(
        file=("pairs.jsonl", (json.dumps(line) + "\n").encode() * 4), purpose="fine-tune"
    )
    headers = {TOKEN_HEADER: token_of(*browser.cookies.values())}
    form = {"model": "tiny", "training_file": pairs.id, "method": "dpo", "method.pairs": loss}
    shown = browser.post("/new/plan", data={**form, "method.beta": "0.3"}, headers=headers)
    assert shown.status_code == 200
    assert f"type: {loss}" in shown.text
    assert "beta: 0.3" in shown.text
    assert "cannot be trained on" not in shown.text
