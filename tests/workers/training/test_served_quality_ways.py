"""Which ways of serving are compared, by which model and limits; and what merging makes of rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ft_service.data.answer_format import Answer
from ft_service.rundir.evaluations import ADAPTER_ON_BF16, AS_TRAINED, MERGED
from tests.support.training.models import spec_for
from workers.training import served_quality
from workers.training.served_quality import Comparison, TimeBudget, merged_in_place

CPU = torch.device("cpu")
NOTHING: Any = None


@pytest.mark.parametrize(
    ("formats", "shares", "lacking", "merges", "slow", "ways"),
    [
        ({"bf16"}, False, False, True, 0, [("own", AS_TRAINED), ("own", MERGED)]),
        ({"bf16"}, True, False, True, 0, [("own", AS_TRAINED), ("second", MERGED)]),
        ({"bf16"}, False, True, True, 0, [("own", AS_TRAINED), ("own", MERGED)]),
        ({"bf16"}, False, False, False, 0, [("own", AS_TRAINED)]),
        (
            *({"bf16", "nf4"}, False, False, True, 0),
            [("own", AS_TRAINED), ("second", ADAPTER_ON_BF16), ("second", MERGED)],
        ),
        (
            *({"nf4"}, False, False, True, 50),
            [("own", AS_TRAINED), ("second", ADAPTER_ON_BF16)],
        ),
        (
            *({"nf4"}, False, False, True, 40),
            [("own", AS_TRAINED), ("second", ADAPTER_ON_BF16), ("second", MERGED)],
        ),
        ({"nf4"}, False, True, True, 0, None),
        ({"bf16"}, True, True, True, 0, None),
        ({"nf4"}, False, False, True, 61, None),
    ],
)
def test_ways_are_compared_by_the_model_that_each_takes(
    formats: set[str],
    shares: bool,
    lacking: bool,
    merges: bool,
    slow: int,
    ways: list[tuple[str, str]] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In 120 seconds, of which each way takes `slow`, and reading the second model none."""
    now = [0.0]
    monkeypatch.setattr(served_quality.time, "monotonic", lambda: now[0])
    own, second = nn.Identity(), nn.Identity()
    names = {own: "own", second: "second"}
    told: list[Any] = []
    took: list[Any] = []
    merged: list[Any] = []
    spec = SimpleNamespace(precision=SimpleNamespace(compare_served="auto", served_as=None))
    context: Any = SimpleNamespace(
        runtime=SimpleNamespace(spec=spec, device=CPU),
        reporter=SimpleNamespace(message=lambda text, level="info": told.append((level, text))),
        limits="of the job",
    )
    monkeypatch.setattr(
        served_quality, "settle_limits", lambda model, spec, device, warn: warn("") or "of bf16"
    )
    monkeypatch.setattr(
        served_quality, "lacking_memory", lambda model, runtime: "No room." if lacking else None
    )

    @contextmanager
    def merge(model: Any) -> Iterator[bool]:
        merged.append(names[model])
        yield merges

    monkeypatch.setattr(served_quality, "merged_in_place", merge)

    class Measured(Comparison):
        def _loss(self, model: Any, items: Any, limits: Any) -> float:
            now[0] += slow
            took.append((names[model], limits, len(items)))
            return 1.0 + len(took)

        def _on_bf16(self) -> Any:
            now[0] += 500
            return second

        def _ask(self, model: Any, way: str, answers: Any, step: int, budget: Any) -> None:
            assert (step, budget.seconds) == (3, 120.0)
            answers[way] = [Answer(f"{names[model]} {way}")]

        def _scored(self, answers: Any) -> dict[str, float]:
            return {answers[0].whole: 1.0}

    built: Any = SimpleNamespace(
        loaded=None, peft_model=own, formats=dict(enumerate(sorted(formats)))
    )
    parts: Any = {"shares_base": shares, "job_seconds": 480.0}
    items: Any = range(100)
    found = Measured(context, built, NOTHING, items, NOTHING, construct=NOTHING, **parts).measured(
        3
    )
    if ways is None:
        (level, text), more = told[0], told[1:]
        assert (found, level, more, merged) == (None, "info", [], [])
        assert ("No room. `ft merge`" in text) if lacking else "on the base in bf16 and" in text
        return
    assert found is not None
    assert found.loss == {way: 2.0 + i for i, (_, way) in enumerate(ways)}
    limits = {AS_TRAINED: "of the job", MERGED: "of the job", ADAPTER_ON_BF16: "of bf16"}
    assert took == [(model, limits[way], 64) for model, way in ways]
    asked = {way: f"{model} {way}" for model, way in ways[1:]}
    assert found.answers == {way: [text] for way, text in asked.items()}
    assert found.metrics == {way: {text: 1.0} for way, text in asked.items()}
    assert (found.step, found.samples, found.bound) == (3, 64, served_quality.BOUND)
    left_out = [text for _, text in told if "was not measured" in text]
    assert len(left_out) == (slow == 50)
    assert sum(level == "warn" for level, _ in told) == len(ways) - 1
    assert all(" and " not in text.partition(" was ")[0] for text in left_out)


@pytest.mark.parametrize(
    ("asks", "said", "stopped", "told"),
    [
        (False, None, False, 0),
        (True, ["a"], False, 0),
        (True, None, False, 1),
        (True, None, True, 0),
    ],
)
def test_answers_of_a_way_are_kept_if_they_are_whole(
    asks: bool, said: Any, stopped: bool, told: int
) -> None:
    messages: list[str] = []
    asked: list[Any] = []
    evaluator: Any = SimpleNamespace(ask=lambda *given: asked.append(given) or said)
    context: Any = SimpleNamespace(
        stop=SimpleNamespace(is_requested=stopped),
        reporter=SimpleNamespace(message=messages.append),
    )
    of_job = Comparison(
        context, NOTHING, NOTHING, NOTHING, evaluator if asks else None, construct=NOTHING
    )
    answers: Any = {}
    model = nn.Identity()
    of_job._ask(model, MERGED, answers, 3, TimeBudget(100.0))
    assert (answers, len(messages)) == ({MERGED: said} if said else {}, told)
    assert [given[:2] for given in asked] == [(3, model)] * asks


@pytest.mark.parametrize("training", [True, False])
def test_a_loss_is_the_mean_at_rest_of_the_ways_own_micro_batches(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []
    limits: Any = SimpleNamespace(tokens=7)
    share = SimpleNamespace(batches=lambda objective, items: iter([(objective, items)]))
    seen: list[Any] = []

    def with_baseline(model: Any, valid: Any, items: Any, world: int, batches: Any) -> Any:
        return model.training, list(batches(valid, items))

    def evaluate(model: Any, batches: Any, world: int, loss_of: Any) -> torch.Tensor:
        seen.append((list(batches), world, loss_of, model.training))
        return torch.tensor([6.0, 1.0])

    monkeypatch.setattr(
        served_quality.RankShare, "of", lambda runtime, own: share if own is limits else None
    )
    monkeypatch.setattr(served_quality, "loss_with_baseline", with_baseline)
    monkeypatch.setattr(served_quality, "evaluate", evaluate)
    reporter = SimpleNamespace(heartbeat=lambda: alive.append(1))
    context: Any = SimpleNamespace(runtime=SimpleNamespace(world=2), reporter=reporter)
    valid: Any = SimpleNamespace(
        read=lambda sums, items: SimpleNamespace(mean_loss=sums[0] / len(items))
    )
    model = nn.Identity()
    model.train(training)
    own = Comparison(context, NOTHING, NOTHING, valid, None, construct=NOTHING)
    assert own._loss(model, [0, 1, 2], limits) == 2.0
    of_items = [(valid, [0, 1, 2])]
    assert seen == [(of_items, 2, (False, of_items), False)]
    assert (model.training, len(alive)) == (training, 2)


def test_a_second_model_is_the_job_on_a_whole_base_in_bf16_with_the_jobs_adapter() -> None:
    spec = spec_for(
        Path("none"),
        precision={"default": "nf4", "compute": "fp32"},
        training={"neftune_noise_alpha": 5.0},
        distributed={"activation_checkpointing": "full"},
    )
    made: list[Any] = []
    second = nn.Linear(3, 2, bias=False)

    def construct(changed: Any) -> Any:
        made.append(changed)
        return SimpleNamespace(peft_model=second)

    trained = torch.arange(6.0).view(2, 3)
    job: Any = SimpleNamespace(parameters={"weight": trained})
    context: Any = SimpleNamespace(runtime=SimpleNamespace(spec=spec))
    own = Comparison(context, NOTHING, job, NOTHING, None, construct=construct)
    assert own._on_bf16() is second
    assert torch.equal(second.weight, trained)
    (changed,) = made
    assert (changed.precision.default, changed.precision.compute) == ("bf16", "fp32")
    shared = changed.distributed
    assert (shared.replicate, shared.compile, shared.ignored) == (1, False, [])
    assert (shared.reshard_after_forward, shared.activation_checkpointing) == (True, "none")
    assert changed.training.neftune_noise_alpha is None
    assert changed.training.learning_rate == spec.training.learning_rate


class Adapted(nn.Module):
    """A linear layer with A = [1, 2] and B = [[3], [0]], scaled by 0.5."""

    def __init__(self, base: nn.Linear, *, dora: bool) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.active_adapters = ("default",)
        self.scaling = {"default": 0.5}
        for name, values in (("lora_A", [[1.0, 2.0]]), ("lora_B", [[3.0], [0.0]])):
            layer = nn.Linear(*reversed(torch.tensor(values).shape), bias=False)
            layer.weight = nn.Parameter(torch.tensor(values))
            self.add_module(name, nn.ModuleDict({"default": layer}))
        magnitude = {"default": nn.Parameter(torch.tensor([7.5, 4.0]))} if dora else {}
        self.lora_magnitude_vector = nn.ParameterDict(magnitude)

    @property
    def magnitude(self) -> nn.Parameter | None:
        return self.lora_magnitude_vector["default"] if self.lora_magnitude_vector else None


class Quantised(nn.Linear):
    """No plain layer."""


@pytest.mark.parametrize(
    ("kind", "dora", "beside", "merged"),
    [
        (nn.Linear, False, False, [[2.5, 4.0], [0.0, 2.0]]),
        (nn.Linear, True, False, [[3.97, 6.37], [0.0, 4.0]]),
        (Quantised, False, False, None),
        (nn.Linear, False, True, None),
    ],
)
def test_merged_rows_are_rounded_and_what_is_trained_whole_is_put_back(
    kind: type[nn.Linear],
    dora: bool,
    beside: bool,
    merged: list[list[float]] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`beside`: there is an adapter that is no linear layer's."""
    monkeypatch.setattr(served_quality, "LoraLinear", Adapted)
    base = kind(2, 2, bias=False)
    base.weight = nn.Parameter(torch.tensor([[1.0, 1.0], [0.0, 2.0]]))
    layer = Adapted(base, dora=dora)
    model: Any = nn.ModuleDict({"layer": layer, "head": nn.Linear(1, 1, bias=False)})
    head = model["head"].weight
    head.data.fill_(1.001)
    if beside:
        model["experts"] = nn.ModuleDict({"lora_A": nn.Linear(1, 1, bias=False)})
    with merged_in_place(model) as done:
        assert done is (merged is not None)
        rounded = torch.tensor(merged or [[1.0, 1.0], [0.0, 2.0]]).bfloat16().float()
        torch.testing.assert_close(base.weight.detach(), rounded, rtol=0.005, atol=0)
        assert torch.equal(base.weight, base.weight.bfloat16().float())
        assert head.item() == pytest.approx(1.0 if done else 1.001, abs=1e-6)
        assert layer.scaling["default"] == (0.0 if done else 0.5)
    assert head.item() == pytest.approx(1.001, abs=1e-6)


def test_a_gpu_has_what_is_free_and_what_torch_holds_without_using_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = {"mem_get_info": (100, 900), "memory_reserved": 50, "memory_allocated": 20}
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert served_quality._free_bytes(torch.device("cuda")) == 130
