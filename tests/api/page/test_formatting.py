"""Numbers, times and lengths in the page's notation. Pure."""

from __future__ import annotations

import pytest

from api.page import formatting


def test_the_row_of_a_job_that_is_over_is_made_again_once_it_is_called_otherwise() -> None:
    job = {"id": "ftjob-1", "status": "succeeded", "finished_at": 1, "phase": None, "name": None}
    before = formatting.row_key(job, [1.0], foreign=False)
    assert before is not None
    assert formatting.row_key(dict(job), [1.0], foreign=False) == before
    assert formatting.row_key(job | {"name": "refunds"}, [1.0], foreign=False) != before


def test_what_stands_between_backticks_is_code_and_the_rest_is_text() -> None:
    told = "No process moves jobs now: `ft serve` or `ft <x>` does."
    assert formatting.coded(told) == (
        "No process moves jobs now: <code>ft serve</code> or <code>ft &lt;x&gt;</code> does."
    )
    assert formatting.coded("<b> `alone") == "&lt;b&gt; `alone"


def test_numbers_and_times_in_few_characters() -> None:
    assert [
        formatting.number(value) for value in (None, 3, 1234567, 0.30001, 2e-4, 0.0, 123456.7)
    ] == [*(formatting.NONE, "3", "1,234,567", "0.3", "2e-4", "0", "123,457")]
    large = [
        formatting.number(value)
        for value in (3e301, -1.5e15, 10**400, 999_999_999_999_999, float("nan"), -float("inf"))
    ]
    assert large == ["3e301", "-1.5e15", "1e400", "999,999,999,999,999", "nan", "-inf"]
    assert [formatting.duration(seconds) for seconds in (0, 59, 60, 3725, 90_000)] == [
        "0 s",
        "59 s",
        "1 min",
        "1 h 2 min",
        "1 d 1 h",
    ]
    assert formatting.byte_text(3 * 1024**3) == "3.0 GiB"


def test_a_hundred_percent_is_the_last_step() -> None:
    for step, percent in ((0, 0), (30, 15), (199, 99), (200, 100)):
        assert (
            formatting.percent_done(
                {"status": "running", "progress": {"step": step, "total_steps": 200}}
            )
            == percent
        )
    assert (
        formatting.percent_done(
            {"status": "running", "progress": {"step": 9_999, "total_steps": 10_000}}
        )
        == 99
    )


def test_lengths_as_bars() -> None:
    bars = formatting.length_bars(
        [{"total": total, "learned": 5} for total in (10, 10, 40)] + [{"total": 0, "learned": 0}],
        most=4,
    )
    assert bars is not None
    assert [bar["count"] for bar in bars["bars"]] == [2, 0, 0, 1]
    assert (bars["longest"], bars["median"], bars["learned"]) == (40, 10, 0.25)
    assert formatting.length_bars([]) is None


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("500 MiB", 500 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        ("1,000", 1000),
        ("7 B", 7),
        ("7 MB", "7 MB"),
        ("many", "many"),
        ("inf", "inf"),
    ],
)
def test_bytes_are_read_as_they_are_written(text: str, count: int | str) -> None:
    assert formatting.byte_count(text) == count


def test_a_tuned_model_is_called_by_its_suffix_or_its_base() -> None:
    for name, title in (
        ("ft:tiny:local:mine:7T44", "mine"),
        ("ft:a:b:local:mine:7T44", "mine"),
        ("ft:tiny:local::7T44", "org/tiny"),
        ("other", "other"),
    ):
        assert formatting.model_title({"id": name, "root": "org/tiny"}) == title


def test_options_that_were_given_or_chosen_stand_apart_from_defaults() -> None:
    job = {
        "training": {"n_epochs": 3, "max_steps": 8, "learning_rate": 2e-4, "weight_decay": 0.0},
        **{"lora": {"r": 16}, "precision": {}, "distributed": {"nnodes": 1}},
        **{"checkpoint": {}, "evaluation": None},
        "chosen": {"training.learning_rate": "the usual rate of LoRA"},
    }
    found = formatting.options_of(job, {"training.n_epochs", "training.max_steps"})
    shown = [(one.name, one.given, one.chosen, one.replaced_by) for one in found.decided]
    assert shown == [
        ("training.n_epochs", True, "", "max_steps"),
        ("training.max_steps", True, "", ""),
        ("training.learning_rate", False, "the usual rate of LoRA", ""),
    ]
    rest = {section: [one.key for one in those] for section, those in found.rest.items()}
    assert rest == {"training": ["weight_decay"], "lora": ["r"], "distributed": ["nnodes"]}
