"""A job's evaluations over the wire."""

from __future__ import annotations

import openai
import pytest

from ft_service.rundir.evaluations import (
    SERVED,
    EvaluatedPrompt,
    Evaluation,
    ServedQuality,
    evaluation_key,
)
from tests.support.rest.service import TRAINING, Service, run_dir


def evaluation(step: int, tuned: str | None, score: float) -> Evaluation:
    sample = EvaluatedPrompt(
        prompt="user\nHi",
        reference="Hello",
        base="Hm",
        tuned=tuned,
        scores={"exact_match": score},
        base_scores={"exact_match": 0},
    )
    metrics = {"exact_match": score}
    return Evaluation(
        step=step, time=12.5, metrics=metrics, base_metrics={"exact_match": 0}, samples=[sample]
    )


def test_evaluations_are_listed_newest_first(service: Service) -> None:
    client = service.client()
    file = client.files.create(file=("a.jsonl", TRAINING), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=file.id, extra_body={"evaluation": {"prompts": 1}}
    )
    path = f"/v1/fine_tuning/jobs/{job.id}/evaluation"
    empty = service.http("GET", path).json()
    assert empty == {
        "object": "list",
        "data": [],
        "has_more": False,
        "first_id": None,
        "last_id": None,
    }
    run = run_dir(service, job.id)
    for step, attempt, tuned in (
        (0, 1, None),
        (4, 1, "Hi"),
        (8, 1, "of an attempt that was replaced"),
        (8, 2, "Hello"),
    ):
        run.write(evaluation_key(step, attempt), evaluation(step, tuned, float(tuned == "Hello")))
    run.put("evaluations/step-9-a2.json", b"{}")
    loss = {"as_trained": 1.0, "merged": 1.25}
    metrics = {"merged": {"exact_match": 0.0}}
    run.write(
        SERVED,
        ServedQuality(
            step=8, samples=3, loss=loss, bound=0.02, answers={"merged": ["Hullo"]}, metrics=metrics
        ),
    )
    answer = service.http("GET", path).json()
    assert [own["step"] for own in answer["data"]] == [8, 4, 0], "what is no evaluation is left out"
    newest = answer["data"][0]
    assert newest["object"] == "fine_tuning.job.evaluation"
    assert (newest["created_at"], newest["metrics"], newest["base_metrics"]) == (
        12,
        {"exact_match": 1.0},
        {"exact_match": 0.0},
    )
    assert newest["samples"] == [
        {
            "prompt": "user\nHi",
            "messages": None,
            "reference": "Hello",
            "base": "Hm",
            "tuned": "Hello",
            "scores": {"exact_match": 1.0},
            "base_scores": {"exact_match": 0.0},
            "served": {"merged": "Hullo"},
        }
    ]
    assert newest["served"] == {
        "loss": {"as_trained": 1.0, "merged": 1.25},
        "samples": 3,
        "bound": 0.02,
        "beyond": ["merged"],
        "metrics": {"merged": {"exact_match": 0.0}},
    }
    assert answer["data"][1]["served"] is None, "another step's adapter"
    page = service.http("GET", path, params={"after": newest["id"], "limit": 1}).json()
    assert ([own["step"] for own in page["data"]], page["has_more"]) == ([4], True)
    assert service.http("GET", path, params={"after": "fteval-none"}).status_code == 404
    with pytest.raises(openai.NotFoundError):
        client.get("/fine_tuning/jobs/ftjob-none/evaluation", cast_to=object)
