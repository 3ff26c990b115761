"""Whole attempts on real gloo ranks: what they leave, how they stop, and that a resumed job equals
the uninterrupted one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from ft_service.data.data_file import DataReport
from ft_service.data.examiner import data_files
from ft_service.data.token_folder import FOLDER
from ft_service.errors import SpecError
from ft_service.plan.fitting_settings import with_options
from ft_service.rundir.checkpoints import checkpoint_faults, complete_checkpoints
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import (
    CheckpointMarker,
    Control,
    Desired,
    Outcome,
    OutcomeKind,
    Result,
    Start,
)
from ft_service.rundir.events import BEFORE_VALID_LOSS, SettledOption
from ft_service.rundir.manifest import ORIGINS, Manifest, Origins, parent_of, without_paths
from ft_service.rundir.verify import verify
from ft_service.spec import AdapterRef, JobSpec, LoraOptions
from tests.support.attempts import HANG_SECONDS
from tests.support.ranks import run_on_ranks
from tests.support.training.attempts import adapter, attempt_on_rank, losses, run_attempt, run_spec
from tests.support.training.kept_tokens import KeptExaminer
from tests.support.training.models import save_chat_base, save_chats, spec_for
from workers.attempt.attempt import _carry_out_commands, _resume
from workers.attempt.prepared_model import report_built
from workers.base.load import adapters, load
from workers.base.rank_objects import FailedElsewhere
from workers.job.parent_adapter import adopt
from workers.model.build import build, choose_arithmetic
from workers.tasks.consolidate import consolidate
from workers.training.teachers import Teacher

CPU = torch.device("cpu")
STEPS = 5


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    folder = tmp_path_factory.mktemp("job")
    return spec_for(
        save_chat_base(folder / "base"),
        save_chats(folder / "train.jsonl", 5),
        valid=save_chats(folder / "valid.jsonl", 3),
        ranks=2,
        precision={"default": "nf4", "compute": "fp32", "compare_served": "off"},
        training={
            "max_steps": STEPS,
            "batch_size": 4,
            "per_device_train_batch_size": 2,
            "learning_rate": 2e-2,
        },
        checkpoint={"save_steps": 2, "save_total_limit": 10},
        lora={"r": 4, "lora_dropout": 0.1},
    )


@pytest.fixture(scope="module")
def finished(spec: JobSpec, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The uninterrupted job on two ranks."""
    run = RunDir(tmp_path_factory.mktemp("finished"))
    run.write("spec.json", spec)
    assert run_attempt(run, 1, 2) == Outcome(kind=OutcomeKind.SUCCEEDED)
    return run


def interrupted(finished: RunDir, folder: Path, checkpoint: str) -> RunDir:
    """The run directory of the same job as if it had been killed after a checkpoint."""
    run = RunDir(folder)
    shutil.copytree(finished.path("attempts"), run.path("attempts"))
    shutil.copytree(
        finished.path(f"checkpoints/{checkpoint}"), run.path(f"checkpoints/{checkpoint}")
    )
    run.write("spec.json", run_spec(finished))
    return run


def test_a_finished_attempt_leaves_everything(finished: RunDir) -> None:
    result = finished.read("result.json", Result)
    assert result is not None
    assert (result.attempt, result.steps) == (1, STEPS)
    assert list(losses(finished)) == list(range(1, STEPS + 1))
    assert list(losses(finished, "valid_loss")) == [2, 4, 5], (
        "at the end of every epoch of 2 steps, and at the last step"
    )
    assert result.train_loss == losses(finished)[STEPS]
    before = losses(finished, BEFORE_VALID_LOSS)
    assert list(before) == [1], "told with the first step"
    assert before[1] > losses(finished, "valid_loss")[STEPS]
    assert complete_checkpoints(finished) == ["step-2-a1", "step-4-a1", "step-5-a1"]
    for name in complete_checkpoints(finished):
        assert not checkpoint_faults(finished, name)
    assert verify(finished.root).faults == []


def test_the_loss_before_training_is_that_of_the_base_alone(
    spec: JobSpec, finished: RunDir, tmp_path: Path
) -> None:
    """Of a job that learns nothing, the first validation is the base's, dropout and all apart."""
    still = spec.model_copy(
        update={"training": spec.training.model_copy(update={"learning_rate": 1e-30})}
    )
    run = RunDir(tmp_path)
    run.write("spec.json", still)
    assert run_attempt(run, 1, 1).kind == "succeeded"
    unchanged = losses(run, "valid_loss")[2]
    assert losses(run, BEFORE_VALID_LOSS) == {1: pytest.approx(unchanged, abs=1e-6)}
    assert losses(finished, BEFORE_VALID_LOSS)[1] == pytest.approx(unchanged, abs=1e-6)


def test_the_manifest_describes_the_job(finished: RunDir, spec: JobSpec) -> None:
    manifest = finished.read("adapter/manifest.json", Manifest)
    assert manifest is not None
    assert manifest.spec == without_paths(spec)
    assert [(a.world_size, a.ended) for a in manifest.history] == [(2, "published")]
    layers = [module for module in manifest.frozen_modules if module.format != "bf16"]
    assert len(layers) == 14
    assert {layer.format for layer in layers} == {"nf4"}
    assert all(
        layer.relative_error is not None and 0.05 < layer.relative_error < 0.12 for layer in layers
    )
    assert all(layer.multiplied_in == "fp32" for layer in layers)
    others = {
        module.module: module.relative_error
        for module in manifest.frozen_modules
        if module not in layers
    }
    assert {
        "model.embed_tokens",
        "model.norm",
        "model.layers.1.input_layernorm",
        "lm_head",
    } <= others.keys()
    assert set(others.values()) == {0.0}, "bf16 is stored as it was read"
    assert manifest.quantiser == {"nf4": 1}
    assert sum(layer.bytes for layer in layers) < 0.6 * sum(
        layer.shape[0] * layer.shape[1] for layer in layers
    )
    assert [(file.role, file.name, file.samples) for file in manifest.data] == [
        ("training", "train.jsonl", 5),
        ("validation", "valid.jsonl", 3),
    ]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= manifest.base.files.keys()
    assert manifest.metrics is not None
    assert (manifest.step, manifest.metrics.valid_loss) == (
        STEPS,
        losses(finished, "valid_loss")[STEPS],
    )


def test_training_lowers_the_loss(finished: RunDir) -> None:
    found = losses(finished)
    assert found[STEPS] < 0.95 * found[1]


def attempt_with_tokens(rank: int, world: int, root: str, attempt: int, tokens: str) -> Outcome:
    """An attempt on a rank that has the service's tokens and no tokenizer."""
    refuse = AssertionError("no rank tokenises")
    with (
        patch.dict(os.environ, {FOLDER: tokens}),
        patch("workers.data.token_sets.tokenise", side_effect=refuse),
    ):
        return attempt_on_rank(rank, world, root, attempt)


def test_ranks_that_map_the_services_tokens_train_alike(
    finished: RunDir, spec: JobSpec, tmp_path: Path
) -> None:
    assert not finished.path("tokens").exists(), "what its ranks made themselves goes with its end"
    tokens = tmp_path / "tokens"
    with KeptExaminer(tokens=tokens) as examiner:
        for param, file in data_files(spec):
            assert isinstance(
                examiner.examine_file(param, file, Path(file.path), spec, pytest.fail), DataReport
            )
    run = RunDir(tmp_path / "run")
    run.write(
        "spec.json",
        spec.model_copy(update={"training": spec.training.model_copy(update={"max_steps": 3})}),
    )
    run.write(
        "attempts/1/start.json",
        Start(job_id=spec.job_id, attempt=1, world_size=1, generation=1, checkpoint=None),
    )
    run_on_ranks(attempt_with_tokens, 1, str(run.root), 1, str(tokens))
    assert not run.path("tokens").exists()
    ours = run.read(ORIGINS, Origins)
    theirs = finished.read(ORIGINS, Origins)
    assert ours is not None
    assert theirs is not None
    assert ours.data == theirs.data
    assert list(losses(run).values()) == pytest.approx(
        [losses(finished)[step] for step in (1, 2, 3)], rel=1e-6
    )


@pytest.mark.slow  # ranks/test_sharding.py has the numbers of a step with each of them
@pytest.mark.parametrize(
    "options",
    [
        {
            "prefetch": {"forward": 2, "backward": 2},
            "activation_checkpointing": "full",
            "keep_unsharded": True,
        },
        {
            "wrap": {"min_params": 5000},
            "activation_checkpointing": "selective",
            "ignored": [r".*norm\.weight"],
        },
    ],
    ids=["gathered ahead, kept, recomputed", "in groups by size, norms whole"],
)
def test_how_a_job_is_sharded_does_not_change_its_numbers(
    options: dict[str, Any], finished: RunDir, spec: JobSpec, tmp_path: Path
) -> None:
    changed = {**spec.distributed.model_dump(), **options}
    run = RunDir(tmp_path)
    run.write("spec.json", JobSpec.model_validate({**spec.model_dump(), "distributed": changed}))
    assert run_attempt(run, 1, 2) == Outcome(kind=OutcomeKind.SUCCEEDED)
    assert losses(run) == pytest.approx(losses(finished), rel=1e-6)


def test_a_checkpoint_holds_the_job_and_not_the_base(finished: RunDir, spec: JobSpec) -> None:
    marker = finished.read("checkpoints/step-5-a1/COMPLETE", CheckpointMarker)
    assert marker is not None
    assert {file.name for file in marker.files} == {
        ".metadata",
        "position.json",
        "__0_0.distcp",
        "__1_0.distcp",
    }
    held = (
        FileSystemReader(finished.path("checkpoints/step-5-a1")).read_metadata().state_dict_metadata
    )
    trainable = {name.replace(".weight", ".default.weight") for name in adapter(finished)}
    assert held.keys() == {
        f"{kind}/{name}" for kind in ("adapter", "exp_avg", "exp_avg_sq") for name in trainable
    }


@pytest.mark.parametrize(("world", "step"), [pytest.param(1, 2, marks=pytest.mark.slow), (3, 4)])
def test_resume_on_other_ranks_goes_on_with_the_same_losses(
    finished: RunDir, tmp_path: Path, world: int, step: int
) -> None:
    run = interrupted(finished, tmp_path, f"step-{step}-a1")
    assert run_attempt(run, 2, world, f"step-{step}-a1").kind == "succeeded"
    for step, loss in losses(finished).items():
        assert losses(run)[step] == pytest.approx(loss, rel=1e-6), f"step {step}"


@pytest.mark.slow
def test_in_bf16_other_ranks_come_to_nearly_the_same_losses(spec: JobSpec, tmp_path: Path) -> None:
    whole = RunDir(tmp_path / "whole")
    precision = spec.precision.model_copy(update={"compute": "bf16"})
    whole.write("spec.json", spec.model_copy(update={"precision": precision}))
    assert run_attempt(whole, 1, 2).kind == "succeeded"
    run = interrupted(whole, tmp_path / "resumed", "step-2-a1")
    assert run_attempt(run, 2, 3, "step-2-a1").kind == "succeeded"
    assert losses(run) == pytest.approx(losses(whole), rel=1e-3)


@pytest.mark.parametrize(("world", "replicate"), [(4, 2), (2, 2)], ids=["2x2", "2x1"])
@pytest.mark.slow
def test_a_job_goes_on_across_hsdp_shapes(
    finished: RunDir, tmp_path: Path, world: int, replicate: int
) -> None:
    """From two ranks that shard to copies of the model, and back from the checkpoint that those
    wrote.
    """
    run = interrupted(finished, tmp_path, "step-2-a1")
    sharded = run_spec(run)
    distributed = sharded.distributed.model_copy(update={"replicate": replicate})
    run.write("spec.json", sharded.model_copy(update={"distributed": distributed}))
    assert run_attempt(run, 2, world, "step-2-a1").kind == "succeeded"
    for step, loss in losses(finished).items():
        assert losses(run)[step] == pytest.approx(loss, rel=1e-6), f"step {step}"
    assert not checkpoint_faults(run, "step-4-a2")

    run.path("result.json").unlink()
    run.write("spec.json", sharded)
    assert run_attempt(run, 3, 2, "step-4-a2").kind == "succeeded"
    for step, loss in losses(finished).items():
        assert losses(run)[step] == pytest.approx(loss, rel=1e-6), f"step {step}"


def test_a_pause_stops_all_ranks_at_a_checkpoint_and_the_job_goes_on_bitwise_as_if_there_was_none(
    finished: RunDir, tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    run.write("spec.json", run_spec(finished))
    run.write("attempts/1/control.json", Control(generation=2, desired=Desired.PAUSE))
    stopped = run_attempt(run, 1, 2)
    assert stopped == Outcome(kind=OutcomeKind.STOPPED, checkpoint="step-1-a1")
    assert run.get("result.json") is None
    assert run_attempt(run, 2, 2, "step-1-a1").kind == "succeeded"
    assert losses(run) == losses(finished)
    assert losses(run, "valid_loss") == losses(finished, "valid_loss")
    assert losses(run, BEFORE_VALID_LOSS) == losses(finished, BEFORE_VALID_LOSS), "not once more"
    whole = adapter(finished)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in adapter(run).items())


def test_another_jobs_checkpoint_is_refused(finished: RunDir, tmp_path: Path) -> None:
    run = interrupted(finished, tmp_path, "step-2-a1")
    run.write("spec.json", run_spec(finished).model_copy(update={"seed": 8}))
    with pytest.raises(AssertionError, match=f"{SpecError.__name__}.*with seed 7, not to"):
        run_attempt(run, 2, 1, "step-2-a1")


def test_a_base_that_changed_since_the_job_began_is_refused(
    finished: RunDir, tmp_path: Path, spec: JobSpec
) -> None:
    run = interrupted(finished, tmp_path / "run", "step-4-a1")
    shutil.copy(finished.path("origins.json"), run.root)
    base = shutil.copytree(spec.model.path, tmp_path / "base")
    (base / "generation_config.json").write_text("{}")
    moved = spec.model_copy(update={"model": spec.model.model_copy(update={"path": str(base)})})
    run.write("spec.json", moved)
    assert run_attempt(run, 2, 1, "step-4-a1").kind == "succeeded", (
        "elsewhere, with another file that decides nothing"
    )
    config = base / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(
        AssertionError,
        match=rf"{SpecError.__name__}.*tiny has changed since the job began \(config\.json\)",
    ):
        run_attempt(run, 3, 1, "step-4-a1")


def test_changed_data_is_refused(finished: RunDir, tmp_path: Path, spec: JobSpec) -> None:
    run = RunDir(tmp_path)
    data = spec.data_files[0].model_copy(update={"sha256": "f" * 64})
    run.write("spec.json", spec.model_copy(update={"training_data": data}))
    with pytest.raises(AssertionError, match="has changed since the job was submitted"):
        run_attempt(run, 1, 1)


PLAIN_PEFT = """
import sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, ids, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
model = PeftModel.from_pretrained(model, adapter).eval()
state = {n.replace(".default.", "."): p.detach() for n, p in model.named_parameters() if "lora_" in n}
with torch.no_grad():
    torch.save({"logits": model(torch.load(ids)).logits, "adapter": state}, out)
"""


def logits_of_worker(run: RunDir, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the worker's own model on the quantised base, with the exported adapter's
    values.
    """
    spec = run_spec(run)
    model = build(spec, CPU).peft_model.eval()
    load(model, spec.model.path, seed=0, compute_dtype=torch.float32, device=CPU)
    values = adapter(run)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(values[name.replace(".default.", ".")])
        return model(input_ids=ids).logits


def plain_peft(rank: int, world: int, arguments: list[str]) -> None:
    """The program in a process that has imported PEFT, and our code too."""
    sys.argv[1:] = arguments
    exec(PLAIN_PEFT, {})


@pytest.mark.parametrize("is_fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_plain_peft_in_another_process_loads_exactly_this_adapter(
    is_fresh: bool, finished: RunDir, spec: JobSpec, tmp_path: Path
) -> None:
    """Same adapter weights bit for bit; logits on the bf16 base within the noise of quantising that
    base.

    The bound: NF4 changes each weight matrix by 9 % of its norm, at random. A token passes four
    matrices in a row in each of the two layers (v and o, then gate or up and down), and independent
    errors add in squares: 9 % * sqrt(8) = 25 % of the logits' norm, less what the residual path
    lets through unchanged. An adapter that is missing, transposed or wrongly scaled moves these
    logits by more than half of their norm (checked below).
    """
    ids = torch.arange(40).reshape(2, 20) + 60
    torch.save(ids, tmp_path / "ids.pt")
    arguments = [
        spec.model.path,
        str(finished.path("adapter")),
        str(tmp_path / "ids.pt"),
        str(tmp_path / "out.pt"),
    ]
    if is_fresh:
        subprocess.run(
            [sys.executable, "-c", PLAIN_PEFT, *arguments],
            check=True,
            capture_output=True,
            timeout=HANG_SECONDS,
        )
    else:
        run_on_ranks(plain_peft, 1, arguments)
    loaded: dict[str, Any] = torch.load(tmp_path / "out.pt")
    exported = adapter(finished)
    assert loaded["adapter"].keys() == exported.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in loaded["adapter"].items())
    ours = logits_of_worker(finished, ids)
    assert difference(loaded["logits"], ours) < 0.25
    without = torch.zeros_like(ours)
    assert difference(without, ours) > 0.5
    assert difference(base_logits(spec, ids), ours) > 0.5, "the adapter matters more than the noise"


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def base_logits(spec: JobSpec, ids: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(spec.model.path, dtype=torch.float32)(
            ids
        ).logits


def going_on(spec: JobSpec, folder: Path, parent: Path, **changes: Any) -> RunDir:
    """A job of one step that leaves the adapter as it found it, bit for bit: its validation is that
    of where it began.
    """
    run = RunDir(folder)
    ref = AdapterRef(name="ft:tiny:local::test", job_id=spec.job_id, path=str(parent))
    still = spec.training.model_copy(update={"max_steps": 1, "learning_rate": 1e-30})
    values = {"parent": ref, "job_id": "ftjob-again", "seed": 99, "training": still, **changes}
    run.write("spec.json", spec.model_copy(update=values))
    return run


def test_going_on_starts_at_the_parents_last_validation_loss(
    finished: RunDir, spec: JobSpec, tmp_path: Path
) -> None:
    run = going_on(spec, tmp_path, finished.path("adapter"))
    assert run_attempt(run, 1, 2).kind == "succeeded"
    assert losses(run, "valid_loss") == {1: losses(finished, "valid_loss")[STEPS]}
    whole = adapter(finished)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in adapter(run).items())
    before = finished.read("adapter/manifest.json", Manifest)
    manifest = run.read("adapter/manifest.json", Manifest)
    assert before is not None
    assert manifest is not None
    assert manifest.parent == parent_of("ft:tiny:local::test", before)
    assert manifest.parent is not None
    assert (manifest.parent.job, manifest.parent.step, manifest.parent.checkpoint) == (
        spec.job_id,
        STEPS,
        None,
    )
    assert verify(run.root).faults == []


def test_going_on_from_a_checkpoint_on_other_ranks(
    finished: RunDir, spec: JobSpec, tmp_path: Path
) -> None:
    consolidate(finished, "step-4-a1", tmp_path / "parent")
    run = going_on(spec, tmp_path / "run", tmp_path / "parent")
    assert run_attempt(run, 1, 1).kind == "succeeded"
    (loss,) = losses(run, "valid_loss").values()
    assert loss == pytest.approx(losses(finished, "valid_loss")[4], rel=1e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lora": LoraOptions(r=2)}, "has another shape than this job's"),
        ({"lora": LoraOptions(r=4, target_modules=["q_proj"])}, "not in it"),
        ({}, "is not what its manifest says"),
    ],
)
def test_a_parent_that_does_not_fit_is_refused(
    finished: RunDir, spec: JobSpec, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    parent = Path(shutil.copytree(finished.path("adapter"), tmp_path / "parent"))
    if not change:
        with (parent / "adapter_model.safetensors").open("ab") as file:
            file.write(b" ")
    run = going_on(spec, tmp_path / "run", parent, **change)
    built = build(run_spec(run), CPU)
    load(built.peft_model, spec.model.path, seed=1, compute_dtype=torch.float32, device=CPU)
    ref = run_spec(run).parent
    assert ref is not None
    with pytest.raises(SpecError, match=says):
        adopt(dict(adapters(built.peft_model)), ref)


@pytest.mark.parametrize(("ranks", "where"), [(1, "1 rank (cpu)"), (3, "3 ranks (cpu)")])
@pytest.mark.parametrize(("steps", "which"), [(8, "8 steps"), (None, "as its client says")])
def test_the_beginning_is_told_in_grammar_and_with_what_was_chosen(
    ranks: int, where: str, steps: int | None, which: str, spec: JobSpec, tmp_path: Path
) -> None:
    told: list[Any] = []
    chosen = with_options(
        spec, {"training.tokens_per_micro_batch": 256, "distributed.compile": False}
    )
    chosen = chosen.model_copy(
        update={
            "chosen": {"training.tokens_per_micro_batch": "all of it", "training.n_epochs": "few"}
        }
    )
    start = SimpleNamespace(checkpoint=None)
    fence = SimpleNamespace(check=lambda: None)
    given = {
        "rank": 1,
        "world": ranks,
        "device": CPU,
        "start": start,
        "spec": chosen,
        "fence": fence,
    }
    begin: Any = _resume
    runtime = SimpleNamespace(**given, run=RunDir(tmp_path))
    begin(runtime, SimpleNamespace(begin=lambda *said: told.extend(said)), None, steps)
    settled = {"training.tokens_per_micro_batch": SettledOption(value=256, why="all of it")}
    assert told == [f"Training starts on {where}: {which}.", settled]


def test_kernels_that_a_job_goes_without_are_its_events(tmp_path: Path) -> None:
    """Here is no GPU, on which they could be compared: of a job for one, all are told with the
    reason.
    """
    told: list[tuple[str, str]] = []
    reporter: Any = SimpleNamespace(message=lambda text, level="info": told.append((level, text)))
    spec = spec_for(save_chat_base(tmp_path / "base"), lora={"r": 2, "lora_dropout": 0.1})
    built = build(spec, CPU)
    assert (
        choose_arithmetic(built.peft_model.get_base_model(), spec, torch.device("cuda", 7)).fused
        is None
    )
    report_built(spec, built, torch.device("cuda", 7), reporter)
    warned = [text for level, text in told if level == "warn" and "Error: " in text]
    assert [text.partition(":")[0] for text in warned] == [
        "lora.lora_dropout",
        "precision.fused_kernels",
    ]


def test_a_disk_that_refuses_the_last_events_of_a_client_s_job_ends_it_on_all_ranks_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only rank 0 has events.

    In an engine the others would wait for it in their next collective, and all jobs with them.
    """

    def collective(*_: Any) -> Any:
        raise AssertionError("this rank waits for rank 0, which has left")

    def failed_on_rank_0(_: Any) -> Any:
        raise FailedElsewhere

    def nothing(*_: Any) -> Any:
        return None

    on_rank_1 = {
        "_resume": nothing,
        "_saver": nothing,
        "AdapterWatch": nothing,
        "by_first": failed_on_rank_0,
    }
    on_rank_1 |= {"EmbeddedRows": SimpleNamespace(of=nothing)}
    loop = {
        "CommandLoop": lambda *_: SimpleNamespace(run=lambda: (True, None)),
        "use_best": collective,
    }
    for name, replacement in (on_rank_1 | loop).items():
        monkeypatch.setattr(f"workers.attempt.attempt.{name}", replacement)
    reporter = SimpleNamespace(message=nothing, warn=nothing, flush=nothing)
    context: Any = SimpleNamespace(
        runtime=SimpleNamespace(
            spec=SimpleNamespace(reinforcement=None, model=SimpleNamespace(path="base"))
        ),
        reporter=reporter,
    )
    embedding = SimpleNamespace(num_embeddings=1)
    model = SimpleNamespace(get_input_embeddings=lambda: embedding)
    prepared: Any = SimpleNamespace(
        built=SimpleNamespace(peft_model=model), wait=None, resident=None
    )
    data: Any = ((), ())
    with pytest.raises(FailedElsewhere):
        _carry_out_commands(context, prepared, cast(Any, SimpleNamespace(step=1)), data, Teacher())
