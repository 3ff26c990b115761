"""Direct preference optimisation by the unmodified openai client, on from a supervised job, through
real workers.
"""

from __future__ import annotations

import base64
import csv
from pathlib import Path
from typing import Any

import pytest

from tests.support.service import Server, submit, upload, wait_until
from tests.support.training.models import save_pairs


@pytest.mark.slow
def test_a_job_on_pairs_goes_on_from_a_supervised_one(
    server: Server, data: Path, tmp_path: Path
) -> None:
    client = server.client()
    first = wait_until(client, submit(client, data, steps=8, suffix="sft").id, "succeeded")
    assert first.fine_tuned_model is not None
    for name, count in (("pairs", 24), ("valid", 6)):
        save_pairs(tmp_path / f"{name}.jsonl", count)
    job = client.fine_tuning.jobs.create(
        model=first.fine_tuned_model,
        training_file=upload(client, tmp_path / "pairs.jsonl"),
        validation_file=upload(client, tmp_path / "valid.jsonl"),
        method={
            "type": "dpo",
            "dpo": {"hyperparameters": {"beta": 0.5, "batch_size": 8, "n_epochs": 3}},
        },
        suffix="dpo",
        extra_body={
            "precision": {"compute": "fp32"},
            "training": {"learning_rate": 5e-3},
            "distributed": {"nproc_per_node": 2},
            "evaluation": {"prompts": 2, "max_new_tokens": 8},
        },
    )
    assert job.method is not None
    assert job.method.type == "dpo"
    job = wait_until(client, job.id, "succeeded")
    assert job.method is not None
    assert job.method.dpo is not None
    assert job.method.dpo.hyperparameters is not None
    assert job.method.dpo.hyperparameters.beta == 0.5
    assert job.fine_tuned_model in [model.id for model in client.models.list()]

    told = [event.message for event in client.fine_tuning.jobs.list_events(job.id)]
    assert any(
        f"The adapter is that of {first.fine_tuned_model}, step 8" in message for message in told
    )
    assert any("Reference log-probabilities of all 30 pairs" in message for message in told)
    table = base64.b64decode(client.files.content(job.result_files[0]).text).decode().splitlines()
    rows: list[dict[str, str]] = list(csv.DictReader(table))
    assert len(rows) == 9
    # Its reference is the supervised model: nothing is gained on that yet.
    assert float(rows[0]["rewards/margins"]) == pytest.approx(0, abs=1e-4)
    assert float(rows[0]["train_loss"]) == pytest.approx(0.6931, abs=1e-3)
    assert float(rows[-1]["rewards/margins"]) > 0.05
    assert float(rows[-1]["valid_rewards/margins"]) > 0
    answer: Any = client.get(f"/fine_tuning/jobs/{job.id}/evaluation", cast_to=object)
    assert [own["step"] for own in answer["data"]] == [9, 0]
    assert answer["data"][0]["samples"][0]["reference"] == "it is 0", "the preferred answer"
