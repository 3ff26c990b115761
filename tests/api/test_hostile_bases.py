"""One base folder without permission to open, among others, on a real server."""

from __future__ import annotations

import os
import re

import openai
import pytest

from tests.support.bases import save_base
from tests.support.rest.service import Service


@pytest.fixture
def hostile(service: Service) -> dict[str, str]:
    """Name → the words that the server has for it."""
    models = service.settings.model_folders()[0]
    for name in ("fifo", "zero"):
        save_base(models / name)
    (models / "fifo/config.json").unlink()
    os.mkfifo(models / "fifo/config.json")
    (models / "zero/tokenizer.json").unlink()
    (models / "zero/tokenizer.json").symlink_to("/dev/zero")
    save_base(models / "kinds", model_type=["llama"])
    return {
        "fifo": "config.json in .*: it is not a regular file",
        "zero": "tokenizer.json in .*: it is a link that leads out of the base's folder",
        "kinds": r"config.json in .*: it says model_type = \['llama'\], and that must be a name",
    }


def test_the_list_names_each_with_its_reason_beside_the_others(
    hostile: dict[str, str], service: Service
) -> None:
    listed = {
        model["id"]: model["base"] for model in service.http("GET", "/v1/models").json()["data"]
    }
    assert listed["tiny"]["trainable"]
    for name, words in hostile.items():
        assert not listed[name]["trainable"]
        assert re.search(words, listed[name]["why_not"])


def test_a_job_on_one_is_refused_and_the_next_goes_on(
    hostile: dict[str, str], client: openai.OpenAI, training_file: str
) -> None:
    for name, words in hostile.items():
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            client.with_options(timeout=20, max_retries=0).fine_tuning.jobs.create(
                model=name, training_file=training_file
            )
        assert (caught.value.param, caught.value.code) == ("model", "model_unreadable")
    assert client.fine_tuning.jobs.create(model="tiny", training_file=training_file).model == "tiny"
