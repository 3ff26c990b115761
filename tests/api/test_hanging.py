"""Everything that a request of one tenant could wait for hangs, for every route of the description
at once; all others, and this tenant's other requests, are answered meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from ft_service.control.checks import file_views
from ft_service.data.examiner import Examiner
from ft_service.graders import asking
from ft_service.serving import worker_tasks
from ft_service.store.records import NewKey
from tests.support.rest.described import OPEN, filled, needed, operations, tenant
from tests.support.rest.receiver import hanging
from tests.support.rest.service import Service

TIMES = 8
"""Each route at once: those that wait are more together than there are threads."""
WAITS_IN_VAIN = 30.0
"""Seconds. What hangs does so until the test is over."""
ENDS = ("DELETE", "cancel", "archive", "rotate", "complete", "pause", "resume")
"""What takes from others what they ask for comes when all of them wait."""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    with hanging() as (url, hang_up):
        outside = Outside(url, hang_up, threading.Event(), tmp_path / "released")
        wait = ("sh", "-c", f"until [ -e {outside.file} ]; do sleep 0.05; done")
        monkeypatch.setattr(file_views, "Examiner", partial(Examiner, command=wait))
        monkeypatch.setattr(worker_tasks, "run_worker", lambda *_: outside.released.wait())
        monkeypatch.setattr(asking, "RETRY_SECONDS", 0.0)
        yield outside
        outside.release()


@dataclass(frozen=True)
class Outside:
    """Servers at `url`, and processes that read files or make adapters: they do not answer until
    they are released.
    """

    url: str
    hang_up: Callable[[], None]
    released: threading.Event
    file: Path

    def release(self) -> None:
        self.file.touch()
        self.released.set()
        self.hang_up()


BODIES: dict[str, Any] = {
    "/v1/webhook_endpoints/{webhook_endpoint_id}/test": {"event_type": "fine_tuning.job.failed"},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]},
}
"""That make a route wait, where an empty one does not."""
GRADES = "/v1/fine_tuning/alpha/graders/run"


def test_what_hangs_for_one_tenant_holds_up_nobody(service: Service, outside: Outside) -> None:
    service.store.projects.ensure_project("rival", "rival")
    key = service.store.keys.create_key(NewKey(project_id="rival", name="k", scope="admin"))[1]
    theirs = tenant(service, "rival", key, outside.url)
    service.use(
        service.app.state.services.settings.model_copy(update={"inference_url": outside.url})
    )
    waited = asyncio.run(walked(service, key, theirs, outside))
    assert waited >= {
        "/v1/chat/completions",
        "/v1/files/{file_id}/samples",
        "/v1/files/{file_id}/statistics",
        "/v1/fine_tuning/jobs/{job_id}/samples",
        "/v1/fine_tuning/jobs/{job_id}/statistics",
        "/v1/fine_tuning/jobs/{job_id}/checkpoints/{checkpoint_id}/adapter",
        "/v1/fine_tuning/checkpoints/{checkpoint}/adapter",
        "/v1/webhook_endpoints/{webhook_endpoint_id}/test",
        GRADES,
    }, "these wait for something, or for their turn"


async def walked(service: Service, key: str, theirs: dict[str, str], outside: Outside) -> set[str]:
    """Paths of the requests that were not answered while everybody else's were, or of which too
    many waited.
    """
    described = list(operations(service))
    endpoint = {
        "type": "endpoint",
        "name": "e",
        "url": outside.url,
        "webhook_endpoint_id": theirs["webhook_endpoint_id"],
    }
    bodies = {**BODIES, GRADES: {"grader": endpoint, "model_sample": "x"}}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
    async with httpx2.AsyncClient(
        base_url=service.url, trust_env=False, timeout=None, limits=limits
    ) as client:

        async def ask(method: str, path: str, key: str) -> int:
            sent: dict[str, Any] = (
                {"json": bodies.get(path, {})} if method == "POST" else {"params": needed(path)}
            )
            headers = {"authorization": f"Bearer {key}"}
            return (
                await client.request(method, filled(path, theirs), headers=headers, **sent)
            ).status_code

        asking = {
            asyncio.create_task(ask(method, path, key)): path
            for method, path in described
            if not any(word in f"{method} {path}" for word in ENDS)
            for _ in range(TIMES)
        }
        try:
            async with asyncio.timeout(WAITS_IN_VAIN):
                lists = [path for method, path in described if method == "GET" and "{" not in path]
                for whose in (service.key, key):
                    for path in lists:
                        is_operators = whose == key and path == "/v1/pulls"
                        expected = (403,) if is_operators else (200, 400)
                        assert await ask("GET", path, whose) in expected, path
                for method, path in described:
                    if any(word in f"{method} {path}" for word in ENDS):
                        assert await ask(method, path, key) < 500, path
                for path in OPEN:
                    assert await ask("GET", path, service.key) == 200
            waiting = {path for task, path in asking.items() if not task.done()}
        finally:
            outside.release()
        statuses = await asyncio.gather(*asking)
        assert 500 not in statuses
        return waiting | {
            path for status, path in zip(statuses, asking.values(), strict=True) if status == 429
        }
