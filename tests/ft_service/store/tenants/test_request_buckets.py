from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from ft_service.store.sql import Store, open_store
from ft_service.store.tenants.request_buckets import MINUTE, Drawn


@pytest.fixture
def stores(emptied_postgres_url: str) -> Iterator[list[Store]]:
    """As several servers have it."""
    stores = [open_store(emptied_postgres_url) for _ in range(3)]
    stores[0].projects.ensure_project("proj_default", "acme")
    yield stores
    for store in stores:
        store.close()


def full_in(store: Store, seconds: float) -> None:
    with store.writing() as connection:
        connection.execute(
            text("UPDATE request_rates SET full_at = extract(epoch FROM clock_timestamp()) + :s"),
            {"s": seconds},
        )


def test_a_drawing_is_what_arithmetic_says(stores: list[Store]) -> None:
    store = stores[0]
    cases = [
        (0.0, 7, 1, 0),
        (0.0, 7, 9, 0),
        (50.0, 6, 5, 0),
        (50.0, 6, 5, 3),
        (60.0, 60, 2, 0),
        (59.5, 60, 2, 0),
        (10.0, 600, 12, 200),
    ]
    store.request_buckets.draw_requests("proj_default", 1, 1, 0)
    for full_after, per_minute, wanted, returned in cases:
        full_in(store, full_after)
        drawn = store.request_buckets.draw_requests("proj_default", per_minute, wanted, returned)
        expected = Drawn.of(full_after, per_minute, wanted, returned)
        assert drawn.taken == expected.taken
        assert drawn.full_after == pytest.approx(expected.full_after, abs=0.5)


def test_servers_that_draw_at_once_get_what_there_is_once(stores: list[Store]) -> None:
    per_minute = 6000
    with ThreadPoolExecutor(6) as threads:
        drawn = list(
            threads.map(
                lambda number: stores[number % 3].request_buckets.draw_requests(
                    "proj_default", per_minute, 120, 0
                ),
                range(60),
            )
        )
    taken = sum(one.taken for one in drawn)
    assert per_minute <= taken
    full_after = max(one.full_after for one in drawn)
    assert full_after <= MINUTE + 0.001, "never more than is there"
