from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from api.http.request_limits import Rate, Rates
from ft_service.errors import UnavailableError
from ft_service.store.tenants.request_buckets import MINUTE, Drawn


class Bucket:
    """What servers share, in place of PostgreSQL, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.full_at = 0.0
        self.draws = 0

    def clock(self) -> float:
        return self.now

    async def draw(self, project_id: str, per_minute: int, wanted: int, returned: int) -> Drawn:
        self.draws += 1
        await asyncio.sleep(0)
        drawn = Drawn.of(max(0.0, self.full_at - self.now), per_minute, wanted, returned)
        self.full_at = self.now + drawn.full_after
        return drawn


def replicas(bucket: Bucket, count: int) -> list[Rates]:
    return [Rates(bucket.draw, bucket.clock) for _ in range(count)]


def take(rates: Rates, per_minute: int) -> Rate:
    return asyncio.run(rates.take("proj", per_minute))


def test_a_bucket_is_emptied_and_fills_again_evenly() -> None:
    bucket = Bucket()
    for rates in (Rates(clock=bucket.clock), Rates(bucket.draw, bucket.clock)):
        seen = [take(rates, 4) for _ in range(5)]
        assert [(rate.remaining, rate.wait) for rate in seen[:4]] == [
            (3, 0),
            (2, 0),
            (1, 0),
            (0, 0),
        ]
        assert (seen[4].remaining, seen[4].wait, seen[4].full_after) == (0, MINUTE / 4, MINUTE)
        bucket.now += MINUTE / 4 - 1
        assert take(rates, 4).wait == 1
        bucket.now += 1
        assert take(rates, 4).wait == 0
        assert take(rates, 4).wait == MINUTE / 4
        bucket.now += MINUTE


@settings(max_examples=20, deadline=None, database=None)
@given(
    st.integers(1, 3000),
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 5), st.integers(1, 200)), max_size=8),
)
def test_several_servers_let_no_more_through_than_one_and_little_less(
    per_minute: int, bursts: list[tuple[int, float, int]]
) -> None:
    """Whichever of them is asked when."""
    shared = Bucket()
    alone = Bucket()
    servers = replicas(shared, 4)
    one = Rates(alone.draw, alone.clock)
    began = shared.now

    async def sent(rates: Rates, count: int) -> int:
        return sum([(await rates.take("proj", per_minute)).wait == 0 for _ in range(count)])

    async def play() -> None:
        of_all = of_one = 0
        for server, pause, count in bursts:
            shared.now, alone.now = shared.now + pause, alone.now + pause
            of_all += await sent(servers[server], count)
            of_one += await sent(one, count)
            assert of_all <= per_minute * (1 + (shared.now - began) / MINUTE) + 1e-6
            assert of_all >= of_one - 4 * max(1, per_minute // 50)

    asyncio.run(play())


def test_most_requests_ask_nobody_and_those_that_come_together_ask_once() -> None:
    bucket = Bucket()
    [rates] = replicas(bucket, 1)

    async def burst() -> Counter[bool]:
        found = await asyncio.gather(*(rates.take("proj", 6000) for _ in range(6100)))
        return Counter(rate.wait == 0 for rate in found)

    assert asyncio.run(burst()) == {True: 6000, False: 100}
    assert bucket.draws == 50, "a fiftieth at once"


def test_what_lies_unused_goes_back() -> None:
    bucket = Bucket()
    first, second = replicas(bucket, 2)
    take(first, 100)
    take(second, 100)
    bucket.now += 3
    take(first, 100)
    assert round((bucket.full_at - bucket.now) / (MINUTE / 100)) == 2, (
        "two of each had been drawn; three seconds give five back"
    )


def test_a_server_counts_alone_while_the_shared_bucket_cannot_be_written() -> None:
    async def full(*_: object) -> Drawn:
        raise UnavailableError("The disk that holds the database is full.")

    bucket = Bucket()
    rates = Rates(full, bucket.clock)
    seen = [take(rates, 4) for _ in range(5)]
    assert [rate.wait == 0 for rate in seen] == [True] * 4 + [False]
