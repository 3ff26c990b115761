"""What training for the form in which a model is served is worth: held-out loss of the sample task
as trained, and merged and rounded, with precision.served_as and without.

    python benchmarks/served_as.py [--seeds 7,8,9] [--rates 5e-4,4e-3] [--forms
    int4_g32,fp8,nvfp4,mxfp4,int8,8da4w] [--steps 60] [--batches 8,64] [--anew]

Trained are adapters of rank 16 on all linear layers of the sample base in bf16, computed in fp32,
by batches of 8 chats, with the layers of a job and a loop of its own, so that all runs share one
process. `merged` is the base with the adapter as `ft merge` writes it: of a plain adapter by the
best of thirteen scales a group, of one that was trained for the form by the scale that it was
trained with. A run takes about ten seconds on an idle core; at last steps of both kinds are timed
in turn. Each result is written as it comes; a second start continues after the last. Losses do not
depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path[:0] = [str(Path(__file__).parents[1])]

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoTokenizer

from benchmarks.machine import RESULTS, machine, save
from ft_service.spec import (
    SERVED_FORMS,
    BaseModelRef,
    DataFileRef,
    JobContext,
    JobSpec,
    parse_request,
    resolve,
)
from workers.base.load import adapters, load
from workers.layers.linear import LoraLinear
from workers.layers.segments import CURRENT
from workers.model.build import build
from workers.quant import mxfp4
from workers.quant.served_forms import Codes, rounded, served_inputs, to_int4, values_of

ROOT = Path(__file__).parent.parent
DATA = ROOT / "examples/data"
BASE = ROOT / "examples/models/tiny-llama"
BATCH = 8
WARMUP = 4
PAIRS = 7
"""Of steps that are timed."""
CPU = torch.device("cpu")
Sample = tuple[list[int], list[int]]
"""Ids, and targets with -100 where nothing is learned."""


@dataclass(frozen=True)
class Row:
    """One run."""

    trained_for: str
    """A form; `plain`: none."""
    rate: float
    seed: int
    as_trained: float
    """Held-out loss, nats."""
    merged: dict[str, float]
    """Form → held-out loss of what `ft merge` or `ft export` writes."""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", default="7,8,9")
    parser.add_argument("--rates", default="5e-4,4e-3")
    parser.add_argument("--forms", default="int4_g32,fp8,nvfp4,mxfp4,int8,8da4w")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batches", default="8,64", help="chats of the steps that are timed")
    parser.add_argument("--anew", action="store_true", help="ignore the results in the file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "served_as.json"
    before = json.loads(path.read_text()) if path.exists() and not given.anew else {}
    same = before.get("steps") == given.steps
    rows = [Row(**row) for row in before.get("runs", [])] if same else []
    costs = before.get("step_costs", []) if same else []
    where = before["machine"] if same else machine()
    train, held_out = (samples(DATA / f"{name}.jsonl") for name in ("train", "heldout"))
    forms = given.forms.split(",")
    for seed in map(int, given.seeds.split(",")):
        for rate in map(float, given.rates.split(",")):
            for form in ("plain", *forms):
                if any((row.trained_for, row.rate, row.seed) == (form, rate, seed) for row in rows):
                    continue
                row = run(form, rate, seed, given.steps, forms, train, held_out)
                print(row, flush=True)
                rows.append(row)
                store(where, given.steps, rows, costs)
    if given.batches:
        costs = step_costs(forms, list(map(int, given.batches.split(","))), train)
        store(where, given.steps, rows, costs)


def store(where: Any, steps: int, rows: list[Row], costs: list[dict[str, Any]]) -> None:
    """Write what is known so far."""
    about = {"machine": where, "steps": steps, "means": means(rows), "step_costs": costs}
    save("served_as", {**about, "runs": [asdict(row) for row in rows]})


def run(
    form: str,
    rate: float,
    seed: int,
    steps: int,
    forms: list[str],
    train: list[Sample],
    held_out: list[Sample],
) -> Row:
    """Train an adapter, and measure it."""
    model = _loaded(form, seed)
    trained = [parameter for _, parameter in adapters(model)]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(train), generator=generator).tolist()
    for step in range(steps):
        share = min((step + 1) / WARMUP, (steps - step) / steps)
        optimizer.param_groups[0]["lr"] = rate * share
        chosen = [train[order[(step * BATCH + i) % len(train)]] for i in range(BATCH)]
        loss_of(model, chosen).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    as_trained = mean_loss(model, held_out)
    if form != "plain":
        return Row(form, rate, seed, as_trained, {form: as_trained})
    bases = {
        layer: layer.base_layer.weight.detach().clone()  # pyright: ignore
        for layer in model.modules()
        if isinstance(layer, LoraLinear)
    }
    merged = {}
    for other in forms:
        merge(bases, other)
        hooks = [
            layer.register_forward_pre_hook(
                lambda _, given, other=other: (served_inputs(given[0], other), *given[1:])  # pyright: ignore
            )
            for layer in bases
        ]
        merged[other] = mean_loss(model, held_out)
        for hook in hooks:
            hook.remove()
    return Row(form, rate, seed, as_trained, merged)


@torch.no_grad()
def merge(bases: dict[LoraLinear, Any], form: str) -> None:
    """Put what `ft merge` writes of a plain adapter in place of each layer's base."""
    for layer, base in bases.items():
        a, b = (getattr(layer, name)["default"].weight for name in ("lora_A", "lora_B"))
        scale = layer.lora_alpha["default"] / layer.r["default"]
        rows = base.float() + scale * (b @ a)
        if form.startswith("int4"):
            codes = to_int4(rows, SERVED_FORMS[form].group)  # pyright: ignore
        elif form == "mxfp4":
            codes = Codes(*mxfp4.quantize(rows))
        else:
            codes = rounded(rows, form)  # pyright: ignore
        weight: Any = layer.base_layer.weight
        weight.data = values_of(*codes)
        layer.scaling["default"] = 0.0


def loss_of(model: nn.Module, chosen: list[Sample]) -> torch.Tensor:
    """The mean over the targets of padded samples."""
    CURRENT.use(None)
    length = max(len(ids) for ids, _ in chosen)
    ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in chosen])
    wanted = torch.tensor([own + [-100] * (length - len(own)) for _, own in chosen])
    logits = model(input_ids=ids).logits[:, :-1]  # padding comes last, and is seen by nothing
    return F.cross_entropy(logits.flatten(0, 1).float(), wanted[:, 1:].flatten())


@torch.no_grad()
def mean_loss(model: nn.Module, chosen: list[Sample]) -> float:
    """The loss over all targets, by batches."""
    total = 0.0
    count = 0
    for start in range(0, len(chosen), 25):
        some = chosen[start : start + 25]
        targets = sum(target >= 0 for _, own in some for target in own[1:])
        total += float(loss_of(model, some)) * targets
        count += targets
    return total / count


def spec_of(form: str, seed: int) -> JobSpec:
    precision = {"default": "bf16", "compute": "fp32"}
    body = {
        "model": "tiny-llama",
        "training_file": "train",
        "seed": seed,
        "lora": {"r": 16},
        "precision": precision if form == "plain" else {**precision, "served_as": form},
        "distributed": {"nproc_per_node": 1},
    }
    file = DataFileRef(name="train.jsonl", path=str(DATA / "train.jsonl"), sha256="0" * 64)
    context = JobContext(
        job_id="ftjob-benchmark",
        organization="local",
        model=BaseModelRef(name="tiny-llama", path=str(BASE)),
        training_data=file,
        validation_data=None,
        seed=seed,
        gpus=0,
    )
    return resolve(parse_request(body), context)


def samples(path: Path) -> list[Sample]:
    """The chats of a file; only the last answer is learned."""
    tokenizer: Any = AutoTokenizer.from_pretrained(BASE)
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        chat = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(
            chat[:-1], add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        answer = tokenizer(chat[-1]["content"], add_special_tokens=False)["input_ids"]
        answer = [*answer, tokenizer.eos_token_id]
        found.append((prompt + answer, [-100] * len(prompt) + answer))
    return found


def means(rows: list[Row]) -> list[dict[str, Any]]:
    """For each form and rate, the means over the seeds that all three have."""
    found = []
    keys = dict.fromkeys((row.rate, row.trained_for) for row in rows if row.trained_for != "plain")
    for rate, form in keys:
        own = {row.seed: row for row in rows if (row.rate, row.trained_for) == (rate, form)}
        plain = {
            row.seed: row
            for row in rows
            if (row.rate, row.trained_for) == (rate, "plain")
            and row.seed in own
            and form in row.merged
        }
        if not plain:
            continue
        as_trained, afterwards, served = (
            round(statistics.mean(values), 4)
            for values in (
                [row.as_trained for row in plain.values()],
                [row.merged[form] for row in plain.values()],
                [own[seed].as_trained for seed in plain],
            )
        )
        found.append(
            {
                "form": form,
                "rate": rate,
                "seeds": len(plain),
                "plain_as_trained": as_trained,
                "plain_merged": afterwards,
                "trained_for_it": served,
                "better_on_seeds": sum(
                    own[seed].as_trained < row.merged[form] for seed, row in plain.items()
                ),
            }
        )
    return found


def step_costs(forms: list[str], batches: list[int], train: list[Sample]) -> list[dict[str, Any]]:
    """Seconds of a step with rounding next to those without, by how many chats a step has: the
    median of pairs of steps, one of each in turn.
    """
    models = {form: _loaded(form, seed=7) for form in ("plain", *forms)}
    found = []
    for batch in batches:
        chosen = train[:batch]
        tokens = sum(len(ids) for ids, _ in chosen)
        for form in forms:
            pairs = [
                [_step_seconds(models[name], chosen) for name in ("plain", form)]
                for _ in range(PAIRS + 1)
            ]
            ratio = statistics.median(served / plain for plain, served in pairs[1:])
            found.append({"form": form, "tokens": tokens, "step_time": round(ratio, 3)})
            print(found[-1], flush=True)
    return found


def _loaded(form: str, seed: int) -> nn.Module:
    model = build(spec_of(form, seed), CPU).peft_model
    load(model, str(BASE), seed=seed, compute_dtype=torch.float32, device=CPU)
    return model


def _step_seconds(model: nn.Module, chosen: list[Sample]) -> float:
    began = time.perf_counter()
    loss_of(model, chosen).backward()
    seconds = time.perf_counter() - began
    model.zero_grad()
    return seconds


if __name__ == "__main__":
    main()
