"""What a watch of adapters says of what has changed where, and after which step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ft_service.spec import TrainingOptions
from workers.job.training_state import JobState
from workers.ranks.runtime import TrainingError
from workers.training import guards
from workers.training.guards import AdapterWatch, check_step, checksum, positions_of
from workers.training.step import Sums

NAME = "base_model.model.layers.{}.lora_B.default.weight"
WHOLE = "base_model.model.lm_head.weight"
ALL, SOME, NOWHERE, NOT_HELD = (2, 2), (1, 2), (0, 2), (0, 0)
"""Ranks on which it has changed, of those that hold rows."""


def watched(
    adapters: int, whole: int = 0, embedded: Any = None
) -> tuple[AdapterWatch, list[str], JobState]:
    names = [*map(NAME.format, range(adapters)), *[WHOLE] * whole]
    told: list[str] = []
    parameters = {name: nn.Parameter(torch.zeros(2)) for name in names}
    job = JobState(parameters, TrainingOptions())
    return AdapterWatch(job, told.append, embedded), told, job


@pytest.mark.parametrize(
    ("whole", "steps", "says"),
    [
        (0, [[ALL, ALL]], (1, "")),
        (
            0,
            [[ALL, NOT_HELD]],
            (1, "of 1 modules get no gradient and stay as they were: layers.1."),
        ),
        (0, [[ALL, NOWHERE]], (1, "of 1 modules get no gradient and stay as they were: layers.1.")),
        (
            0,
            [[ALL, *[NOWHERE] * 3]],
            (
                1,
                "of 3 modules get no gradient and stay as they were: layers.1, layers.2, layers.3.",
            ),
        ),
        (0, [[ALL, *[NOWHERE] * 5]], (1, "layers.1, layers.2, layers.3 and 2 more. Leave")),
        (0, [[SOME, ALL], [ALL, ALL]], (2, "")),
        (0, [[NOWHERE, NOWHERE], [NOWHERE, NOWHERE], [ALL, ALL]], (3, "")),
        (0, [[NOWHERE, NOWHERE]] * 3, (3, "Nothing of lora_B has changed in 3")),
        (
            0,
            [[ALL, SOME]] * 3,
            (
                3,
                "1 parameters are trained on some ranks only, the first: of the lora_B of layers.1 ",
            ),
        ),
        (0, [[SOME, SOME]] * 3, (3, "2 parameters are trained on some ranks only, the first")),
        (1, [[ALL, ALL, ALL]], (1, "")),
        (1, [[ALL, ALL, NOWHERE], [ALL, ALL, ALL]], (2, "")),
        (1, [[ALL, ALL, NOWHERE]] * 3, (3, "Nothing of lm_head.weight (lora.modules_to_save)")),
        (
            1,
            [[ALL, ALL, SOME]] * 3,
            (3, "lm_head.weight (lora.modules_to_save) the rows on 1 of 2 ranks"),
        ),
        (1, [[ALL, SOME, NOWHERE]] * 3, (3, "1 parameters are trained on some ranks only")),
    ],
)
def test_a_watch_waits_for_what_may_still_change_and_names_what_did_not(
    whole: int,
    steps: list[list[tuple[int, int]]],
    says: tuple[int, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[bool] = []
    embedded: Any = SimpleNamespace(close=lambda: closed.append(True))
    watch, told, _ = watched(len(steps[0]) - whole, whole, embedded)
    given = iter(steps)
    asked: list[int] = []

    def ranks(self: AdapterWatch) -> Any:
        asked.append(1)
        return [guards._Ranks(*counts) for counts in next(given)]

    monkeypatch.setattr(AdapterWatch, "_ranks", ranks)
    error = ""
    for rate in (0.0, 0.1, 0.0, 0.1, 0.1, 0.1, 0.1):
        try:
            watch.after_step(rate)
        except TrainingError as raised:
            error = raised.message
            break
    assert (len(asked), bool(closed)) == (says[0], True)
    text = "".join([*told, error])
    assert (says[1] in text) if says[1] else text == ""


@pytest.mark.parametrize(("reached", "moved"), [(True, False), (False, False), (False, True)])
def test_rows_of_an_embedding_count_where_a_gradient_came_or_they_moved(
    reached: bool, moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[Any] = []
    monkeypatch.setattr(
        guards.dist, "all_reduce", lambda counts: counted.append(counts.clone()) or counts.mul_(2)
    )
    asked: list[Any] = []
    embedded: Any = SimpleNamespace(name=WHOLE, reached=lambda own: asked.append(own) or reached)
    watch, _, job = watched(2, 1, embedded)
    job.parameters[NAME.format(1)].data += 1
    if moved:
        job.parameters[WHOLE].data += 1
        job.optimizer.first_moment(WHOLE).add_(1)
    found = watch._ranks()
    holds = int(reached or moved)
    assert [counts.tolist() for counts in counted] == [[[0, 1, int(moved)], [1, 1, holds]]]
    assert [(own.changed, own.holding) for own in found] == [(0, 2), (2, 2), (2 * moved, 2 * holds)]
    assert asked == [job.parameters[WHOLE]]
    assert counted[0].dtype == torch.int32


@pytest.mark.parametrize(
    ("data", "sum_"),
    [
        ([], 0),
        ([5], 5),
        ([0, 1], 256),
        ([0, 0, 0, 0, 0, 0, 0, 0, 7], 3 * 7),
        ([1] + [0] * 7 + [1] + [0] * 7 + [1], 1 + 3 + 5),
    ],
)
def test_a_checksum_weighs_eight_bytes_by_the_odd_numbers(
    data: list[int], sum_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chunk in (1 << 22, 1, 2):
        monkeypatch.setattr(guards, "_CHUNK", chunk)
        assert checksum(torch.tensor(data, dtype=torch.uint8)) == sum_
    large = torch.tensor([-1, -1], dtype=torch.int64)
    assert checksum(nn.Parameter(large.view(torch.float64))) == -4


@pytest.mark.parametrize(("rows", "cuts"), [(5, [[0, 3], [3, 5]]), (2, [[0, 1], [1, 2]])])
def test_checksums_of_gathered_rows_are_by_the_ranks_that_hold_them(
    rows: int, cuts: list[list[int]]
) -> None:
    weight = torch.arange(1, 2 * rows + 1, dtype=torch.int64).view(rows, 2)
    expected = [[checksum(weight[begin:end])] for begin, end in cuts]
    assert guards._checksums_by_rows(weight, 2) == expected


@pytest.mark.parametrize(
    ("given", "positions"), [(64, 64), (None, None), ("absent", None), ([3], None)]
)
def test_positions_are_those_of_the_config_and_of_other_embeddings_than_the_tokens(
    given: Any, positions: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "causal_model", lambda model: model)
    values = {} if given == "absent" else {"max_position_embeddings": given}
    model: Any = nn.ModuleDict({"tokens": nn.Embedding(9, 2), "places": nn.Embedding(5, 2)})
    model["more"] = nn.Linear(2, 2)
    model.config = SimpleNamespace(**values)
    model.get_input_embeddings = lambda: model["tokens"]
    assert positions_of(model) == (positions, {"places.weight": 5})


@pytest.mark.parametrize(
    ("sums", "norm", "what"),
    [
        (Sums(float("nan"), 0, 4), float("nan"), "the loss was not"),
        (Sums(float("-inf"), 0, 4), 1.0, "the loss was not"),
        (Sums(1.0, 0, 4), float("nan"), "the gradient norm was not"),
    ],
)
def test_a_number_that_is_not_finite_is_named(sums: Sums, norm: float, what: str) -> None:
    with pytest.raises(TrainingError, match=what):
        check_step(9, sums, norm)
