"""Parts of a probe with a picture, on a model whose chances are known."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ft_service.data.sample_kinds import IMAGE
from ft_service.data.tokens.sample import ImageUse, Picture, Tokens
from tests.support.training.looked_up import LookedUp, log_of
from workers.training import pictured_probe as module
from workers.training.pictured_probe import AskedChat, _Reconstruction, pictured_probe

FIRST, SECOND = Picture.of(b"first"), Picture.of(b"second")


def chat_of(count: int, *ends: int) -> AskedChat:
    """So many tokens, with pictures that end there."""
    uses = tuple(ImageUse(end - 1, end, FIRST) for end in ends)
    ids = np.arange(count, dtype=np.int32) % 4
    return AskedChat([{"role": "user"}], Tokens(ids, ids > 9, images=uses))


@pytest.mark.parametrize(
    ("count", "ends", "behind"), [(9, (2, 5), 4), (64, (1,), 63), (99, (5,), 64), (99, (40,), 59)]
)
def test_the_last_tokens_are_asked_about_and_none_of_a_picture(
    count: int, ends: tuple[int, ...], behind: int
) -> None:
    own = chat_of(count, *ends)
    assert own.behind == own.whole.ids[count - behind :].tolist()


@pytest.mark.parametrize("known", [True, False])
def test_a_probe_has_the_log_probabilities_behind_the_picture_tuned_and_of_the_base(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens 0 1 2 3 0, with a picture on the first two: of 3 behind 2, and 0 behind 3."""
    asked = AskedChat([{"role": "user"}], chat_of(5, 2).whole)
    given: list[Any] = []
    freed: list[Any] = []
    monkeypatch.setattr(
        module, "asked_with_pictures", lambda *own: given.append(own) or (asked if known else None)
    )
    bare = Tokens(asked.whole.ids, asked.whole.targets)
    make = module.make_batch
    monkeypatch.setattr(
        module, "make_batch", lambda samples, *own, **how: make([bare], *own, **how)
    )
    monkeypatch.setattr(module, "reshard", freed.append)

    @contextmanager
    def without(model: LookedUp) -> Iterator[None]:
        kept = model.table.data
        model.table.data = torch.full((4, 4), 0.25).log()
        yield
        model.table.data = kept

    monkeypatch.setattr(module, "without_adapter", without)
    model = LookedUp()
    context: Any = SimpleNamespace(
        model=model, runtime=SimpleNamespace(spec="spec", device=torch.device("cpu"))
    )
    samples: Any = list(range(20))
    found = pictured_probe(context, samples)
    assert given == [("spec", samples[:16])]
    if not known:
        assert (found, freed) == ([], [])
        return
    (probe,) = found
    assert (probe.tokens, probe.chat, freed) == ([2, 3, 0], [{"role": "user"}], [model])
    assert probe.tuned == [round(log_of(0.1), 5), round(log_of(0.7), 5)]
    assert probe.base == [round(log_of(0.25), 5)] * 2
    assert [(own["starts"], own["training"]) for own in model.given] == [(None, False)] * 2


def test_pictures_are_sent_with_the_messages_in_which_they_stand() -> None:
    turns = [
        {"role": "user", "content": f"{IMAGE} and {IMAGE}"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": f"now {IMAGE}"},
    ]
    found = module._as_client_sends(turns, [FIRST, SECOND, FIRST])
    urls = [
        [base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in parts]
        for parts in (
            [part for part in found[turn]["content"] if part["type"] == "image_url"]
            for turn in (0, 2)
        )
    ]
    assert (urls, found[1]) == ([[b"first", b"second"], [b"first"]], turns[1])
    assert [own["role"] for own in found] == ["user", "assistant", "user"]


def test_what_is_written_for_pictures_is_found_in_messages_of_users_in_its_order() -> None:
    uses = (ImageUse(0, 1, FIRST), ImageUse(1, 2, SECOND), ImageUse(2, 3, FIRST))
    sample = Tokens(np.zeros(3, np.int32), np.zeros(3, np.bool_), images=uses)
    processor = SimpleNamespace(
        image_token="@", replacement=lambda own: "@@" if own is FIRST else "@@@"
    )
    parts: Any = (sample, None, processor, None, None)
    own = _Reconstruction(*parts)
    own.__dict__["_marks"] = "(@)"
    turns = [
        {"role": "user", "content": "(@@) a (@@@)"},
        {"role": "assistant", "content": "(@@)"},
        {"role": "user", "content": "(@@) b (@@)", "name": "c"},
    ]
    assert own._signed(turns) == [
        {"role": "user", "content": f"{IMAGE} a {IMAGE}"},
        {"role": "assistant", "content": "(@@)"},
        {"role": "user", "content": f"{IMAGE} b (@@)", "name": "c"},
    ]
