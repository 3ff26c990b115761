"""Reinforcement learning through a real server: the unmodified openai client, real ranks, and the
preview as the sampler.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai.types.fine_tuning import FineTuningJob
from safetensors.torch import load_file

from ft_service.reinforcement.schedule import RolloutSchedule
from ft_service.reinforcement.step_commands import commands_of, first_commands
from ft_service.reinforcement.step_records import read_record, recorded_steps
from ft_service.rundir.directory import RunDir
from ft_service.spec import JobSpec
from ft_service.tinker.commands import CommandLog
from tests.support.rest.receiver import Answer, Received, receiving
from tests.support.rollout_servers import records_are_whole, samplers, serving
from tests.support.rollouts import save_prompts
from tests.support.service import (
    Server,
    processes_of,
    send,
    upload,
    wait_until,
    wait_until_step,
)
from tests.support.training.attempts import run_attempt

STEPS = 4
GRADER: dict[str, Any] = {
    "type": "text_similarity",
    "name": "close",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }} is the answer",
    "evaluation_metric": "fuzzy_match",
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of the tests that kill nothing."""
    with serving(tmp_path_factory.mktemp("kept")) as server:
        yield server


def submit(
    client: openai.OpenAI, folder: Path, *, steps: int = STEPS, ranks: int = 1, **changes: Any
) -> FineTuningJob:
    save_prompts(folder / "prompts.jsonl", 8)
    save_prompts(folder / "valid.jsonl", 3, first=50)
    hyperparameters = {
        "batch_size": 2,
        "n_epochs": "auto",
        "eval_interval": 2,
        "compute_multiplier": 0.5,
        **changes.pop("more", {}),
    }
    method: Any = {
        "type": "reinforcement",
        "reinforcement": {
            "grader": changes.pop("grader", GRADER),
            "hyperparameters": hyperparameters,
        },
    }
    return client.fine_tuning.jobs.create(
        model="tiny",
        training_file=upload(client, folder / "prompts.jsonl"),
        validation_file=upload(client, folder / "valid.jsonl"),
        method=method,
        seed=1,
        extra_body={
            "precision": {"default": "nf4", "compute": "fp32"},
            "lora": {"r": 4},
            "training": {"max_length": 64, "max_steps": steps, "learning_rate": 1e-2},
            "distributed": {"nproc_per_node": ranks, "replicate": 1},
            "checkpoint": {"save_steps": 2},
            **changes,
        },
    )


def trained_again(run: RunDir, folder: Path) -> dict[str, torch.Tensor]:
    """The adapter of one uninterrupted attempt on the recorded answers."""
    spec = run.read("spec.json", JobSpec)
    assert spec is not None
    again = RunDir(folder)
    again.write("spec.json", spec)
    schedule = RolloutSchedule.of(spec, 8, 3)
    commands = first_commands(spec.job_id)
    for step in recorded_steps(run):
        record = read_record(run, step)
        assert record is not None
        commands += commands_of(record, spec, schedule)
    for command in commands:
        CommandLog(again).put(command)
    run_attempt(again, 1, spec.world_size)
    return load_file(again.path("adapter/adapter_model.safetensors"))


def test_from_create_to_checkpoints(kept: Server, tmp_path: Path) -> None:
    client = kept.client()
    job = submit(client, tmp_path)
    assert job.method is not None
    assert job.method.reinforcement is not None
    assert job.method.reinforcement.grader.type == "text_similarity"
    done = wait_until(client, job.id, "succeeded")
    assert done.fine_tuned_model
    run = kept.run(job.id)
    records_are_whole(run, STEPS)
    events: list[Any] = list(client.fine_tuning.jobs.list_events(job.id, limit=100))
    measured: dict[Any, Any] = {
        event.data["step"]: event.data for event in reversed(events) if event.type == "metrics"
    }
    assert measured.keys() == set(range(1, STEPS + 1))
    assert all(
        "train_mean_reward" in metrics and "completions/mean_length" in metrics
        for metrics in measured.values()
    )
    assert [step for step, metrics in measured.items() if "valid_mean_reward" in metrics] == [
        1,
        3,
        4,
    ]
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id))
    assert {point.step_number for point in checkpoints} == {2, 4}
    listed: Any = client.get(f"/fine_tuning/jobs/{job.id}/rollouts?limit=20", cast_to=object)
    assert [own["step"] for own in listed["data"]] == [5, 4, 3, 2, 1]
    first = listed["data"][-1]
    assert (
        len(first["prompts"]),
        len(first["prompts"][0]["answers"]),
        len(first["validation"]),
    ) == (2, 4, 3)
    assert first["prompts"][0]["text"].endswith("+ 1 =")
    assert not list(run.path("sampler_weights").glob("step-000000")), (
        "weights of earlier steps are removed"
    )


def test_what_cannot_be_graded_is_refused_by_name(kept: Server, tmp_path: Path) -> None:
    client = kept.client()
    for grader, place in (
        ({**GRADER, "input": "{{ sample.outputs }}"}, "method.reinforcement.grader"),
        (
            {
                "type": "score_model",
                "name": "m",
                "model": "gpt",
                "input": [{"role": "user", "content": "?"}],
            },
            "model",
        ),
        ({**GRADER, "evaluation_metric": "cosine"}, "evaluation_metric"),
    ):
        with pytest.raises(openai.BadRequestError, match=place.rpartition(".")[2]):
            submit(client, tmp_path, grader=grader)
    with pytest.raises(openai.BadRequestError, match="lora_dropout"):
        submit(client, tmp_path, lora={"lora_dropout": 0.1})


@pytest.mark.slow
def test_answers_are_sampled_ahead_and_held_to_the_start(server: Server, tmp_path: Path) -> None:
    client = server.client()
    job = submit(client, tmp_path, more={"beta": 0.05, "steps_ahead": 1})
    wait_until(client, job.id, "succeeded")
    run = server.run(job.id)
    records_are_whole(run, STEPS)
    records = [
        record for step in recorded_steps(run) if (record := read_record(run, step)) is not None
    ]
    assert [record.head.sampled_from for record in records] == [0, 0, 1, 2, 4]
    answers = records[2].answers
    assert all(
        answer.reference is not None and len(answer.reference) == len(answer.tokens)
        for answer in answers
    )
    assert any(answer.reference != answer.logprobs for answer in answers), (
        "the weights have moved from the start"
    )


def longer_is_better(received: Received) -> Answer:
    text = json.loads(received.body)["sample"]["output_text"]
    return 200, {}, iter([json.dumps({"reward": len(text) / 100}).encode()])


@pytest.mark.slow
def test_a_grader_that_fails_pauses_the_job(server: Server, tmp_path: Path) -> None:
    """An endpoint that answers with errors, then with rewards: the job is paused and goes on."""
    client = server.client()
    with receiving() as endpoint:
        created: Any = client.post(
            "/webhook_endpoints",
            body={
                "name": "grades",
                "url": endpoint.url,
                "event_types": ["fine_tuning.job.succeeded"],
            },
            cast_to=object,
        )
        endpoint.answer = lambda _: (500, {}, iter(()))
        grader = {
            "type": "endpoint",
            "name": "own",
            "url": endpoint.url,
            "webhook_endpoint_id": created["id"],
        }
        job = submit(client, tmp_path, grader=grader)
        wait_until(client, job.id, "paused")
        messages = [event.message for event in client.fine_tuning.jobs.list_events(job.id)]
        assert any(
            "got no grade" in message and "endpoint_grader_server_error" in message
            for message in messages
        )
        endpoint.answer = longer_is_better
        client.fine_tuning.jobs.resume(job.id)
        wait_until(client, job.id, "succeeded")
    records_are_whole(server.run(job.id), STEPS)


@pytest.mark.slow
def test_kills_lose_no_step_and_repeat_none(server: Server, tmp_path: Path) -> None:
    """The server, the sampler, a rank and the supervisor are killed at different steps."""
    client = server.client()
    steps = 10
    job = submit(client, tmp_path, steps=steps, ranks=2)
    run = server.run(job.id)
    wait_until_step(client, job.id, 1)
    server.kill()
    time.sleep(1.0)
    server.start()
    client = server.client()
    wait_until_step(client, job.id, 3)
    send(set(samplers(server)), signal.SIGKILL)
    wait_until_step(client, job.id, 5)
    send(set(processes_of(run)["rank"][:1]), signal.SIGKILL)
    wait_until_step(client, job.id, 7)
    send(set(processes_of(run)["supervisor"]), signal.SIGKILL)
    server.kill()
    server.start()
    wait_until(server.client(), job.id, "succeeded")
    records_are_whole(run, steps)
    whole = trained_again(run, tmp_path / "again")
    own = load_file(run.path("adapter/adapter_model.safetensors"))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in own.items())
