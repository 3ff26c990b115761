from __future__ import annotations

import json

from tests.support.command_line import Ft
from tests.support.rest.stub_server import StubServer


def test_engines(ft: Ft, server: StubServer) -> None:
    assert (
        ft("engines").out == "No engines. Small jobs on one base share one where slots are short.\n"
    )
    jobs = [
        {"id": f"ftjob-{number}", "since": 1_700_000_000, "slot_seconds": 10.0 * number}
        for number in (1, 3)
    ]
    common = {"created_at": 1_700_000_000, "ranks": 2, "most_jobs": 8}
    server.engines = [
        {"id": "engine-1", "base": "tiny", "jobs": jobs, "ending": True, **common},
        {"id": "engine-2", "base": None, "jobs": [], "ending": False, **common},
    ]
    title, first, second = ft("engines").out.splitlines()
    assert title.split() == ["ID", "BASE", "RANKS", "JOBS", "SINCE", "TRAINS"]
    assert first.split()[:6] == ["engine-1", "tiny", "2", "2", "of", "8,"]
    assert first.endswith("ftjob-1 (25%), ftjob-3 (75%)")
    assert second.split()[:4] == ["engine-2", "2", "0", "of"]
    assert [engine["id"] for engine in json.loads(ft("engines", "--json").out)] == [
        "engine-1",
        "engine-2",
    ]
