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
import vision_base
from evaluate_images import score
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


def test_no_picture_is_in_two_lines_and_a_guess_is_right_once_in_ten() -> None:
    lines = {split: lines_of(split) for split in sample_gauges.SPLITS}
    pictures = [picture_of(line).tobytes() for split in lines.values() for line in split]
    assert len(set(pictures)) == len(pictures) == sum(sample_gauges.SPLITS.values())
    for split in lines.values():
        answers = Counter(line["messages"][1]["content"] for line in split)
        assert set(answers.values()) == {len(split) // sample_gauges.READINGS}


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


@pytest.mark.parametrize("split", ["train", "validation", "heldout"])
def test_a_check_finds_nothing(home: Path, split: str) -> None:
    file = SAMPLE_DATA / f"gauges-{split}.jsonl"
    asked = ["data", "check", str(file), "--model", str(BASE), "--json"]
    done = CliRunner().invoke(app, asked, standalone_mode=False)
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert report["counts"]["samples"] == sample_gauges.SPLITS[split]
    assert report["warnings"] == []


@pytest.mark.slow
def test_the_published_class_with_the_adapter_reads_gauges(tmp_path: Path) -> None:
    heldout = SAMPLE_DATA / "gauges-heldout.jsonl"
    right, total = score(BASE, heldout)
    assert right <= 0.2 * total, "the base was not taught the task"
    out = tmp_path / "out"
    command = [sys.executable, "-m", "ft_service.cli", "run", str(SPEC), "--run-dir", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1800)
    right, total = score(BASE, heldout, out / "adapter")
    assert right >= 0.9 * total
