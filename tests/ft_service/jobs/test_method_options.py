from __future__ import annotations

from typing import Any

import pytest

from ft_service.jobs.method_options import loss_measure, method_options


def dpo(**hyperparameters: Any) -> dict[str, Any]:
    return {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}, "supervised": None}


@pytest.mark.parametrize(
    ("method", "measure"),
    [
        ({}, "cross entropy"),
        (
            {"type": "supervised", "supervised": {"hyperparameters": {"batch_size": 4}}},
            "cross entropy",
        ),
        (dpo(beta=0.1, loss_type="sigmoid", rpo_alpha=None), "sigmoid of pairs (beta 0.1)"),
        (dpo(beta=0.1, loss_type="ipo", rpo_alpha=1.0), "ipo of pairs (beta 0.1, rpo_alpha 1)"),
        ({"type": "tinker"}, "the loss of tinker"),
        ({"type": "reinforcement", "reinforcement": {}}, None),
    ],
)
def test_losses_can_be_compared_where_they_measure_the_same(
    method: dict[str, Any], measure: str | None
) -> None:
    assert loss_measure(method) == measure


def test_a_method_is_shown_without_the_options_of_training() -> None:
    assert method_options({"type": "supervised"}) == {}
    assert method_options(dpo(beta=0.1, batch_size=4)) == {
        "method.type": "dpo",
        "method.dpo.hyperparameters.beta": 0.1,
    }


def test_losses_of_different_methods_on_pairs_are_not_compared() -> None:
    simpo = {"type": "simpo", "simpo": {"hyperparameters": {"beta": 2, "gamma": 1}}}
    orpo = {"type": "orpo", "orpo": {"hyperparameters": {"beta": 0.1}}}
    assert loss_measure(simpo) == "simpo of pairs (beta 2, gamma 1)"
    assert loss_measure(orpo) == "orpo of pairs (beta 0.1)"
    smoothed = dpo(beta=0.1, loss_type="robust", label_smoothing=0.2)
    assert loss_measure(smoothed) == "robust of pairs (beta 0.1, label_smoothing 0.2)"


def test_losses_of_labelled_answers_are_compared_with_the_same_weights_only() -> None:
    own = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.5}
    kto = {"type": "kto", "kto": {"hyperparameters": {"loss_type": "apo_zero_unpaired", **own}}}
    assert loss_measure(kto) == (
        "apo_zero_unpaired of labelled answers (beta 0.1, desirable_weight 1, "
        "undesirable_weight 1.5)"
    )


@pytest.mark.parametrize(
    ("own", "measure"),
    [
        ({}, "forward_kl from the base"),
        (
            {"teacher": "larger", "hyperparameters": {"loss_type": "jsd", "beta": 0.3}},
            "jsd from larger (beta 0.3)",
        ),
        ({"hyperparameters": {"loss_type": "jsd"}}, "jsd from the base"),
        ({"hyperparameters": {"beta": 0.3}, "top_k": 8}, "forward_kl from the base, 8 words"),
        ({"answers": "student"}, "forward_kl from the base on the student's answers"),
        ({"with_context": "Be brief."}, "forward_kl from the base behind 'Be brief.' (213c22ed)"),
    ],
)
def test_losses_from_teachers_are_compared_with_the_same_measure_only(
    own: dict[str, Any], measure: str
) -> None:
    assert loss_measure({"type": "distillation", "distillation": own}) == measure
