"""Images by the unmodified openai client, as OpenAI's own vision lines have them, through real
workers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ft_service.data.sample_kinds import Picture
from ft_service.data.tokens.image_processor import ImageProcessor
from ft_service.data.tokens.tokenize import load_tokenizer
from tests.support.image_bases import drawn, encoded
from tests.support.service import Server, upload, wait_until
from tests.support.tinker_server import PROGRAMS, environment_of, serving
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


@pytest.mark.slow  # its parts: workers/tinker/test_call_pictures.py, serving/test_pictured_answers
def test_the_tinker_package_trains_on_images_and_samples_from_them(tmp_path: Path) -> None:
    base = save_whole_base("qwen 3 vl", tmp_path / "models" / "sees")
    picture = tmp_path / "gauge.png"
    picture.write_bytes(encoded(drawn(70, 50)))
    text = ImageProcessor.of(str(base)).replacement(Picture.of(picture.read_bytes()))
    tokenizer: Any = load_tokenizer(str(base))
    count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    with serving(tmp_path, tmp_path / "models", slots=2, ranks=1, precision="bf16") as server:
        looped = subprocess.run(
            [sys.executable, str(PROGRAMS / "tinker_images.py"), "sees", str(picture), str(count)],
            env=environment_of(server),
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert looped.returncode == 0, looped.stderr[-4000:]
    (told,) = [json.loads(line) for line in looped.stdout.splitlines() if line.startswith("{")]
    assert told["losses"][2] < told["losses"][0]
    assert len(told["sampled"]) <= 4
    assert told["logprobs"] == pytest.approx(told["trained"], abs=0.05)
    damaged, elsewhere = told["errors"]
    assert "prompt.chunks.0.data: is no PNG, JPEG, WEBP or GIF" in damaged
    assert "images are fetched from https: addresses" in elsewhere
