from __future__ import annotations

import pytest

from ft_service.convert.conversions import batch_size
from ft_service.convert.recognition import TRAINERS
from ft_service.convert.rules import load_table
from ft_service.convert.verdicts import Source, Taken
from ft_service.errors import SpecError
from ft_service.spec import (
    JobRequest,
    parse_request,
)
from ft_service.spec.name_suggestions import NAMES, VALUES, name_for, options_of
from ft_service.sweeps.search_space import parse_sweep

BODY = {"model": "tiny", "training_file": "file-1"}
RULES = {name: rule for table in map(load_table, TRAINERS) for name, rule in table.rules.items()}
WANDB = {"type": "wandb", "wandb": {"project": "p"}}
SAMPLES = (8, 0.5, True, "4", "cosine", "bf16", "x")


def taken_by(name: str) -> set[str]:
    """The options of ours that converting takes a name of another tool as, whatever its value."""
    rule = RULES.get(name)
    if rule is batch_size:  # a product of several, and each of them has its own name
        return set()
    verdicts = [rule(value, Source({name: value})) for value in SAMPLES] if rule else []
    return {
        option for verdict in verdicts if isinstance(verdict, Taken) for option in verdict.options
    }


def test_names_and_values_of_other_tools_stand_for_options_that_there_are() -> None:
    assert not set(NAMES.values()) - set(options_of(JobRequest))
    choices = {
        "bf16",
        "fp8",
        "nf4",
        "fp32",
        "adamw_torch",
        "adamw_8bit",
        "cosine",
        "constant",
        "all-linear",
        "supervised",
    }
    choices |= {"warmup_stable_decay", "reinforcement"}
    assert set(VALUES.values()) == choices


def test_what_converting_takes_over_is_what_a_refusal_recommends() -> None:
    plain = {name: taken_by(name) for name in RULES if "." not in name and "*" not in name}
    one = {name: next(iter(options)) for name, options in plain.items() if len(options) == 1}
    assert len(one) > 40
    hinted = {name: name_for(name, JobRequest) for name in one}
    assert {
        name: (hinted[name], option) for name, option in one.items() if hinted[name] != option
    } == {}
    assert [
        name
        for name, option in NAMES.items()
        if len(taken_by(name)) == 1 and option not in taken_by(name)
    ] == []


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"lora": {"rank": 8}}, "lora.rank: there is no such option; did you mean lora.r?"),
        ({"num_train_epochs": 3}, "num_train_epochs: there is no such option; did you mean "
        "training.n_epochs?"),
        ({"batch_size": 3}, "batch_size: there is no such option; did you mean "
        "training.batch_size?"),
        ({"training": {"optm": 3}}, "training.optm: there is no such option; did you mean "
        "training.optim?"),
        ({"training": {"beta2": 0.95}}, "training.beta2: there is no such option; did you mean "
        "training.adam_beta2?"),
        ({"adam_epsilon": 1e-6}, "adam_epsilon: there is no such option; did you mean "
        "training.adam_epsilon?"),
        ({"trainng": {}}, "trainng: there is no such option; did you mean training?"),
        ({"training": {"fp16": True}}, "training.fp16: there is no such option; did you mean "
        "precision.compute?"),
        ({"training": {"optim": "paged_adamw_8bit"}}, "training.optim = 'paged_adamw_8bit': must "
        "be adamw_torch or adamw_8bit; did you mean adamw_8bit?"),
        ({"qux": 1}, "qux: there is no such option. Check its spelling, or leave it out."),
        ({"precision": {"compute": "float32"}}, "precision.compute = 'float32': must be bf16 or "
        "fp32; did you mean fp32?"),
        ({"distributed": {"nproc_per_node": "all"}}, "distributed.nproc_per_node = 'all': must be "
        "a whole number or auto."),
        ({"lora": {"target_modules": 5}}, "lora.target_modules = 5: must be text, a list or "
        "all-linear."),
    ],
)  # fmt: skip
def test_a_refusal_names_what_was_likely_meant(more: dict[str, object], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_request(BODY | more)
    assert caught.value.message == says


@pytest.mark.parametrize(
    ("more", "meant"),
    [
        (
            {"training": {"assistant_only_loss": True}},
            "there is no such option; did you mean training.train_on?",
        ),
        ({"training": {"lr_scheduler_type": "wsd"}}, "did you mean warmup_stable_decay?"),
        ({"method": {"type": "grpo"}}, "did you mean reinforcement?"),
        ({"method": {"type": "cpo"}}, "use simpo or orpo, which need no reference either."),
        ({"method": {"type": "ppo"}}, "use reinforcement, which is GRPO."),
    ],
)
def test_what_other_tools_have_is_refused_with_what_to_use_here(
    more: dict[str, object], meant: str
) -> None:
    with pytest.raises(SpecError) as caught:
        parse_request(BODY | more)
    assert meant in caught.value.message


def test_an_unknown_key_of_a_list_s_entry_is_not_taken_for_an_option_elsewhere() -> None:
    prompt = {"prompt": "a", "referense": "b", "data": 1}
    with pytest.raises(SpecError) as caught:
        parse_request(
            BODY | {"integrations": [{**WANDB, "name": "a"}], "evaluation": {"prompts": [prompt]}}
        )
    assert sorted(caught.value.message.splitlines()[1:]) == [
        "evaluation.prompts.0.data: there is no such option. Check its spelling, or leave it out.",
        "evaluation.prompts.0.referense: there is no such option; did you mean "
        "evaluation.prompts.0.reference?",
        "integrations.0.name: there is no such option. Check its spelling, or leave it out.",
    ]
    assert name_for("loraa.r", JobRequest) == "lora.r", (
        "of a section that there is not, the option is named"
    )


def test_what_this_version_cannot_do_is_told_together_with_the_other_faults() -> None:
    with pytest.raises(SpecError) as caught:
        parse_request(
            {
                "model": "tiny",
                "lora": {"trainable_token_indices": [5], "r": 0},
                "method": {"type": "tinker"},
            }
        )
    assert [line.split(" ")[0] for line in caught.value.message.splitlines()] == [
        *("4", "training_file", "lora.trainable_token_indices", "method.type", "lora.r"),
    ]
    assert (caught.value.param, caught.value.code) == (
        "training_file",
        "missing_required_parameter",
    )


@pytest.mark.parametrize(
    ("name", "meant"), [("rr", "r"), ("dropuot", "lora_dropout"), ("alpha", "lora_alpha")]
)
def test_a_short_name_and_one_without_its_prefix_are_guessed(name: str, meant: str) -> None:
    with pytest.raises(SpecError, match=f"did you mean lora.{meant}[?]"):
        parse_request({**BODY, "lora": {name: 1}})
    with pytest.raises(SpecError, match=f"sweep.lora.{name}: .* did you mean lora.{meant}[?]"):
        parse_sweep({**BODY, "validation_split": 0.5, "sweep": {f"lora.{name}": [1, 2]}})
