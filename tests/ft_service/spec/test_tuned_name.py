"""Names of tuned models: written and read, nothing lost."""

from __future__ import annotations

import pytest

from ft_service.spec import TunedName, is_tuned

NAME = "ft:tiny-llama:local:mine:1a2b"


@pytest.mark.parametrize(
    "name",
    [
        NAME,
        "ft:tiny-llama:local::1a2b",
        f"{NAME}:ckpt-step-40",
        "ft:tiny:q4_0:local:mine:1a2b",
        "ft:tiny:q4_0:local:mine:1a2b:ckpt-step-7",
    ],
)
def test_a_name_is_what_it_was_read_from(name: str) -> None:
    assert str(TunedName.parse(name)) == name


def test_the_parts_of_a_name() -> None:
    found = TunedName.parse("ft:tiny:q4_0:local:mine:1a2b:ckpt-step-7")
    assert found == TunedName("tiny:q4_0", "local", "mine", "1a2b", 7), (
        "a base's folder may have a colon in its name"
    )
    assert (found.job_id, str(found.outcome)) == ("ftjob-1a2b", "ft:tiny:q4_0:local:mine:1a2b")
    assert found.outcome.at(7) == found


@pytest.mark.parametrize(
    ("suffix", "shown"), [("mine", "ft:tiny:local:mine:1"), (None, "ft:tiny:local::1")]
)
def test_a_jobs_outcome_is_named_by_the_last_part_of_its_base(
    suffix: str | None, shown: str
) -> None:
    assert (
        str(TunedName.of_job("ftjob-1", base="meta/tiny", organization="local", suffix=suffix))
        == shown
    )


@pytest.mark.parametrize(
    "name", ["", "ft:", "tiny", "ft:a:b:c", "tiny:local:mine:1", "gpt:tiny:local:mine:1"]
)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="such a name is ft:<base>:<organisation>:<suffix>:<id>"):
        TunedName.parse(name)


@pytest.mark.parametrize("step", ["", "x", "-1", "1.5", "1234567890", "5:ckpt-step-5"])
def test_a_step_that_is_none_is_refused(step: str) -> None:
    with pytest.raises(ValueError, match="is no step"):
        TunedName.parse(f"{NAME}:ckpt-step-{step}")


def test_bases_have_other_names() -> None:
    assert is_tuned(NAME)
    assert is_tuned("ft:")
    assert not is_tuned("meta/tiny")
