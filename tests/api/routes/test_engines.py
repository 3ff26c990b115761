from __future__ import annotations

from ft_service.engines.engine_directory import EngineDirectory
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.documents import Start
from ft_service.storage.locations import Places
from tests.support.rest.engines import seated_job
from tests.support.rest.service import Service


def test_a_project_sees_its_own_engines(service: Service) -> None:
    assert service.http("GET", "/v1/engines").json()["data"] == []
    service.store.projects.ensure_project("other", "local")
    ids = [
        seated_job(service, "engine-0", slots=[0, 1]),
        seated_job(service, "engine-1", slots=[2, 3], project_id="other"),
    ]
    (engine,) = service.http("GET", "/v1/engines").json()["data"]
    assert engine.pop("created_at") > 0
    (job,) = engine.pop("jobs")
    assert (job.pop("since") > 0, job.pop("slot_seconds") >= 0, job) == (True, True, {"id": ids[0]})
    assert engine == {
        "id": "engine-0",
        "object": "engine",
        "base": "some-base",
        "ranks": 2,
        "most_jobs": 8,
        "ending": False,
    }


def test_an_engines_output_is_that_of_its_jobs(service: Service) -> None:
    job_id = seated_job(service, "engine-0", slots=[0, 1])
    alone = "attempts/1/logs/supervisor.log"
    places = Places.of(service.settings)
    engine = EngineDirectory(places, "engine-0")
    attempt = Attempt(places.run(job_id), 1)
    attempt.run.put(alone, b"own\n")
    engine.run.put(alone, b"started\n")
    engine.run.put("attempts/1/logs/x/attempt_0/1/stdout.log", b"hello\n")
    elsewhere = Start(
        job_id=job_id,
        attempt=1,
        world_size=2,
        generation=1,
        checkpoint=None,
        engine="/etc/engine-0",
    )
    attempt.write_start(elsewhere)
    logs = f"/v1/fine_tuning/jobs/{job_id}/logs"
    assert service.http("GET", logs).text == "==> supervisor.log <==\nown\n"
    attempt.settle_start(elsewhere.model_copy(update={"engine": str(engine.run.root)}))
    assert service.http("GET", logs).text == "==> supervisor.log <==\nown\n", (
        "the engine has no order for it"
    )
    engine.order(attempt)
    assert "==> engine supervisor.log <==\nstarted\n" in service.http("GET", logs).text
    assert (
        service.http("GET", logs, params={"rank": 1}).text
        == "==> engine rank 1 stdout <==\nhello\n"
    )
