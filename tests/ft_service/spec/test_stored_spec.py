"""Specs as the store holds them: parsed when they are asked for, once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ft_service.errors import OtherVersionError
from ft_service.spec import (
    DpoOptions,
    JobSpec,
    KtoOptions,
    OrpoOptions,
    PrecisionOptions,
    StoredSpec,
    inherit,
    parse_request,
)
from tests.support.reconciling import spec_of
from tests.support.records import new_job

WEIGHTS: dict[str, Any] = {"desirable_weight": 1.0, "undesirable_weight": 2.0}
DOCUMENT: dict[str, Any] = spec_of("ftjob-1").model_dump(mode="json")


def test_a_stored_spec_is_parsed_once_for_all_copies_of_its_job() -> None:
    job = new_job(stored_spec=StoredSpec(DOCUMENT))
    assert job.spec == spec_of("ftjob-1")
    assert replace(job, attempt=2).spec is job.spec


def test_a_spec_that_is_there_is_not_parsed_again() -> None:
    spec = spec_of("ftjob-1")
    stored = StoredSpec.of(spec)
    assert stored.parsed is spec
    assert stored == StoredSpec(DOCUMENT)


def test_specs_of_other_versions_are_read() -> None:
    """Sections that came later are missing, and what was dropped outside of them is still there."""
    older = {name: value for name, value in DOCUMENT.items() if name != "parent"} | {"dropped": 1}
    assert StoredSpec(older).parsed == spec_of("ftjob-1")
    lora = {name: value for name, value in DOCUMENT["lora"].items() if name != "use_rslora"}
    assert StoredSpec({**DOCUMENT, "lora": lora}).parsed.lora == spec_of("ftjob-1").lora
    training = {
        name: value for name, value in DOCUMENT["training"].items() if not name.startswith("adam_")
    }
    read = StoredSpec({**DOCUMENT, "training": training}).parsed.training
    assert (read.adam_beta1, read.adam_beta2, read.adam_epsilon) == (0.9, 0.999, 1e-8), (
        "what every job had"
    )


def test_a_loss_is_one_value_and_pairs_of_version_0_2_are_read() -> None:
    older = {key: value for key, value in DOCUMENT.items() if key != "loss"}
    options = {"beta": 0.2, "loss_type": "ipo", "rpo_alpha": None}
    read = StoredSpec({**older, "dpo": options}).parsed
    assert read.loss == DpoOptions(beta=0.2, loss_type="ipo")
    assert (read.method, read.has_reference) == ("dpo", True)
    assert StoredSpec({**older, "dpo": None}).parsed == spec_of("ftjob-1")
    for loss in (read.loss, KtoOptions(beta=1, loss_type="kto", **WEIGHTS), OrpoOptions(beta=1)):
        for planned in (False, True):
            spec = spec_of("ftjob-1").model_copy(update={"loss": loss})
            again = StoredSpec(StoredSpec.of(spec, planned=planned).document).parsed.loss
            assert again == loss
    later = StoredSpec({**older, "loss": {"type": "orpo", "beta": 1, "dropped": 1}})
    assert later.unknown == ["loss.dropped"]


def test_a_job_whose_spec_cannot_be_read_still_has_its_names() -> None:
    job = new_job(stored_spec=StoredSpec({**DOCUMENT, "lora": {**DOCUMENT["lora"], "dropped": 1}}))
    assert (str(job.tuned_name), job.base) == ("ft:tiny:local::ftjob-1", "tiny")
    with pytest.raises(OtherVersionError, match=r"lora\.dropped"):
        _ = job.spec


def test_what_the_document_says_is_what_the_object_says() -> None:
    read = JobSpec.model_validate(DOCUMENT)
    assert read.model_dump() == spec_of("ftjob-1").model_dump()


def test_a_job_on_a_tuned_model_keeps_its_format_where_that_is_left_to_be_chosen() -> None:
    parent = spec_of("ftjob-1")
    parent = parent.model_copy(
        update={"precision": parent.precision.model_copy(update={"default": "nf4"})}
    )
    body = {
        "model": "ft:x",
        "training_file": "f",
        "precision": {"default": "auto", "compute": "fp32"},
    }
    assert inherit(parse_request(body), parent, "ft:x").precision.model_dump(
        exclude_defaults=True
    ) == {
        "default": "nf4",
        "compute": "fp32",
    }


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (
            {"compute": "fp32"},
            {"default": "nf4", "overrides": {".*down_proj": "bf16"}, "compute": "fp32"},
        ),
        (
            {"compare_served": "off"},
            {"default": "nf4", "overrides": {".*down_proj": "bf16"}, "compare_served": "off"},
        ),
        ({"default": "fp8"}, {"default": "fp8"}),
        (
            {"overrides": {".*q_proj": "bf16"}},
            {"default": "nf4", "overrides": {".*q_proj": "bf16"}},
        ),
    ],
)
def test_a_job_on_a_tuned_model_keeps_of_its_precision_what_it_does_not_give(
    given: dict[str, Any], kept: dict[str, Any]
) -> None:
    parent = spec_of("ftjob-1")
    precision = PrecisionOptions(default="nf4", overrides={".*down_proj": "bf16"})
    body = {"model": "ft:x", "training_file": "f", "precision": given}
    goes_on = inherit(
        parse_request(body), parent.model_copy(update={"precision": precision}), "ft:x"
    )
    assert goes_on.precision.model_dump(exclude_defaults=True) == kept
