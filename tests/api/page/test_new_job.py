"""The form of a new job as it is served: what it offers to choose from, and how files are told apart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx2
import openai
import pytest

from ft_service.jobs.states import Phase, State
from ft_service.store.records import NewEvent
from tests.support.bases import TINY, save_base
from tests.support.rest.service import METRICS, Service, put


@pytest.fixture
def browser(service: Service) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=service.url, trust_env=False) as browser:
        browser.post("/sign-in", data={"key": service.key})
        yield browser


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
    with pytest.raises(openai.BadRequestError, match=r"There are: meta-llama/Llama-3\.2-1B, tiny") as refused:
        client.fine_tuning.jobs.create(model="absent", training_file=training_file)
    assert "no-decoder" not in str(refused.value)


def test_files_of_one_name_differ_by_when_they_came(browser: httpx2.Client, client: openai.OpenAI) -> None:
    made = [client.files.create(file=("chat.jsonl", b'{"text": "a"}\n'), purpose="fine-tune") for _ in range(2)]
    offered = re.findall(r'<option value="file-[^>]*>([^<]*)<', browser.get("/new").text)
    assert len(set(offered)) == len(made), "for training and for validation"
    assert all(re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", text) for text in offered)


def test_a_job_that_stops_cannot_be_paused_again(
    service: Service, client: openai.OpenAI, browser: httpx2.Client, training_file: str
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    running = {"state": State.RUNNING, "attempt": 1, "host": "h"}
    put(service, job_id, phase=Phase.TRAINING, **running)
    assert "verb-pause" in browser.get(f"/jobs/{job_id}").text
    put(service, job_id, phase=Phase.STOPPING, **running)
    assert "verb-pause" not in browser.get(f"/jobs/{job_id}").text


def test_list_and_job_say_the_same_time_left_whatever_the_last_step_took(
    service: Service, client: openai.OpenAI, browser: httpx2.Client, training_file: str
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    for step, seconds in enumerate((10.0, 10.0, 10.0, 10.0, 60.0), 1):
        metrics = METRICS.model_copy(update={"step": step, "total_steps": 1005, "step_seconds": seconds})
        event = NewEvent(level="info", message=f"Step {step}/1005", metrics=metrics)
        put(service, job_id, event, state=State.RUNNING, phase=Phase.TRAINING, attempt=1, host="h")
    now = service.store.now()
    ends = client.fine_tuning.jobs.retrieve(job_id).estimated_finish
    assert ends is not None
    assert 19_900 < ends - now < 20_000, "1000 steps of 20 s in the mean"
    times = [re.findall(r'data-until="([^"]+)"', browser.get(path).text) for path in ("/page/live/jobs?", f"/jobs/{job_id}")]
    assert len({minute[:15] for found in times for minute in found}) <= 2
    assert all(times)
