"""What a base is held to: the plan, the published class with plain PEFT, one rank against two, and
an interrupted job.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import transformers
from peft import PeftModel
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.quantization_config import (
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
)

from ft_service.errors import SpecError
from ft_service.plan.weight_storage import adapters_of
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Start
from ft_service.spec import JobSpec
from tests.support.bases import describe
from tests.support.ranks import run_on_ranks
from tests.support.training.attempts import adapter, attempt_on_rank
from tests.support.training.kept_tokens import give_tokens
from tests.support.training.models import save_chats, spec_for
from tests.support.training.parity import (
    CPU,
    constructed,
    full,
    one_step,
    relative_error,
    samples,
    set_adapters,
)
from tests.support.training.prequantized import BY_BLOCKS, VALUES
from workers.base.layouts import declared_block, quantization_of
from workers.base.load import adapters, load, plain_name
from workers.data.batches import collate
from workers.layers.segments import CURRENT
from workers.model.build import BuiltModel, build
from workers.output.outcome import new_folder, write_adapter
from workers.training.packing import settle_attention

LORA = {"r": 3, "target_modules": "all-linear"}
IDS = torch.arange(3, 27).view(2, 12)
BOUND = 1e-5
"""Of loss and every gradient, relative, in fp32."""
NEARLY = 1e-3
"""Of gradients: above it, it is no rounding."""
DEQUANTISED: dict[str, Any] = {
    "compressed-tensors": CompressedTensorsConfig,
    "fp8": FineGrainedFP8Config,
    "mxfp4": Mxfp4Config,
}
"""How transformers is asked for the values of a quantised base."""
CHANGE = 1e-2
"""What an adapter changes in a logit, at least."""


READS_TEXT = {
    **dict.fromkeys(("qwen2_5_omni", "qwen3_omni_moe"), "thinker"),
    **dict.fromkeys(("blip-2", "instructblip", "instructblipvideo"), "language_model"),
}
"""Type → the part of its published class that is asked with text alone: the whole has no forward,
or wants an image.
"""
REREAD_BY_PEFT = patch("workers.output.outcome._check_in_fresh_process")
"""A process that reads the adapter again takes longer than all the rest; here the published class
reads it.
"""


@dataclass(frozen=True)
class Found:
    """What was found of one base. Errors are relative to the norm of what is right."""

    refused: str = ""
    """By plan and worker alike, in these words; empty: it can be tuned, and the rest says how
    well.
    """
    frozen: int = 0
    adapted: int = 0
    """Modules and stacks with an adapter."""
    same_as_planned: bool = False
    packed: bool = False
    loss: float = float("nan")
    gradient: float = float("nan")
    """The largest of all adapters', against the published class with plain PEFT."""
    noise: float = 0.0
    """The same of that class' own gradients in fp32 against fp64, where ours are not within BOUND
    of them. Ours are then held to fp64 too, and to no more than three times its rounding.
    """
    ranks: float = float("nan")
    """The largest error of loss or gradient on two ranks against one, in NF4."""
    reloaded: float = float("nan")
    """Largest difference between our logits and the published class' with the exported adapter."""
    changed: float = float("nan")
    """Largest change of one of its logits by the adapter."""
    resumed: bool = False
    """Whether the adapter of an interrupted job is bitwise the uninterrupted one's."""

    @property
    def exact(self) -> bool:
        """Whether it trains as the published class does, and its adapter changes that class as it
        changed ours.
        """
        near = (
            self.loss <= BOUND
            and self.gradient <= max(BOUND, 3 * self.noise)
            and self.reloaded <= 10 * BOUND
        )
        return not self.refused and self.same_as_planned and near and self.changed >= CHANGE

    @property
    def works(self) -> bool:
        return self.exact and self.ranks <= BOUND and self.resumed

    def faults(self) -> str:
        return "" if self.works or self.refused else json.dumps(asdict(self))


@dataclass(frozen=True)
class OnRank:
    """One step of training on a rank, and what the model answered before it."""

    loss: float
    grads: dict[str, Tensor]
    packed: bool
    logits: Tensor | None = None


def check(folders: Mapping[str, Path], work: Path) -> dict[str, Found]:
    """What is found of each base. `work`: an empty folder."""
    refused = {name: refusal(folder) for name, folder in folders.items()}
    taken = {name: folder for name, folder in folders.items() if not refused[name]}
    plain = {name: _spec(folder, _exact(folder)) for name, folder in taken.items()}
    (one,) = run_on_ranks(measure, 1, plain, str(work / "adapters"), timeout=1700)
    ranks = between_ranks(taken, 2)
    resumed = resume_all(taken, work / "runs")
    found = {name: Found(refused=words) for name, words in refused.items() if words}
    for name, folder in taken.items():
        published = against_published(folder, work / "adapters" / name, one[name])
        found[name] = Found(
            **_sizes(folder),
            **published,
            packed=one[name].packed,
            ranks=ranks[name],
            resumed=resumed[name],
        )
    return {name: found[name] for name in folders}


def between_ranks(
    folders: Mapping[str, Path], world: int, step: Callable[..., Any] | None = None, **weights: Any
) -> dict[str, float]:
    """The largest error of loss or gradient of each base on `world` ranks against one.

    `weights`: precision other than NF4.

    `step`: a function in place of `measure`, whose module the ranks import.
    """
    alone, together = (
        run_on_ranks(
            step or measure,
            n,
            {name: _spec(f, _quantised(f), n, precision=weights) for name, f in folders.items()},
            None,
            timeout=1700,
        )
        for n in (1, world)
    )
    return {
        name: max(_error(on_rank[name], alone[0][name]) for on_rank in together) for name in folders
    }


def _spec(folder: Path, weights: str | dict[str, str], ranks: int = 1, **options: Any) -> JobSpec:
    """`weights`: the format of all, or those of some, by patterns."""
    training = {"per_device_train_batch_size": 2, **options.pop("training", {})}
    formats = {"default": weights} if isinstance(weights, str) else {"overrides": weights}
    precision = {**formats, "compute": "fp32", **options.pop("precision", {})}
    return spec_for(
        folder, ranks=ranks, precision=precision, lora=LORA, training=training, **options
    )


def exact_spec(folder: Path, ranks: int) -> JobSpec:
    """A job in fp32 on a base in the format in which it loses nothing."""
    return _spec(folder, _exact(folder), ranks)


def _exact(folder: Path) -> str | dict[str, str]:
    """The format in which the base loses nothing in fp32: FP8 keeps published blocks, whose values
    bf16 would round.
    """
    return {BY_BLOCKS: "fp8"} if _is_by_blocks(folder) else "bf16"


def _quantised(folder: Path) -> str | dict[str, str]:
    return {BY_BLOCKS: "fp8"} if _is_by_blocks(folder) else "nf4"


def _is_by_blocks(folder: Path) -> bool:
    quantization = quantization_of(folder)
    return quantization is not None and declared_block(quantization) is not None


def refusal(folder: Path) -> str:
    """The words in which the worker refuses a base, before training at the latest; the description
    must agree.
    """
    spec = _spec(folder, "nf4")
    described = _words(lambda: adapters_of(describe(folder), spec))
    said = _words(lambda: build(spec, CPU))
    if described and not said:
        said = _words(lambda: _tried(folder))
    assert bool(described) == bool(said), f"the description says {described!r}, the worker {said!r}"
    return said


def _words(look: Callable[[], object]) -> str:
    """The words of a refusal; empty: there is none."""
    try:
        look()
    except SpecError as error:
        return str(error)
    return ""


def _tried(folder: Path) -> None:
    """Do what a worker does of a base before it trains.

    Raises SpecError for a base that it refuses.
    """
    built = build(_spec(folder, "bf16"), CPU)
    load(built.peft_model, folder, seed=0, compute_dtype=torch.float32, device=CPU)
    try:
        settle_attention(built.peft_model, CPU, torch.float32)
    except (ValueError, AttributeError, RuntimeError) as error:  # its class wants more than tokens
        raise SpecError(f"{type(error).__name__}: {error}", param="model") from error


def _sizes(folder: Path) -> dict[str, Any]:
    spec = _spec(folder, "nf4")
    base = describe(folder)
    built = build(spec, CPU)
    planned = adapters_of(base, spec)
    frozen = sum(p.numel() for p in built.peft_model.parameters() if not p.requires_grad)
    trained = sum(p.numel() for _, p in adapters(built.peft_model))
    same = (sum(a.numel for a in planned), sum(w.numel for w in base.weights)) == (trained, frozen)
    same = same and set(base.names.quantizable) == set(built.formats)
    return {"frozen": frozen, "adapted": len(planned), "same_as_planned": same}


def measure(
    rank: int, world: int, specs: Mapping[str, JobSpec], out: str | None
) -> dict[str, OnRank]:
    """A step of each job on this rank.

    `out`: where to write the adapters that it starts with, and to tell the logits.
    """
    found = {}
    for name, spec in specs.items():
        with REREAD_BY_PEFT, _naming(name):
            found[name] = _step(
                rank,
                world,
                spec,
                constructed(spec, world),
                None if out is None else Path(out) / name,
            )
    return found


@contextmanager
def _naming(base: str) -> Iterator[None]:
    """Add to an error of which base it is: many are looked at in one process."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"The base is {base}.")
        raise


def check_here(folder: Path, work: Path) -> Found:
    """What is found of a base in this process, on one rank: all but what needs two of them, or a
    whole job.
    """
    words = refusal(folder)
    if words:
        return Found(refused=words)
    return replace(check_worker(folder, work), **_sizes(folder))


def check_worker(folder: Path, work: Path) -> Found:
    """The same of the worker alone: nothing that is planned is looked at."""
    spec = _spec(folder, _exact(folder))
    built = build(spec, CPU)
    load(built.peft_model, folder, seed=spec.seed, compute_dtype=torch.float32, device=CPU)
    set_adapters(built.peft_model)
    built.peft_model.train()
    with REREAD_BY_PEFT:
        ours = _step(0, 1, spec, built, work / "adapter")
    return Found(
        **against_published(folder, work / "adapter", ours),
        packed=ours.packed,
        same_as_planned=True,
    )


def _step(rank: int, world: int, spec: JobSpec, built: BuiltModel, out: Path | None) -> OnRank:
    """A step of the loaded model.

    `out`: where to write the adapter that it starts with, and to tell the logits.
    """
    model = built.peft_model
    packed = settle_attention(model, CPU, torch.float32) is None
    logits = None
    if out is not None:
        with new_folder(out) as folder:
            tensors = {
                key.replace(".default.", "."): p.detach().contiguous() for key, p in adapters(model)
            }
            shapes = {key: tensor.shape for key, tensor in tensors.items()}
            write_adapter(folder, shapes, tensors.items(), model.peft_config["default"], spec)
        logits = logits_of(model.eval())
        model.train()
    spec = spec.model_copy(
        update={"training": spec.training.model_copy(update={"packing": packed})}
    )
    step = one_step(rank, world, spec, built, dict(adapters(model)))
    return OnRank(step.loss, step.grads, packed, logits)


def logits_of(model: nn.Module) -> Tensor:
    CURRENT.use(None)
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits.float()


def published_model(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The base as transformers loads it."""
    folder = folder / VALUES if (folder / VALUES).is_dir() else folder
    config = AutoConfig.from_pretrained(folder)
    several = config.get_text_config(decoder=True) is not config
    given = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    method = given.get("quant_method") if isinstance(given, dict) else None
    options: dict[str, Any] = (
        {"attn_implementation": "eager"} if config.to_dict().get("attn_logit_softcapping") else {}
    )
    if method is not None:
        options["quantization_config"] = DEQUANTISED[method](dequantize=True)
    if dtype == torch.float64:
        options["experts_implementation"] = "eager"  # the grouped products know no fp64
    stock: Any = (
        published_as(config)
        if several or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        else AutoModelForCausalLM
    )
    with small_timm():
        model = stock.from_pretrained(folder, dtype=dtype, **options)
    part = READS_TEXT.get(config.model_type)
    if part is not None:
        model.forward = model.get_submodule(part).forward
    return _in(dtype, model)


def _in(dtype: torch.dtype, model: Any) -> Any:
    """Unlike `to`, this leaves complex numbers whole."""
    return model.double() if dtype == torch.float64 else model.float()


def small_timm() -> Any:
    """Lets transformers make towers of timm, which the tests do not install: any such tower is one
    linear layer.
    """
    module = "transformers.models.timm_wrapper.modeling_timm_wrapper"
    timm = SimpleNamespace(create_model=lambda *_, **__: nn.Sequential(nn.Linear(8, 8)))
    return patch.multiple(module, timm=timm, requires_backends=lambda *_: None, create=True)


def published_as(config: PreTrainedConfig) -> Any:
    """The class that a base of several models is published as."""
    auto: Any = getattr(transformers, "AutoModelForMultimodalLM", AutoModelForImageTextToText)
    return auto._model_mapping[
        type(config)
    ]  # itself, it misses classes whose config has two model types


def against_published(folder: Path, adapter_folder: Path, ours: OnRank) -> dict[str, Any]:
    """Errors of our step against that of the published class with the exported adapter, put on it
    by plain PEFT.
    """
    truth, before, after = published_step(folder, adapter_folder)
    assert ours.logits is not None
    gradient = _gradient_error(ours, truth)
    noise = 0.0
    if BOUND < gradient < NEARLY:  # which of the two is off
        right = published_step(folder, adapter_folder, torch.float64)[0]
        gradient = _gradient_error(ours, right)
        noise = _gradient_error(truth, right)
    return {
        "loss": abs(ours.loss - truth.loss) / truth.loss,
        "gradient": gradient,
        "noise": noise,
        "reloaded": float((after - ours.logits).abs().max()),
        "changed": float((after - before).abs().max()),
    }


def published_step(
    folder: Path, adapter_folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[OnRank, Tensor, Tensor]:
    """Of the published class with an adapter, put on it by plain PEFT: loss and gradients; its
    logits without it and with.
    """
    model = published_model(folder, dtype)
    before = logits_of(model.eval())
    stock = _in(dtype, PeftModel.from_pretrained(model, adapter_folder, is_trainable=True)).eval()
    after = logits_of(stock)
    trained = {plain_name(n): p for n, p in stock.named_parameters() if p.requires_grad}
    batch = collate(samples(), CPU)
    total = 0.0
    targets = len(batch.targets)
    for sample in samples():  # one by one: some architectures look at the longest of a batch
        own = collate([sample], CPU)
        logits = stock(input_ids=own.ids, use_cache=False).logits.flatten(0, 1)
        loss = (
            torch.nn.functional.cross_entropy(logits[own.places], own.targets, reduction="sum")
            / targets
        )
        loss.backward()
        total += loss.item()
    return (
        OnRank(
            total, {name: full(p.grad) for name, p in trained.items() if p.grad is not None}, False
        ),
        before,
        after,
    )


def _gradient_error(ours: OnRank, truth: OnRank) -> float:
    if ours.grads.keys() != truth.grads.keys():
        return float("inf")
    return max(_relative(grad, truth.grads[name]) for name, grad in ours.grads.items())


def _relative(value: Tensor, truth: Tensor) -> float:
    """Infinite where there is no gradient at all: an adapter that learns nothing."""
    return relative_error(value, truth) if truth.norm() > 0 else float("inf")


def _error(ours: OnRank, truth: OnRank) -> float:
    return max(abs(ours.loss - truth.loss) / truth.loss, _gradient_error(ours, truth))


# Whole jobs
# ------------------------------------------------------------------------------


def resume_all(
    folders: Mapping[str, Path], work: Path, weights: str | None = None
) -> dict[str, bool]:
    """Whether each job on two ranks, cut off after its second step, ends with bitwise the adapter
    of the uninterrupted one.

    `weights`: the format of all; None: FP8 for a base published so by blocks, else NF4.
    """
    whole = work / "whole"
    cut = work / "cut"
    for name, folder in folders.items():
        spec = _spec(
            folder,
            weights or _quantised(folder),
            2,
            data=save_chats(folder / "train.jsonl", 5),
            training={"max_steps": 3, "batch_size": 3, "learning_rate": 5e-3, "max_length": 64},
            checkpoint={"save_steps": 2},
        )
        RunDir(whole / name).write("spec.json", spec)
        for work_of in (whole, cut):
            give_tokens(RunDir(work_of / name), spec)
    run_on_ranks(attempts, 2, str(whole), list(folders), 1, None, timeout=1700)
    for name in folders:
        done = RunDir(whole / name)
        run = RunDir(cut / name)
        shutil.copytree(done.path("attempts"), run.path("attempts"))
        shutil.copytree(done.path("checkpoints/step-2-a1"), run.path("checkpoints/step-2-a1"))
        shutil.copy(done.path("spec.json"), run.path("spec.json"))
    run_on_ranks(attempts, 2, str(cut), list(folders), 2, "step-2-a1", timeout=1700)
    return {
        name: _same(adapter(RunDir(whole / name)), adapter(RunDir(cut / name))) for name in folders
    }


def attempts(
    rank: int, world: int, root: str, names: Iterable[str], attempt: int, checkpoint: str | None
) -> None:
    for name in names:
        run = RunDir(Path(root) / name)
        if rank == 0:
            start = Start(
                job_id="ftjob-test",
                attempt=attempt,
                world_size=world,
                generation=1,
                checkpoint=checkpoint,
            )
            run.write(f"attempts/{attempt}/start.json", start)
        torch.distributed.barrier()
        with REREAD_BY_PEFT, _naming(name):
            outcome = attempt_on_rank(rank, world, str(run.root), attempt)
            assert outcome.kind == "succeeded", outcome


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )
