"""Values of "auto" options that affect results: they follow published rules and are chosen once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.plan.auto_options import Ranks, keep_choices
from ft_service.plan.machines import Machine, host_cpu
from ft_service.spec import (
    BaseModelRef,
    DataFileRef,
    JobContext,
    LoraOptions,
    parse_request,
    resolve,
)
from ft_service.spec.auto_hyperparameters import COUNTED, batch_for, epochs_for, rate_for
from tests.support.bases import settle_for
from tests.support.training.models import save_tiny_llama, spec_for

HOST = host_cpu()
UNKNOWN = Machine(name="elsewhere", memory=None, shared_memory=False)


@pytest.mark.parametrize(
    ("model_type", "hidden", "lora", "rate"),
    [
        ("llama", 4096, {}, 2.9e-4),
        ("llama", 2048, {"r": 64}, 4.9e-4),
        ("qwen3", 4096, {"r": 8}, 4.7e-4),
        ("gemma3_text", 2560, {}, 4.1e-4),
        ("llama", 4096, {"lora_alpha": 64}, 1.4e-4),
        ("llama", 4096, {"use_rslora": True, "lora_alpha": 8}, 2.9e-4),
        ("llama", 16, {}, 1e-2),
    ],
)
def test_rates_follow_the_published_rule(
    model_type: str, hidden: int, lora: dict[str, Any], rate: float
) -> None:
    found, why = rate_for(model_type, hidden, LoraOptions(**lora))
    assert found == pytest.approx(rate)
    assert str(hidden) in why
    assert ("none was measured for gemma3_text" in why) == (model_type == "gemma3_text")


@pytest.mark.parametrize(
    ("samples", "ranks", "batch"),
    [
        (0, 1, 4),
        (10, 1, 4),
        (2000, 1, 4),
        (4000, 1, 8),
        (5700, 1, 16),
        (8000, 1, 16),
        (COUNTED, 1, 32),
        (10, 8, 8),
        (COUNTED, 48, 48),
    ],
)
def test_batches_follow_from_the_number_of_samples(samples: int, ranks: int, batch: int) -> None:
    found, why = batch_for(samples, ranks)
    assert found == batch
    assert f"0.2 % of {samples:,} samples" in why
    assert ("one for each rank" in why) == (ranks > 1)


@pytest.mark.parametrize(
    ("samples", "epochs"),
    [
        (1, 25),
        (4, 25),
        (10, 10),
        (33, 3),
        (34, 3),
        (5000, 3),
        (8333, 3),
        (8334, 2),
        (20_000, 1),
        (COUNTED, 1),
    ],
)
def test_epochs_follow_from_the_number_of_samples(samples: int, epochs: int) -> None:
    assert epochs_for(samples, "supervised")[0] == epochs
    assert epochs_for(samples, "dpo")[0] == 1


def test_what_is_set_aside_is_a_share_of_all_samples() -> None:
    """Of a million samples, half or a tenth is more than what is counted."""
    model = BaseModelRef(name="m", path="/base")
    file = DataFileRef(name="f", path="/f", sha256="")
    context = JobContext(
        job_id="ftjob-1",
        organization="o",
        model=model,
        training_data=file,
        validation_data=None,
        seed=1,
        gpus=0,
    )
    auto = {"hyperparameters": {"n_epochs": "auto", "batch_size": "auto"}}
    for share, samples, chosen in (
        (0.5, 10**6, (1, 32)),
        (0.9, 10**6, (1, 32)),
        (0.5, 2000, (3, 4)),
        (None, 10**6, (1, 32)),
    ):
        request = parse_request(
            {"model": "m", "training_file": "f", **auto, "validation_split": share}
        )
        spec = resolve(request, replace(context, samples=samples))
        assert (spec.training.n_epochs, spec.training.batch_size) == chosen
        assert ("25,000 samples or more" in spec.chosen["training.n_epochs"]) == (samples == 10**6)


def test_batch_and_epochs_stay_what_they_were_where_the_job_goes_on() -> None:
    before = spec_for(Path("/base"), training={"batch_size": 16, "n_epochs": 2})
    before = before.model_copy(
        update={"chosen": {"training.batch_size": "by then", "training.n_epochs": "by then"}}
    )
    again = spec_for(Path("/base"), training={"batch_size": 8, "n_epochs": 3})
    given = keep_choices(again, before)
    assert (given.training.batch, given.training.epochs, given.chosen) == (8, 3, {}), (
        "now they are given"
    )
    chosen = keep_choices(again.model_copy(update={"chosen": before.chosen}), before)
    assert (chosen.training.batch, chosen.training.epochs, chosen.chosen) == (16, 2, before.chosen)


def test_a_rate_is_chosen_once_and_told(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path)
    spec = spec_for(model, training={"learning_rate": "auto"})
    settled = settle_for(spec, UNKNOWN).spec
    assert settled.training.rate == pytest.approx(7.4e-3)
    assert "LoRA Without Regret" in settled.chosen["training.learning_rate"]
    assert (
        settle_for(settled, HOST, ranks=Ranks(2, 1)).spec.training.rate == settled.training.rate
    ), "on other ranks too"
    assert keep_choices(spec, settled).training.rate == settled.training.rate
    assert "training.learning_rate" not in settle_for(spec_for(model), HOST).spec.chosen


def test_a_multiplier_left_to_the_service_is_a_rate_left_to_it() -> None:
    def rate(**more: Any) -> Any:
        return (
            parse_request({"model": "m", "training_file": "f", **more})
            .resolved_training()
            .learning_rate
        )

    auto: dict[str, Any] = {"learning_rate_multiplier": "auto"}
    assert rate() == 2e-4, "nothing is said"
    assert rate(hyperparameters=auto) == "auto"
    assert rate(method={"type": "supervised", "supervised": {"hyperparameters": auto}}) == "auto"
    assert rate(hyperparameters=auto, training={"learning_rate": 1e-3}) == 1e-3
    assert rate(method={"type": "dpo", "dpo": {"hyperparameters": auto}}) == 5e-6, (
        "no rule is published for pairs"
    )
    assert rate(method={"type": "dpo"}, training={"learning_rate": "auto"}) == 5e-6
