"""Images by the unmodified openai client, as OpenAI's own vision lines have them, through real
workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.service import Server, upload, wait_until
from tests.support.training.pictures import save_pictured_chats, save_whole_base


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    models = tmp_path / "models"
    save_whole_base("qwen 3 vl", models / "sees")
    save_whole_base("gemma 3", models / "blind")
    (models / "blind" / "preprocessor_config.json").unlink()
    server = Server(tmp_path, models)
    server.start()
    yield server
    assert server.stop() == 0


def test_chats_with_images_are_learned_and_others_told_before_training(
    server: Server, tmp_path: Path
) -> None:
    client = server.client()
    data = tmp_path / "chats.jsonl"
    save_pictured_chats(data, 16)
    options: dict[str, Any] = {
        "precision": {"default": "nf4", "compute": "fp32"},
        "distributed": {"nproc_per_node": 1},
        "training": {"max_steps": 3, "learning_rate": 5e-3},
    }
    file = upload(client, data)
    job = client.fine_tuning.jobs.create(model="sees", training_file=file, extra_body=options)
    refused = client.fine_tuning.jobs.create(model="blind", training_file=file, extra_body=options)
    job = wait_until(client, job.id, "succeeded")
    told = [event.message for event in client.fine_tuning.jobs.list_events(job.id)]
    # 12 chats of the 16 have pictures, 4 of them two
    assert any("16 images" in message for message in told), told
    assert any("has looked at 16 images" in message for message in told), told
    refused = wait_until(client, refused.id, "failed")
    assert refused.error is not None
    assert refused.error.param == "model"
    assert "reads no images" in refused.error.message
    assert refused.trained_tokens is None
