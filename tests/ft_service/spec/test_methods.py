from __future__ import annotations

from typing import Any

import pytest

from ft_service.errors import SpecError
from ft_service.spec import (
    LEARNING_RATE,
    DistillationOptions,
    DpoOptions,
    KtoOptions,
    OrpoOptions,
    SimpoOptions,
    parse_request,
)

BODY: dict[str, Any] = {"model": "tiny", "training_file": "file-1"}


def preferring(**hyperparameters: Any) -> dict[str, Any]:
    return {"method": {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}}


@pytest.mark.parametrize("place", ["hyperparameters", "method"])
def test_openai_hyperparameters_become_training_options(place: str) -> None:
    given = {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 0.5}
    change = {
        place: given
        if place == "hyperparameters"
        else {"type": "supervised", "supervised": {"hyperparameters": given}}
    }
    training = parse_request(BODY | change).resolved_training()
    assert (training.n_epochs, training.batch_size, training.learning_rate) == (
        2,
        4,
        0.5 * LEARNING_RATE,
    )


def test_preference_pairs_have_rates_and_epochs_of_their_own() -> None:
    request = parse_request({**BODY, **preferring()})
    assert request.method.loss_options() == DpoOptions(beta=0.1, loss_type="sigmoid")
    assert (request.resolved_training().learning_rate, request.resolved_training().n_epochs) == (
        5e-6,
        1,
    )
    request = parse_request(
        {**BODY, **preferring(learning_rate_multiplier=2, n_epochs=2, batch_size=4, beta="auto")}
    )
    training = request.resolved_training()
    assert (training.learning_rate, training.n_epochs, training.batch_size) == (1e-5, 2, 4)
    given = parse_request({**BODY, **preferring(), "training": {"learning_rate": 1e-3}})
    assert given.resolved_training().learning_rate == 1e-3
    lengths = parse_request(
        {**BODY, **preferring(loss_type="sigmoid_norm", rpo_alpha=1)}
    ).method.loss_options()
    assert lengths == DpoOptions(beta=5.0, loss_type="sigmoid_norm", rpo_alpha=1.0)
    assert parse_request(BODY).method.loss_options() is None


def test_a_section_of_another_method_is_refused() -> None:
    with pytest.raises(SpecError, match=r"method\.dpo is given and method\.type is 'supervised'"):
        parse_request({**BODY, "method": {"dpo": {"hyperparameters": {"beta": 0.1}}}})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "label_smoothing = 0.1 with loss_type"),
        ({"loss_type": "robust"}, "'robust' needs label_smoothing"),
        ({"label_smoothing": 0.5}, "label_smoothing"),
    ],
)
def test_smoothing_that_no_loss_reads_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        parse_request({**BODY, **preferring(**given)})


def test_methods_without_reference_have_options_rates_and_epochs_of_their_own() -> None:
    request = parse_request({**BODY, "method": {"type": "simpo"}})
    assert request.method.loss_options() == SimpoOptions(beta=2.0, gamma=1.0)
    assert request.resolved_training().learning_rate == 5e-6
    orpo = {"type": "orpo", "orpo": {"hyperparameters": {"beta": 0.3}}}
    request = parse_request({**BODY, "method": orpo})
    assert request.method.loss_options() == OrpoOptions(beta=0.3)
    training = request.resolved_training()
    assert (training.learning_rate, training.n_epochs) == (5e-5, 1)
    with pytest.raises(SpecError, match=r"method\.dpo is given and method\.type is 'orpo'"):
        parse_request({**BODY, "method": {"type": "orpo", "dpo": {}}})
    with pytest.raises(SpecError, match="with method simpo: only the answers"):
        parse_request({**BODY, "method": {"type": "simpo"}, "training": {"train_on": "everything"}})


def test_kto_has_its_papers_options_and_learns_answers_alone() -> None:
    request = parse_request({**BODY, "method": {"type": "kto"}})
    assert request.method.loss_options() == KtoOptions(
        beta=0.1, loss_type="kto", desirable_weight=1.0, undesirable_weight=1.0
    )
    assert request.resolved_training().learning_rate == 5e-6
    with pytest.raises(SpecError, match="with method kto: only the answers"):
        parse_request({**BODY, "method": {"type": "kto"}, "training": {"train_on": "everything"}})
    weightless = {"type": "kto", "kto": {"hyperparameters": {"undesirable_weight": 0}}}
    with pytest.raises(SpecError, match=r"method\.kto\.hyperparameters\.undesirable_weight"):
        parse_request({**BODY, "method": weightless})


def teaching(**section: Any) -> dict[str, Any]:
    return {**BODY, "method": {"type": "distillation", "distillation": section}}


def test_distillation_has_the_options_and_rates_of_supervised_training() -> None:
    request = parse_request(teaching(with_context="Be brief."))
    assert request.method.loss_options() == DistillationOptions(
        loss_type="forward_kl", beta=0.5, with_context="Be brief."
    )
    training = request.resolved_training()
    assert (training.n_epochs, training.learning_rate) == (3, LEARNING_RATE)
    given = {"loss_type": "jsd", "beta": 0.1, "learning_rate_multiplier": 2}
    request = parse_request(teaching(with_context="Be brief.", hyperparameters=given))
    assert request.method.loss_options() == DistillationOptions(
        loss_type="jsd", beta=0.1, with_context="Be brief."
    )
    assert request.resolved_training().learning_rate == 2 * LEARNING_RATE


def test_a_student_that_answers_samples_as_in_reinforcement_learning() -> None:
    given = {"num_generations": 3, "max_completion_length": 16}
    method = parse_request(
        teaching(teacher="t", answers="student", top_k=20, hyperparameters=given)
    ).method
    assert method.loss_options() == DistillationOptions(
        loss_type="reverse_kl", beta=0.5, with_context="", top_k=20
    )
    sampling = method.reinforcement_options()
    assert sampling is not None
    assert (sampling.num_generations, sampling.max_completion_length) == (3, 16)
    assert (sampling.temperature, sampling.grader, sampling.beta) == (1.0, None, 0.0)
    behind = parse_request(teaching(with_context="Be brief.", answers="student")).method
    assert behind.loss_options() == DistillationOptions(
        loss_type="reverse_kl", beta=0.5, with_context="Be brief."
    )
    assert behind.samples_answers
    by_file = parse_request(teaching(teacher="t")).method
    assert (by_file.samples_answers, by_file.reinforcement_options()) == (False, None)


@pytest.mark.parametrize(
    ("section", "more", "says"),
    [
        ({}, {}, "give method.distillation.teacher"),
        ({"with_context": "x", "top_k": 0}, {}, "top_k"),
        (
            {"with_context": "x", "hyperparameters": {"temperature": 0.7}},
            {},
            "hyperparameters.temperature = 0.7 with answers = 'data'",
        ),
        (
            {"teacher": "y", "answers": "student"},
            {"validation_file": "file-2"},
            "validation_file with distillation with answers = 'student'",
        ),
        (
            {"teacher": "y", "answers": "student"},
            {"lora": {"lora_dropout": 0.1}},
            "lora.lora_dropout with distillation with answers = 'student'",
        ),
        (
            {
                "teacher": "y",
                "answers": "student",
                "hyperparameters": {"max_completion_length": 9000},
            },
            {},
            "method.distillation.hyperparameters.max_completion_length = 9000",
        ),
        ({"teacher": "y", "teacher_at": "server"}, {}, "with answers = 'data'"),
        (
            {"answers": "student", "teacher_at": "server", "top_k": 3},
            {},
            "'server' without teacher",
        ),
        *(
            ({"teacher": "y", "answers": "student", "teacher_at": "server", **top}, {}, says)
            for top, says in (
                ({}, "top_k = None with teacher_at = 'server'"),
                ({"top_k": 21}, "Give 1 to 20, and start vLLM with --max-logprobs"),
            )
        ),
        ({"with_context": "x", "hyperparameters": {"beta": 0.5}}, {}, "only jsd reads it"),
        (
            {"with_context": "x"},
            {"training": {"train_on": "everything"}},
            "with method distillation: only the answers",
        ),
        (
            {"with_context": "x"},
            {"lora": {"modules_to_save": ["lm_head"]}},
            "lora.modules_to_save with method.type = 'distillation'",
        ),
        (
            {"with_context": "x"},
            {"precision": {"default": "bf16", "served_as": "int4_g32"}},
            "precision.served_as with method.type = 'distillation'",
        ),
    ],
)
def test_what_cannot_be_distilled_is_refused_by_name(
    section: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError) as refused:
        parse_request({**teaching(**section), **more})
    assert says in str(refused.value)
