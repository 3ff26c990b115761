"""Sessions, samplers and samples of Tinker clients: whose they are, what waits, and what is
removed.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ft_service.errors import LimitError, NotFoundError
from ft_service.store import tinker as tinker_module
from ft_service.store.sql import Store
from ft_service.store.tables import TINKER_ROW_BYTES
from ft_service.store.tinker import (
    KEEP_FINISHED_SECONDS,
    KEEP_UNUSED_SECONDS,
    TinkerSample,
    TinkerSampler,
)
from tests.support.databases import set_clock
from tests.support.records import OTHER, PROJECT

DAY = 86_400.0


def session(store: Store, name: str, project: str = PROJECT) -> None:
    store.tinker.create_session(name, project, name.upper(), {"k": name})


def sampler(store: Store, name: str, project: str = PROJECT, **values: Any) -> TinkerSampler:
    given: dict[str, Any] = {"session_id": "s1", "base": "tiny", "model_path": None}
    return store.tinker.put_sampler(TinkerSampler(id=name, project_id=project, **given | values))


def sample(store: Store, name: str, of: str = "a", project: str = PROJECT, **request: Any) -> None:
    store.tinker.put_sample(
        TinkerSample(id=name, project_id=project, sampler_id=of, request=request)
    )


def waiting(store: Store, most: int = 9, without: tuple[str, ...] = (), **others: Any) -> list[str]:
    given: dict[str, Any] = {"projects": [], "samplers": []}
    return [one.id for one in store.tinker.unanswered(most, without, **given | others)]


def test_a_sampler_is_stored_once_and_counts_its_clients(store: Store) -> None:
    first = sampler(store, "a", model_path="tinker://x", owns_weights=True)
    assert sampler(store, "a", base="else") == first
    assert (first.base, first.model_path, first.owns_weights) == ("tiny", "tinker://x", True)
    sampler(store, "b")
    sampler(store, "c", session_id="s2")
    assert store.tinker.samplers_of("s1") == ["a", "b"]
    assert [store.tinker.join_sampler(PROJECT, "a") for _ in range(2)] == [1, 2]
    assert store.tinker.join_sampler(PROJECT, "b") == 1
    store.tinker.note_gap("a", 0.25)
    assert store.tinker.get_sampler(PROJECT, "a").logprob_gap == 0.25
    assert store.tinker.get_sampler(PROJECT, "b").logprob_gap is None
    for act in (
        lambda: store.tinker.join_sampler(OTHER, "a"),
        lambda: store.tinker.get_sampler(OTHER, "a"),
        lambda: sampler(store, "a", OTHER),
    ):
        with pytest.raises(NotFoundError):
            act()
    store.tinker.delete_sampler("a")
    assert store.tinker.samplers_of("s1") == ["b"]


def test_samples_wait_in_their_order_until_they_are_answered(store: Store) -> None:
    for name in ("a", "b"):
        sampler(store, name)
    sampler(store, "c", OTHER)
    sample(store, "1", "a", n=1)
    sample(store, "2", "b")
    sample(store, "3", "c", OTHER)
    store.changed.clear()
    sample(store, "4", "a")
    assert store.changed.is_set()
    sample(store, "1", "b", n=2)
    assert store.tinker.get_sample(PROJECT, "1").request == {"n": 1}
    with pytest.raises(NotFoundError):
        store.tinker.get_sample(OTHER, "1")
    assert waiting(store) == ["1", "2", "3", "4"]
    assert waiting(store, 2) == ["1", "2"]
    assert waiting(store, 2, ("1", "2")) == ["3", "4"]
    assert waiting(store, projects=[PROJECT]) == ["3"]
    assert waiting(store, samplers=["a"]) == ["2", "3"]
    store.changed.clear()
    store.tinker.answer_samples({"1": b"text", "2": {"error": "x", "category": "user"}})
    assert store.changed.is_set()
    store.tinker.answer_samples({"1": b"later", "2": b"later"})
    first, second = (store.tinker.get_sample(PROJECT, name) for name in ("1", "2"))
    assert (first.answer, first.error) == (b"text", None)
    assert (second.answer, second.error) == (None, {"error": "x", "category": "user"})
    assert first.answered_at is not None
    assert waiting(store) == ["3", "4"]
    assert store.tinker.answered(["1", "2", "3", "gone"]) == {"1", "2", "gone"}
    assert store.tinker.answered([]) == set()
    set_clock(store, 60)
    store.tinker.forget_samples(90)
    assert store.tinker.get_sample(PROJECT, "1") == first
    store.tinker.forget_samples(30)
    with pytest.raises(NotFoundError):
        store.tinker.get_sample(PROJECT, "1")
    assert waiting(store) == ["3", "4"]


def test_what_is_not_used_for_long_is_removed(store: Store) -> None:
    for name in ("s1", "s2", "s3"):
        session(store, name)
    store.tinker.finish_session(PROJECT, "s1", "done")
    for name in ("a", "b", "c"):
        sampler(store, name)
    sampler(store, "own", owns_weights=True)
    store.tinker.forget_unused()
    assert store.tinker.list_sessions(PROJECT, 9, 0) == ["s3", "s2", "s1"]
    set_clock(store, KEEP_FINISHED_SECONDS + 60)
    assert [one.id for one in store.tinker.unused_samplers(DAY)] == ["own"]
    assert store.tinker.unused_samplers(DAY + 120) == []
    store.tinker.forget_unused()
    assert store.tinker.list_sessions(PROJECT, 9, 0) == ["s3", "s2"]
    store.tinker.touch_session(PROJECT, "s2")
    store.tinker.join_sampler(PROJECT, "a")
    sample(store, "1", "b")
    set_clock(store, KEEP_UNUSED_SECONDS + 60)
    store.tinker.forget_unused()
    assert store.tinker.list_sessions(PROJECT, 9, 0) == ["s2"]
    assert store.tinker.samplers_of("s1") == ["a", "b", "own"]
    assert KEEP_FINISHED_SECONDS == DAY
    assert KEEP_UNUSED_SECONDS == 7 * DAY


def test_a_project_has_as_many_as_it_may_and_no_more(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MOST_SESSIONS", "MOST_SAMPLERS", "MOST_UNANSWERED"):
        monkeypatch.setattr(tinker_module, name, 2)
    for name in ("1", "2"):
        session(store, name)
        sampler(store, name)
        sample(store, name)
    with pytest.raises(LimitError) as refused:
        session(store, "3")
    assert refused.value.code == "too_many_sessions"
    with pytest.raises(LimitError) as refused:
        sampler(store, "3")
    assert refused.value.code == "too_many_samplers"
    assert sampler(store, "2").id == "2", "one that is there is no more"
    with pytest.raises(LimitError) as refused:
        sample(store, "3")
    assert refused.value.code == "too_many_at_once"
    assert refused.value.retry_after is not None
    session(store, "theirs", OTHER)
    sampler(store, "theirs", OTHER)
    sample(store, "theirs", "theirs", OTHER)
    store.tinker.answer_samples({"1": b""})
    sample(store, "3")


def test_metadata_count_for_bytes_and_a_session_without_can_always_begin(store: Store) -> None:
    store.projects.update_project(PROJECT, limits={"max_bytes": 10})
    with pytest.raises(LimitError) as refused:
        session(store, "s1")
    assert refused.value.code == "storage_limit"
    store.tinker.create_session("s2", PROJECT, "name", None)
    assert store.tinker.list_sessions(PROJECT, 9, 0) == ["s2"]


def test_what_is_done_to_saved_weights_is_in_the_audit_log(store: Store) -> None:
    store.tinker.record_weights(PROJECT, "published", "tinker://x")
    (entry,) = store.audit.list_audit(project_id=PROJECT, limit=1).data
    assert (entry.type, entry.target) == ("weights.published", "tinker://x")


def test_a_session_s_metadata_fill_a_project_up_to_its_limit(store: Store) -> None:
    size = TINKER_ROW_BYTES + len(json.dumps({"k": "s1"}))
    store.projects.update_project(PROJECT, limits={"max_bytes": size - 1})
    with pytest.raises(LimitError):
        session(store, "s1")
    store.projects.update_project(PROJECT, limits={"max_bytes": size})
    session(store, "s1")
    with pytest.raises(LimitError):
        session(store, "s2")
