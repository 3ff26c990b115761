"""The sample with pictures: its files are those that the script draws, and its base learns them."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors import safe_open
from typer.testing import CliRunner

from ft_service.cli.root_command import app
from ft_service.installation import ROOT, SAMPLE_DATA, SAMPLE_MODELS

sys.path.insert(0, str(ROOT / "examples"))
import sample_gauges
import sample_pictures
import vision_base
from evaluate_images import Reader, score
from make_sample import SEED

BASE = SAMPLE_MODELS / "tiny-vision"
SPEC = ROOT / "deploy/examples/images.yaml"


def lines_of(split: str) -> list[dict[str, Any]]:
    text = (SAMPLE_DATA / f"gauges-{split}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def picture_of(line: dict[str, Any]) -> Image.Image:
    (shown, _), _ = (message["content"] for message in line["messages"])
    _, _, data = shown["image_url"]["url"].partition("base64,")
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")


def test_the_files_hold_what_is_drawn() -> None:
    """By pixels: another zlib writes other bytes."""
    for split, drawn in sample_gauges.make_gauges(SEED).items():
        lines = lines_of(split)
        assert len(lines) == sample_gauges.SPLITS[split]
        for line, (image, reading) in zip(lines, drawn, strict=True):
            assert picture_of(line).tobytes() == image.tobytes()
            assert line["messages"][1] == {"role": "assistant", "content": str(reading)}


def test_no_picture_is_in_two_lines_and_a_guess_is_right_once_in_eight() -> None:
    lines = {split: lines_of(split) for split in sample_gauges.SPLITS}
    pictures = [picture_of(line).tobytes() for split in lines.values() for line in split]
    assert len(set(pictures)) == len(pictures) == sum(sample_gauges.SPLITS.values())
    for split in lines.values():
        answers = Counter(line["messages"][1]["content"] for line in split)
        assert answers == {str(reading): len(split) // 8 for reading in range(8)}


def test_the_picture_of_the_tutorial_shows_gauges_that_are_drawn() -> None:
    """But for the numbers below them, which each version of FreeType draws a little differently."""
    drawn = sample_gauges.overview(SEED)
    gauges = (0, 0, drawn.width, 2 * sample_pictures.SIDE)
    with Image.open(ROOT / "docs/pictures/gauges.png") as shown:
        assert shown.size == drawn.size
        assert shown.convert("RGB").crop(gauges).tobytes() == drawn.crop(gauges).tobytes()


def test_the_files_are_small() -> None:
    files = list(SAMPLE_DATA.glob("gauges-*.jsonl"))
    assert len(files) == 3
    assert sum(file.stat().st_size for file in files) <= 1_500_000
    assert (BASE / "model.safetensors").stat().st_size <= 2_500_000


def test_the_base_has_the_shapes_and_options_of_the_script() -> None:
    tokenizer = json.loads((BASE / "tokenizer.json").read_text(encoding="utf-8"))
    model = vision_base.make_model(SEED, len(tokenizer["model"]["vocab"]))
    with safe_open(BASE / "model.safetensors", framework="pt") as file:
        found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    tied = {"lm_head.weight"}
    assert found == {
        name: list(own.shape) for name, own in model.state_dict().items() if name not in tied
    }
    config = json.loads((BASE / "config.json").read_text(encoding="utf-8"))
    own = json.loads(model.config.to_json_string())
    for part in ("text_config", "vision_config"):
        same = set(own[part]) - {"dtype", "transformers_version"}
        assert {key: config[part].get(key) for key in same} == {key: own[part][key] for key in same}
    processor = json.loads((BASE / "preprocessor_config.json").read_text(encoding="utf-8"))
    assert processor == vision_base.PREPROCESSOR
    template = (BASE / "chat_template.jinja").read_text(encoding="utf-8")
    assert template == vision_base.TEMPLATE


@pytest.mark.slow
def test_a_check_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_HOME", str(tmp_path))
    file = SAMPLE_DATA / "gauges-validation.jsonl"
    asked = ["data", "check", str(file), "--model", str(BASE), "--json"]
    done = CliRunner().invoke(app, asked, standalone_mode=False)
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert report["counts"]["samples"] == sample_gauges.SPLITS["validation"]
    assert report["warnings"] == []


def chats_file(folder: Path, answers: list[str]) -> Path:
    """Gauges, one for each of these answers."""
    lines = lines_of("validation")[: len(answers)]
    for line, answer in zip(lines, answers, strict=True):
        line["messages"][1]["content"] = answer
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def test_answers_are_compared_and_the_likeliest_of_the_files_is(tmp_path: Path) -> None:
    reader = Reader(BASE)
    heard = [reader.answer(line["messages"][:1]) for line in lines_of("validation")[:3]]
    said = [text for text, _ in heard]
    # It was taught shapes and no reading, so that it names a shape of whatever is drawn.
    assert all(any(shape in text for shape in sample_pictures.SHAPES) for text in said)
    assert score(reader, chats_file(tmp_path, said)).right == 3
    wrong = score(reader, chats_file(tmp_path, [*said[:2], f"{said[2]}s"]))
    assert (wrong.right, wrong.likeliest, wrong.total) == (2, None, 3)

    one, two = (reader.tokens(digit)[0] for digit in "12")
    likelier = ["1" if logits[one] > logits[two] else "2" for _, logits in heard]
    unlikelier = ["2" if digit == "1" else "1" for digit in likelier]
    found = score(reader, chats_file(tmp_path, [*likelier[:2], unlikelier[2]]))
    assert (found.right, found.likeliest, found.total) == (0, 2, 3)


@pytest.mark.slow
def test_the_published_class_with_the_adapter_reads_gauges(tmp_path: Path) -> None:
    heldout = SAMPLE_DATA / "gauges-heldout.jsonl"
    before = score(Reader(BASE), heldout)
    assert before.right == 0, "the base was not taught the task"
    assert before.likeliest is not None
    assert before.likeliest <= 0.3 * before.total
    out = tmp_path / "out"
    command = [sys.executable, "-m", "ft_service.cli", "run", str(SPEC), "--run-dir", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1800)
    after = score(Reader(BASE, out / "adapter"), heldout)
    assert after.right >= 0.9 * after.total
