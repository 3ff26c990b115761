"""The unmodified openai client, a real server, real workers: a job's whole life."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from safetensors.torch import load

from tests.support.collector import Collector, attributes, collecting
from tests.support.service import (
    Server,
    eventually,
    nothing_left,
    processes_of,
    submit,
    upload,
    wait_until,
    wait_until_step,
)

CLIENTS_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def traced(
    models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Collector]]:
    """A server that sends traces, and the collector that gets them."""
    with collecting() as collector:
        server = Server(
            tmp_path_factory.mktemp("home"),
            models,
            OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
            OTEL_BSP_SCHEDULE_DELAY="100",
        )
        server.start()
        yield server, collector
        assert server.stop() == 0


def test_from_upload_to_adapter_by_the_openai_client(
    traced: tuple[Server, Collector], data: Path
) -> None:
    server, collector = traced
    client = server.client()
    valid = upload(client, data)
    options = {"validation_file": valid, "suffix": "demo", "metadata": {"team": "a"}}
    job = submit(client, data, steps=8, extra_headers={"traceparent": CLIENTS_TRACE}, **options)
    assert job.status in ("validating_files", "queued", "running")
    assert job.fine_tuned_model is None

    job = wait_until(client, job.id, "succeeded")
    assert job.fine_tuned_model == f"ft:tiny:local:demo:{job.id.removeprefix('ftjob-')}"
    assert job.finished_at is not None
    assert (job.trained_tokens or 0) > 8 * 16
    assert job.fine_tuned_model in [model.id for model in client.models.list()]

    events = list(client.fine_tuning.jobs.list_events(job.id, limit=5))
    told = [event.message for event in reversed(events)]
    counted = [message for message in told if "of them the assistant's to learn" in message]
    assert len(counted) == 2, "training and validation file, each once"
    assert told.index(counted[1]) < told.index("Files validated, moving job to queued state.")
    steps = [e.data["step"] for e in events if e.type == "metrics" and isinstance(e.data, dict)]
    assert sorted(set(steps)) == list(range(1, 9)), "every step once, over all pages"
    assert events[0].message == "The job has succeeded."
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id))
    assert [c.step_number for c in checkpoints] == [8, 4]
    assert checkpoints[0].metrics.train_loss is not None
    assert checkpoints[0].metrics.full_valid_loss is not None

    table = base64.b64decode(client.files.content(job.result_files[0]).text).decode().splitlines()
    assert table[0].startswith(
        "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy"
    )
    assert len(table) == 1 + 8
    check_adapter(client, job.id)
    assert eventually(lambda: nothing_left(server.run(job.id)))
    assert eventually(lambda: any(span.name == f"job {job.id}" for span in collector.spans))
    check_trace(collector, job.id)


def check_trace(collector: Collector, job_id: str) -> None:
    """The job is a part of its client's trace, down to its steps."""
    request = collector.named("POST /v1/fine_tuning/jobs")
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == tuple(
        CLIENTS_TRACE.split("-")[1:3]
    )
    told = {
        "http.request.method": "POST",
        "http.route": "/v1/fine_tuning/jobs",
        "http.response.status_code": 200,
    }
    assert attributes(request) == told
    (whole,) = collector.children(request)
    assert (whole.name, attributes(whole)["ft.state"]) == (f"job {job_id}", "succeeded")
    assert sorted(span.name for span in collector.children(whole)) == [
        "attempt 1",
        "check files",
        "queue",
    ]
    attempt = collector.named("attempt 1")
    parts = collector.children(attempt)
    steps = [span for span in parts if span.name.startswith("step")]
    assert sum(attributes(span)["ft.steps"] for span in steps) == 8
    assert all(attributes(span)["ft.tokens"] > 0 for span in steps)
    others = sorted(span.name for span in parts if span not in steps)
    assert others == ["checkpoint step-4-a1", "checkpoint step-8-a1", "launch"]
    for span in (*parts, attempt):
        assert whole.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
    assert collector.services == {"ft-service"}
    assert not [
        span
        for span in collector.spans
        if "livez" in span.name or span.name == "GET /v1/fine_tuning/jobs/{job_id}"
    ]


def check_adapter(client: openai.OpenAI, job_id: str) -> None:
    body = client.get(f"/fine_tuning/jobs/{job_id}/adapter", cast_to=httpx2.Response).content
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        files: dict[str, bytes] = {}
        for member in archive.getmembers():
            extracted = archive.extractfile(member)
            if extracted is not None:
                files[Path(member.name).name] = extracted.read()
    config = json.loads(files["adapter_config.json"])
    assert (config["peft_type"], config["r"]) == ("LORA", 4)
    assert sorted(config["target_modules"]) == [
        "down_proj",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    ]
    weights = load(files["adapter_model.safetensors"])
    assert len(weights) == 2 * 7 * 2
    assert all(weight.abs().sum() > 0 for weight in weights.values()), (
        "every matrix, B too, has been trained"
    )


def test_pause_resume_and_cancel(traced: tuple[Server, Collector], data: Path) -> None:
    server, _ = traced
    client = server.client()
    job = submit(client, data, steps=4000, extra={"distributed": {"nproc_per_node": 1}})
    wait_until_step(client, job.id, 2)
    client.fine_tuning.jobs.pause(job.id)
    wait_until(client, job.id, "paused")
    left = processes_of(server.run(job.id))
    assert not left["rank"] + left["torchrun"], "a paused job trains no more"
    # The supervisor writes its record, and then goes.
    eventually(lambda: nothing_left(server.run(job.id)))
    checkpoint = client.fine_tuning.jobs.checkpoints.list(job.id).data[0].step_number

    assert client.fine_tuning.jobs.resume(job.id).status == "queued"
    wait_until_step(client, job.id, checkpoint + 1, attempt=2)
    resumed = [
        e.message for e in client.fine_tuning.jobs.list_events(job.id) if "resumes" in e.message
    ]
    assert f"after step {checkpoint} " in resumed[0]

    assert any(processes_of(server.run(job.id)).values())
    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    eventually(lambda: nothing_left(server.run(job.id)))
    assert client.fine_tuning.jobs.retrieve(job.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="been cancelled"):
        client.fine_tuning.jobs.resume(job.id)
