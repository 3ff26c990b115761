"""Samples with pictures as conversations that a client could send."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ft_service.data import template_process
from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.data.tokens.image_processor import decoded
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.tokenize import load_dataset, load_tokenizer
from ft_service.rundir.directory import sha256_of
from ft_service.spec import DataFileRef, JobSpec
from tests.support.image_bases import drawn, encoded, image_part, save_image_base, text_part
from tests.support.training.models import spec_for
from tests.support.training.pictured_jobs import ENDED
from tests.support.training.pictures import WHOLE
from workers.training import pictured_probe
from workers.training.pictured_probe import asked_with_pictures

SMALL = image_part(encoded(drawn(70, 50, seed=1)))
LARGE = image_part(encoded(drawn(90, 70), compress_level=0))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chat templates are rendered without a process."""

    def write(self: template_process.TemplateProcess, *given: Any, **options: Any) -> str:
        template = ChatTemplate(self._begin["sources"], self._begin["special_tokens"])
        return template.write(*given, **options)

    monkeypatch.setattr(template_process.TemplateProcess, "write", write)


def samples_of(
    family: str, folder: Path, chats: list[list[dict[str, Any]]]
) -> tuple[JobSpec, list[Tokens]]:
    base = save_image_base(folder / "base", family)
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": own}) + "\n" for own in chats))
    data = DataFileRef(name=file.name, path=str(file), sha256=sha256_of(file))
    spec = spec_for(base, data)
    return spec, list(load_dataset(load_tokenizer(str(base)), data, spec.training.max_length))


def chat(*pictures: dict[str, Any], answer: str = "a square") -> list[dict[str, Any]]:
    content = [text_part("what is it?"), *pictures, text_part("say")]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize("family", sorted(WHOLE.keys() - {"llava 1.5"}))
def test_a_sample_becomes_the_chat_of_which_it_was_made(family: str, tmp_path: Path) -> None:
    """In every family's template; the one with the smaller pictures."""
    given = [chat(LARGE), chat(SMALL, SMALL), chat()]
    spec, samples = samples_of(family, tmp_path, given)
    asked = asked_with_pictures(spec, samples)
    assert asked is not None
    assert asked.chat == given[1]
    ids = samples[1].ids
    assert np.array_equal(asked.whole.ids[: len(ids)], ids)
    found = [(use.begin, use.end, use.picture.key) for use in asked.whole.images]
    assert found == [(use.begin, use.end, use.picture.key) for use in samples[1].images]
    behind = load_tokenizer(spec.model.path).decode(asked.behind)
    assert "say" in behind
    assert "a square" in behind
    assert "what" not in behind


def test_earlier_turns_are_part_of_it(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "be brief"}, *chat(SMALL), *chat(LARGE, answer="two")]
    spec, samples = samples_of("qwen 3 vl", tmp_path, [turns])
    asked = asked_with_pictures(spec, samples)
    assert asked is not None
    assert asked.chat == turns
    assert len(asked.behind) <= 64


@pytest.mark.parametrize(
    ("picture", "size"),
    [
        (image_part(encoded(drawn(1200, 30), "JPEG"), "image/jpeg", detail="low"), (512, 13)),
        (image_part(encoded(drawn(70, 50).rotate(90, expand=True), "GIF"), "image/gif"), (50, 70)),
    ],
    ids=["low", "palette"],
)
def test_a_server_gets_the_pixels_that_training_has_seen(
    picture: dict[str, Any], size: tuple[int, int], tmp_path: Path
) -> None:
    spec, samples = samples_of("qwen 3 vl", tmp_path, [chat(picture)])
    asked = asked_with_pictures(spec, samples)
    assert asked is not None
    url = asked.chat[0]["content"][1]["image_url"]
    assert url["url"].startswith("data:image/png;base64,")
    sent = Image.open(io.BytesIO(base64.b64decode(url["url"].partition(",")[2])))
    assert sent.size == size
    assert np.array_equal(np.asarray(sent), np.asarray(decoded(samples[0].images[0].picture)))


def test_samples_that_cannot_be_sent_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those without pictures; those of which the job's bounds or template make other tokens than
    the base's; those that no chat gives; those that are too large.
    """
    spec, samples = samples_of("qwen 3 vl", tmp_path, [chat(SMALL), chat()])
    assert asked_with_pictures(spec, samples) is not None
    bounds = spec.data.model_copy(update={"max_pixels": 64 * 64 * 4})
    for changes in ({"data": bounds}, {"chat_template": ENDED}):
        with monkeypatch.context() as patch:  # it is known before anything is read
            patch.setattr(pictured_probe, "load_tokenizer", None)
            assert asked_with_pictures(spec.model_copy(update=changes), samples) is None
    assert asked_with_pictures(spec, samples[1:]) is None
    other = samples[0].ids.copy()
    other[0] = other[-1]
    changed = Tokens(other, samples[0].targets, images=samples[0].images)
    assert asked_with_pictures(spec, [changed]) is None
    monkeypatch.setattr(pictured_probe, "MOST_BYTES", 8)
    assert asked_with_pictures(spec, samples) is None
