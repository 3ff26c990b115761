"""What leaves a finished job: adapters of its checkpoints, the merged model, and what is said of
them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from ft_service.errors import NotFoundError
from ft_service.rundir.checkpoints import checkpoint_faults, complete_checkpoints
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Outcome, OutcomeKind, Result
from ft_service.rundir.manifest import Manifest
from ft_service.rundir.verify import verify
from ft_service.spec import JobSpec
from tests.support.event_files import curves
from tests.support.ranks import run_on_ranks
from tests.support.training.attempts import attempt_on_rank, run_attempt
from tests.support.training.models import save_chat_base, save_chats, spec_for
from workers.base.load import adapters, load
from workers.exports import gguf_vocabulary
from workers.job.training_state import JobState
from workers.model.build import build
from workers.output.checkpoint import restore
from workers.output.checkpoint_saver import WITH_ADAPTERS
from workers.output.outcome import gathered_adapter
from workers.tasks import consolidate, export, merge

CPU = torch.device("cpu")


def attempt_with_adapters(rank: int, world: int, root: str, attempt: int) -> Outcome:
    os.environ[WITH_ADAPTERS] = "1"
    return attempt_on_rank(rank, world, root, attempt)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A job of two ranks with a checkpoint on the way, whose checkpoints hold their adapters; its
    259 rows of vocabulary and rank 3 are shared out unevenly.
    """
    folder = tmp_path_factory.mktemp("job")
    spec = spec_for(
        save_chat_base(folder / "base"),
        save_chats(folder / "train.jsonl", 8),
        valid=save_chats(folder / "valid.jsonl", 5),
        ranks=2,
        precision={"default": "nf4", "compute": "fp32"},
        training={"max_steps": 4, "batch_size": 4, "learning_rate": 1e-2},
        checkpoint={"save_steps": 2},
        lora={"r": 3},
        integrations=[{"type": "tensorboard"}],
    )
    run = RunDir(folder / "run")
    run.write("spec.json", spec)
    assert run_attempt(run, 1, 2, on_rank=attempt_with_adapters) == Outcome(
        kind=OutcomeKind.SUCCEEDED
    )
    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def restored(rank: int, world: int, root: str, name: str) -> dict[str, torch.Tensor]:
    """The adapter of a checkpoint by the way that a resume takes."""
    run = RunDir(root)
    spec = run.read("spec.json", JobSpec)
    assert spec is not None
    model = build(spec, CPU).peft_model
    load(model, spec.model.path, seed=spec.seed, compute_dtype=torch.float32, device=CPU)
    job = JobState(dict(adapters(model)), spec.training)
    restore(job, run, name, spec)
    return dict(gathered_adapter(job))


def test_the_last_checkpoint_s_adapter_is_the_job_s(finished: RunDir, tmp_path: Path) -> None:
    consolidate.consolidate(finished, "step-4-a1", tmp_path / "out")
    ours = weights(tmp_path / "out")
    published = weights(finished.path("adapter"))
    assert ours.keys() == published.keys()
    assert all(torch.equal(tensor, published[name]) for name, tensor in ours.items())
    configs = [
        (folder / "adapter_config.json").read_bytes()
        for folder in (tmp_path / "out", finished.path("adapter"))
    ]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("name", ["step-2-a1", "step-4-a1"])
def test_the_adapter_that_a_checkpoint_holds_is_the_one_that_is_made_of_its_shards(
    finished: RunDir, tmp_path: Path, name: str
) -> None:
    made = consolidate.consolidate(finished, name, tmp_path / "out")
    held = finished.path(f"checkpoints/{name}/adapter")
    assert checkpoint_faults(finished, name) == []
    assert verify(held).faults == []
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (held / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
    manifest = RunDir(held).read("manifest.json", Manifest)
    assert manifest is not None
    assert (manifest.step, manifest.checkpoint, manifest.files) == (made.step, name, made.files)
    (held / "adapter_config.json").write_bytes(b"")
    assert checkpoint_faults(finished, name), "it is one of the checkpoint's files"
    (held / "adapter_config.json").write_bytes((tmp_path / "out/adapter_config.json").read_bytes())


def test_an_adapter_can_be_used_and_shared_without_the_machine_that_made_it(
    finished: RunDir,
) -> None:
    spec = finished.read("spec.json", JobSpec)
    folder = finished.path("adapter")
    assert spec is not None
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == spec.model.name
    assert (
        "/"
        not in (folder / "README.md")
        .read_text()
        .partition('from_pretrained("')[2]
        .partition('"')[0]
    )
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}]
    alone, base = (AutoTokenizer.from_pretrained(path) for path in (folder, spec.model.path))
    assert alone.apply_chat_template(chat, tokenize=False) == base.apply_chat_template(
        chat, tokenize=False
    )
    assert alone("Hello, world").input_ids == base("Hello, world").input_ids
    assert not (folder / "config.json").exists(), (
        "which would make the folder pass for a whole model"
    )


def test_tensorboard_finds_the_curves_with_the_adapter(finished: RunDir) -> None:
    (kept,) = finished.path("adapter").glob("events.out.tfevents.*")
    header, *rows = [
        line.split(",") for line in finished.path("metrics.csv").read_text().splitlines()
    ]
    losses = {int(row[0]): float(row[header.index("train_loss")]) for row in rows}
    assert dict(curves(kept)["train/loss"]) == pytest.approx(losses)
    manifest = finished.read("adapter/manifest.json", Manifest)
    assert manifest is not None
    assert kept.name in manifest.files


def test_no_path_of_the_host_leaves_with_the_adapter(finished: RunDir) -> None:
    held = {
        path.name: str(finished.root.parent).encode() in path.read_bytes()
        for path in finished.path("adapter").iterdir()
    }
    assert not any(held.values()), held


VLLM_LORA = re.compile(r"base_model\.model\.(?P<module>[\w.]+)\.lora_(?P<which>[AB])\.weight")
VLLM_MODULES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
"""Of a Llama; vLLM fuses some of them itself."""


def test_the_adapter_is_in_the_layout_that_vllm_loads(finished: RunDir) -> None:
    """By the rules of vLLM's `PEFTHelper` and `LoRAModel.from_local_checkpoint`, which refuse
    anything else.
    """
    config = json.loads(finished.path("adapter/adapter_config.json").read_text())
    assert {"r", "lora_alpha", "target_modules"} <= config.keys(), "required"
    assert (config["bias"], config["use_dora"], config["modules_to_save"]) == (
        "none",
        False,
        None,
    ), "unsupported otherwise"
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights(finished.path("adapter")).items():
        match = VLLM_LORA.fullmatch(name)
        assert match, f"{name} is no name that vLLM reads"
        modules.setdefault(match["module"], {})[match["which"]] = tensor
    last_names = {module.rsplit(".", 1)[-1] for module in modules}
    assert last_names == set(config["target_modules"]) <= VLLM_MODULES
    for module, pair in modules.items():
        assert (pair["A"].shape[0], pair["B"].shape[1]) == (config["r"], config["r"]), (
            f"{module}: one rank for all"
        )


def test_an_earlier_checkpoint_s_adapter_is_what_a_resume_would_begin_with(
    finished: RunDir, tmp_path: Path
) -> None:
    assert consolidate.main([str(finished.root), "step-2-a1", str(tmp_path / "out")]) == 0
    ours = weights(tmp_path / "out")
    (expected,) = run_on_ranks(restored, 1, str(finished.root), "step-2-a1")
    assert ours.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.items())
    assert not torch.equal(
        *(
            w[next(n for n in ours if "lora_B" in n)]
            for w in (ours, weights(finished.path("adapter")))
        )
    )
    assert verify(tmp_path / "out").faults == []
    manifest = RunDir(tmp_path / "out").read("manifest.json", Manifest)
    assert manifest is not None
    assert manifest.metrics is not None
    assert (manifest.step, manifest.checkpoint, manifest.metrics.step) == (2, "step-2-a1", 2)


def test_a_damaged_or_missing_checkpoint_is_not_read(
    finished: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(shutil.copytree(finished.root, tmp_path / "run"))
    shard = run.path("checkpoints/step-2-a1/.metadata")
    shard.write_bytes(shard.read_bytes()[::-1])
    with pytest.raises(NotFoundError, match=r"damaged: \.metadata has other contents"):
        consolidate.consolidate(run, "step-2-a1", tmp_path / "out")
    assert consolidate.main([str(run.root), "step-3-a1", str(tmp_path / "out")]) == 64
    assert "no complete checkpoint 'step-3-a1'" in json.loads(capsys.readouterr().out)["error"]
    assert not list(tmp_path.glob("out*"))
    assert complete_checkpoints(run) == ["step-2-a1", "step-4-a1"]


@pytest.mark.parametrize("to", ["bf16", pytest.param("fp8", marks=pytest.mark.slow)])
def test_a_merge_reports_the_losses_before_and_after(
    finished: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    out = tmp_path / "merged"
    assert merge.main([str(finished.path("adapter")), str(out), "--to", to]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report == json.loads((out / "fidelity.json").read_text())
    result = finished.read("result.json", Result)
    assert result is not None
    losses = report["validation_loss"]
    assert report["samples"] == 5
    assert losses["adapter_on_base_as_trained"] == pytest.approx(result.valid_loss, rel=1e-6), (
        "what training itself saw"
    )
    assert losses["adapter_on_bf16_base"] != pytest.approx(
        losses["adapter_on_base_as_trained"], rel=1e-5
    ), "NF4 costs something"
    assert losses["merged"] == pytest.approx(
        losses["adapter_on_bf16_base"], rel=1e-3 if to == "bf16" else 2e-2
    )
    assert losses["merged"] != losses["adapter_on_bf16_base"], "rounding costs something"
    assert (out / "tokenizer.json").is_file()
    assert (out / "adapter_manifest.json").read_bytes() == finished.path(
        "adapter/manifest.json"
    ).read_bytes()


@pytest.mark.slow
def test_a_gguf_reports_the_losses_of_what_it_holds(
    finished: RunDir,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The base's tokenizer has no merges, without which llama.cpp has none: here it is given
    one.
    """
    monkeypatch.setattr(gguf_vocabulary, "_merges", lambda given: [["a", "b"]])
    arguments = [str(finished.path("adapter")), str(tmp_path / "out"), "--format"]
    assert export.main([*arguments, "gguf-q8_0"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "model.gguf",
        "Modelfile",
        "fidelity.json",
        "adapter_manifest.json",
        "README.md",
    }
    losses = report["validation_loss"]
    assert losses["merged"] == pytest.approx(losses["adapter_on_bf16_base"], rel=1e-2)
    assert losses["merged"] != losses["adapter_on_bf16_base"], "rounding costs something"
    assert (report["tensors"], 0 < report["relative_error"] < 0.01) == (21, True)


@pytest.mark.slow
def test_a_form_of_torchao_reports_the_losses_of_what_is_read_again(
    finished: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(finished.path("adapter")), str(tmp_path / "out"), "--format"]
    assert export.main([*arguments, "torchao-8da4w"]) == 0
    report = json.loads(capsys.readouterr().out)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} < names
    assert not any(name.startswith(".") for name in names)
    assert (report["to"], report["tensors"], report["exact"]) == ("torchao-8da4w", 16, 16)
    assert 0.01 < report["relative_error"] < 0.2
    losses = report["validation_loss"]
    assert losses["merged"] == pytest.approx(losses["adapter_on_bf16_base"], rel=0.05)
    assert losses["merged"] != losses["adapter_on_bf16_base"], "rounding costs something"


def test_a_merge_onto_another_base_is_refused(
    finished: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = finished.read("spec.json", JobSpec)
    assert spec is not None
    other = shutil.copytree(spec.model.path, tmp_path / "other")
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    arguments = [
        str(finished.path("adapter")),
        str(tmp_path / "out"),
        "--to",
        "bf16",
        "--base",
        str(other),
    ]
    assert merge.main(arguments) == 64
    assert (
        "not the base that the adapter was trained on: model.safetensors differ"
        in json.loads(capsys.readouterr().out)["error"]
    )
    assert not (tmp_path / "out").exists()
