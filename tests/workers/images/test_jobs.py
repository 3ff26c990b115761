"""Jobs whose samples have pictures: on any number of ranks, resumed, in an engine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import PeftModel
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from ft_service.bases.safetensors_folder import read_tensors
from ft_service.errors import SpecError
from ft_service.rundir.checkpoints import complete_checkpoints
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Outcome
from ft_service.spec import JobSpec
from tests.support.image_bases import drawn
from tests.support.training.attempts import (
    adapter,
    attempt_on_rank,
    losses,
    messages,
    run_attempt,
    trained,
)
from tests.support.training.engine_runs import assert_same, run_together
from tests.support.training.models import spec_for
from tests.support.training.pictures import save_pictured_chats, save_whole_base
from workers.images.computing import FOLDER, Storage
from workers.images.tower import asked
from workers.tasks.export import export


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    folder = tmp_path_factory.mktemp("job")
    base = save_whole_base("qwen 3 vl", folder / "base")
    options: dict[str, Any] = {
        "precision": {"default": "nf4", "compute": "fp32"},
        "checkpoint": {"save_steps": 1},
        "training": {"max_steps": 2, "batch_size": 5, "learning_rate": 5e-3},
        "lora": {"r": 4, "lora_dropout": 0.1},
    }
    data = save_pictured_chats(folder / "chats.jsonl", 12)
    valid = save_pictured_chats(folder / "valid.jsonl", 5)
    made = spec_for(base, data, valid=valid, ranks=2, **options)
    return made.model_copy(update={"job_id": "ftjob-0"})


@pytest.fixture(scope="module")
def uncompared(spec: JobSpec) -> JobSpec:
    """The same without losses on what will be served, of which `on_two` has some."""
    precision = spec.precision.model_copy(update={"compare_served": "off"})
    return spec.model_copy(update={"precision": precision})


@pytest.fixture(scope="module")
def on_two(spec: JobSpec, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return trained(spec, tmp_path_factory.mktemp("two"), 2)


def test_pictures_are_looked_at_once_and_their_features_removed(on_two: RunDir) -> None:
    looked = [text for text in messages(on_two) if "looked at" in text]
    # 9 of the 12 chats have pictures, 3 of them two; all of the 4 of 5 of validation are among them
    assert [text.split(" in ")[0] for text in looked] == [
        "The base's tower has looked at 12 images"
    ]
    assert not on_two.path(FOLDER).exists()


@pytest.mark.parametrize(
    ("world", "copies"),
    [
        (1, 1),
        pytest.param(3, 1, marks=pytest.mark.slow),
        pytest.param(4, 2, marks=pytest.mark.slow),
    ],
)
def test_the_number_of_ranks_and_of_copies_changes_rounding_alone(
    world: int, copies: int, uncompared: JobSpec, on_two: RunDir, tmp_path: Path
) -> None:
    distributed = uncompared.distributed.model_copy(
        update={"nproc_per_node": world, "replicate": copies}
    )
    other = trained(uncompared.model_copy(update={"distributed": distributed}), tmp_path, world)
    assert losses(other) == pytest.approx(losses(on_two), rel=1e-5)
    assert losses(other, "valid_loss") == pytest.approx(losses(on_two, "valid_loss"), rel=1e-5)
    for name, expected in adapter(on_two).items():
        found = adapter(other)[name]
        assert (found - expected).norm() <= 1e-3 * expected.norm(), name


def test_a_resumed_job_ends_with_the_same_bits(
    uncompared: JobSpec, on_two: RunDir, tmp_path: Path
) -> None:
    run = RunDir(shutil.copytree(on_two.root, tmp_path / "run"))
    first = next(name for name in complete_checkpoints(run) if name.startswith("step-1"))
    shutil.rmtree(run.path("adapter"))
    run.write("spec.json", uncompared)
    for later in set(complete_checkpoints(run)) - {first}:
        shutil.rmtree(run.path(f"checkpoints/{later}"))
    assert run_attempt(run, 2, 2, first).kind == "succeeded"
    for name, expected in adapter(on_two).items():
        assert torch.equal(adapter(run)[name], expected), name


@pytest.mark.slow  # engine/test_engine.py has jobs of an engine, and what is above their pictures
def test_jobs_of_an_engine_are_those_alone(
    uncompared: JobSpec, on_two: RunDir, tmp_path: Path
) -> None:
    """Another job on the same base, with other chats."""
    data = save_pictured_chats(tmp_path / "other.jsonl", 7)
    changes = {"job_id": "ftjob-1", "seed": 11, "training_data": data}
    other = uncompared.model_copy(update=changes)
    together = run_together([uncompared, other], tmp_path)
    assert_same(together[0], on_two)
    assert_same(together[1], trained(other, tmp_path / "alone", 2))


@pytest.mark.parametrize("worlds", [(1,), pytest.param((1, 2), marks=pytest.mark.slow)], ids=str)
def test_pairs_with_pictures_are_learned_from(
    worlds: tuple[int, ...], spec: JobSpec, tmp_path: Path
) -> None:
    """On any number of ranks; the first step compares the model with itself."""
    data = save_pictured_chats(tmp_path / "pairs.jsonl", 8, pairs=True)
    found = []
    for world in worlds:
        job = spec_for(
            Path(spec.model.path),
            data,
            ranks=world,
            precision={"default": "bf16", "compute": "fp32"},
            method={"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.5}}},
            training={"max_steps": 2, "batch_size": 4, "learning_rate": 5e-3},
            lora={"r": 4},
        )
        found.append(losses(trained(job, tmp_path / str(world), world)))
    assert found[0][1] == pytest.approx(0.6931, abs=1e-3)
    assert found[0][2] < found[0][1]
    assert all(other == pytest.approx(found[0], rel=1e-4) for other in found[1:])


def attempt_without_room(rank: int, world: int, root: str, attempt: int) -> Outcome:
    """On a rank whose disk has no room for features."""
    with patch.object(Storage, "has_room", return_value=False):
        return attempt_on_rank(rank, world, root, attempt)


@pytest.mark.slow
def test_a_tower_on_every_rank_gives_the_same_bits_where_features_have_no_room(
    uncompared: JobSpec, on_two: RunDir, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    run.write("spec.json", uncompared)
    assert run_attempt(run, 1, 2, on_rank=attempt_without_room).kind == "succeeded"
    assert any("stays on every rank" in text for text in messages(run))
    assert not list(run.path(FOLDER).rglob("*.safetensors"))
    for name, expected in adapter(on_two).items():
        assert torch.equal(adapter(run)[name], expected), name


def test_a_merged_model_reads_images_as_the_adapter_does(
    spec: JobSpec, on_two: RunDir, tmp_path: Path
) -> None:
    """By the published class and its own processor, under the published names."""
    out = tmp_path / "merged"
    report = export(on_two.path("adapter"), out, "merged", None, samples=3)
    losses_of = report["validation_loss"]
    assert losses_of["merged"] == pytest.approx(losses_of["adapter_on_bf16_base"], rel=5e-3)
    base = Path(spec.model.path)
    names = {name for name, _ in read_tensors(base).items()}
    assert {name for name, _ in read_tensors(out).items()} == names
    for name in ("preprocessor_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    processor: Any = AutoImageProcessor.from_pretrained(out, backend="pil")
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    picture = drawn(70, 50)
    pixels = processor(picture, return_tensors="pt")
    sign = "<|image_pad|>"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    count = int(pixels["image_grid_thw"].prod()) // processor.merge_size**2
    ids = tokenizer(text.replace(sign, sign * count), return_tensors="pt")["input_ids"]

    merged = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32).eval()
    plain = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32).eval()

    def logits(model: Any) -> torch.Tensor:
        token = tokenizer.convert_tokens_to_ids(sign)
        with torch.no_grad():
            told = asked(plain, ids, ids == token)
            return model(input_ids=ids, **told, **pixels).logits.float().log_softmax(dim=-1)

    before = logits(plain)
    tuned = PeftModel.from_pretrained(plain, on_two.path("adapter")).eval()
    expected = logits(tuned)
    changed = (expected - before).norm()
    assert changed > 0
    assert (logits(merged) - expected).norm() < 0.1 * changed


@pytest.mark.parametrize("to", ["gguf", "gguf-q8_0", "gguf-adapter"])
def test_gguf_of_what_was_learned_of_images_is_refused(
    to: str, on_two: RunDir, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=r"trained on \d+ images, .*\(mmproj\)") as refusal:
        export(on_two.path("adapter"), tmp_path / "out", to, None, samples=0)
    assert refusal.value.code == "not_exportable"
    assert not (tmp_path / "out").exists()
