"""What the launcher promises, on a cluster: our own, or that of KUBECONFIG.

Pods run our supervisor, whose workers play.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

from ft_service.jobs.decisions import SILENCE_LIMIT_SECONDS
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Absent, Ended, Phase, Running, State, Unknown
from ft_service.jobs.user_actions import Verb
from ft_service.launcher.kubernetes import kubernetes_launcher as launcher_module
from ft_service.launcher.kubernetes import status
from ft_service.launcher.kubernetes.cluster import Cluster, JobChanges, RefusedError
from ft_service.launcher.kubernetes.kubernetes_launcher import SNAPSHOT_SECONDS, KubernetesLauncher
from ft_service.launcher.kubernetes.manifests import INSTANCE, JOB_NAME, Site, object_name
from ft_service.launcher.kubernetes.placement import RETRY_SECONDS
from ft_service.launcher.protocol import LaunchError
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.documents import Control, Desired, ExitReason
from ft_service.spec import DataFileRef, DistributedOptions
from tests.cluster.apiserver import Request
from tests.cluster.harness import ACCOUNT, HarnessCluster, role_rules
from tests.cluster.kubelet import MISSING_IMAGE
from tests.cluster.kueue import Kueue
from tests.support.attempts import wait_for
from tests.support.databases import set_clock
from tests.support.pods import SECONDS, Attempts, profile_for
from tests.support.reconciling import PROJECT, add_job, get, messages, new_reconciler, new_store


def reason_of(ended: Ended) -> str:
    assert ended.exit is not None
    return ended.exit.reason


def test_an_attempt_from_its_start_to_its_end(attempts: Attempts, cluster: HarnessCluster) -> None:
    attempt = attempts("event,checkpoint=3,wait")
    assert attempt.seen() == Absent()
    attempt.start()
    assert isinstance(attempt.seen(), Running)  # from this moment on, without a gap
    attempt.wait_reported()
    attempt.launcher.signal(attempt.handle, Control(generation=2, desired=Desired.PAUSE))
    message = "Training has stopped at checkpoint step-3-a1."
    assert attempt.wait_ended() == Ended(exit_of(ExitReason.STOPPED, message), checkpoint_step=3)
    attempt.launcher.clean(attempt.handle)
    attempt.only_logs_are_left()
    cluster.patch_job(attempt.name, {"spec": {"ttlSecondsAfterFinished": 0}})
    attempt.wait_gone()
    assert reason_of(attempt.wait_ended()) == "stopped", "what is known of it outlives the Job"


def test_success_leaves_each_nodes_record_and_the_job_to_its_time_to_live(
    attempts: Attempts, cluster: HarnessCluster
) -> None:
    attempt = attempts("event,succeed")
    attempt.start()
    assert reason_of(attempt.wait_ended()) == "succeeded"
    assert (
        json.loads(attempt.run.get("attempts/1/nodes/1/exit.json") or b"")["reason"] == "succeeded"
    )
    assert Path(attempt.run.path("attempts/1/exit.json")).is_file()
    attempt.launcher.clean(attempt.handle)
    conditions = {
        c["type"]
        for c in cluster.get("jobs", attempt.name)["status"]["conditions"]
        if c["status"] == "True"
    }
    assert "Complete" in conditions
    short = attempts("event,succeed", nodes=1, ttl_seconds_after_finished=0)
    short.start()
    assert reason_of(short.wait_ended()) == "succeeded"
    short.wait_gone()
    assert reason_of(short.wait_ended()) == "succeeded"


def test_starting_again_starts_nothing_and_another_launcher_takes_over(
    attempts: Attempts, cluster: HarnessCluster
) -> None:
    attempt = attempts("event,hang")
    attempt.start()
    attempt.wait_reported()
    uid = cluster.get("jobs", attempt.name)["metadata"]["uid"]
    successor = cluster.launcher(attempt.profile, attempt.home)
    successor.start(attempt.handle)
    assert cluster.get("jobs", attempt.name)["metadata"]["uid"] == uid
    assert cluster.get("services", attempt.name)["metadata"]["ownerReferences"][0]["uid"] == uid
    assert isinstance(successor.observe(attempt.handle), Running)
    successor.signal(attempt.handle, Control(generation=2, desired=Desired.CANCEL))
    assert reason_of(attempt.wait_ended()) == "cancelled"
    successor.clean(attempt.handle)
    attempt.only_logs_are_left()


def test_a_start_that_was_cut_short_is_completed(
    attempts: Attempts, cluster: HarnessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that dies after it has created the Job leaves pods that cannot find each other."""
    attempt = attempts("event,hang")
    with monkeypatch.context() as dying:
        dying.setattr(launcher_module, "owned_manifests", died)
        with pytest.raises(SystemExit):
            attempt.start()
    assert cluster.get("jobs", attempt.name) is not None
    assert cluster.get("services", attempt.name) is None
    successor = cluster.launcher(attempt.profile, attempt.home)
    assert isinstance(successor.observe(attempt.handle), Running)
    assert cluster.get("services", attempt.name) is not None
    attempt.wait_reported()
    assert attempt.run.get("attempts/1/launched.json") is not None
    successor.kill(attempt.handle, Reason.STALLED)
    attempt.wait_gone()


def died(*arguments: object) -> NoReturn:
    raise SystemExit


def test_an_eviction_is_an_agreed_stop(attempts: Attempts, cluster: HarnessCluster) -> None:
    attempt = attempts("event,checkpoint=3,wait")
    attempt.start()
    attempt.wait_reported()
    cluster.evict(attempt.pod(1))
    ended = attempt.wait_ended()
    assert (reason_of(ended), ended.checkpoint_step, ended.delay_seconds) == ("stopped", 3, 0)


# how a pod's end is read: test_status.py
@pytest.mark.slow
def test_a_permanent_failure_keeps_its_words(attempts: Attempts) -> None:
    attempt = attempts("event,refuse", nodes=1)
    attempt.start()
    ended = attempt.wait_ended()
    assert reason_of(ended) == "permanent_error"
    assert ended.exit is not None
    assert ended.exit.message == "This model cannot be trained."


@pytest.mark.slow
def test_a_pod_that_runs_out_of_memory_says_so(attempts: Attempts, cluster: HarnessCluster) -> None:
    attempt = attempts("event,hang", grace=1.0)
    attempt.start()
    attempt.wait_reported()
    cluster.kubelet.out_of_memory(attempt.pod(1))
    ended = attempt.wait_ended()
    assert reason_of(ended) == "worker_killed"
    assert ended.exit is not None
    assert ended.exit.error is not None
    assert ended.exit.error.code == "out_of_memory"


def test_a_pod_that_vanishes_ends_the_attempt(attempts: Attempts, cluster: HarnessCluster) -> None:
    attempt = attempts("event,hang", grace=1.0)
    attempt.start()
    attempt.wait_reported()
    cluster.kubelet.vanish(attempt.pod(0))
    assert reason_of(attempt.wait_ended()) in ("stop_timeout", "worker_killed")


def test_what_has_no_place_says_why_and_can_be_cancelled(attempts: Attempts) -> None:
    attempt = attempts("succeed", node_selector={"gpu": "none-has-it"})
    attempt.start()
    seen = attempt.wait_noted()
    assert not seen.admitted
    assert "didn't match" in (seen.note or "")
    attempt.launcher.signal(attempt.handle, Control(generation=2, desired=Desired.CANCEL))
    attempt.wait_gone()
    assert isinstance(attempt.seen(), Ended)


def test_a_time_limit_that_passes_while_an_attempt_waits_for_a_place_is_no_failure(
    attempts: Attempts, cluster: HarnessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = attempts("succeed", node_selector={"gpu": "none-has-it"})
    attempt.start()
    attempt.wait_noted()
    cluster.patch_job(attempt.name, {"spec": {"activeDeadlineSeconds": 1}})
    wait_for(lambda: status.is_finished(cluster.get("jobs", attempt.name)), SECONDS)
    job = cluster.get("jobs", attempt.name)
    failing = {
        **job,
        "status": {
            "conditions": [
                {"type": "FailureTarget", "status": "True", "reason": "DeadlineExceeded"}
            ]
        },
    }
    with monkeypatch.context() as before_its_end:
        before_its_end.setattr(Cluster, "job", lambda *_: failing)
        assert isinstance(attempt.seen(), Running)
    ended = attempt.wait_ended()
    assert reason_of(ended) == "stopped"
    assert ended.exit is not None
    assert (
        "pods had a place when its time was over (active_deadline_seconds = 1" in ended.exit.message
    )
    assert ended.delay_seconds == RETRY_SECONDS


def test_a_pause_before_the_start_takes_the_job_away(attempts: Attempts) -> None:
    attempt = attempts("succeed", node_selector={"gpu": "none-has-it"})
    attempt.start()
    attempt.wait_noted()
    attempt.launcher.signal(attempt.handle, Control(generation=2, desired=Desired.PAUSE))
    attempt.wait_gone()
    ended = attempt.wait_ended()
    assert (reason_of(ended), ended.delay_seconds) == ("stopped", 0), "resumed, it is tried at once"


def test_a_cancelled_attempt_that_does_not_end_in_its_time_is_ended(
    clock: Clock, attempts: Attempts, cluster: HarnessCluster
) -> None:
    attempt = attempts("event,hang", nodes=1, grace=20.0)
    attempt.start()
    attempt.wait_reported()
    with cluster.kubelet.stopped(attempt.pod(0)):
        attempt.launcher.signal(attempt.handle, Control(generation=2, desired=Desired.CANCEL))
        clock.now += 49  # of 20 for the ranks, and 30
        assert isinstance(attempt.seen(), Running)
        assert cluster.get("jobs", attempt.name) is not None
        clock.now += 1
        assert isinstance(attempt.seen(), Running)
        wait_for(lambda: cluster.get("jobs", attempt.name) is None, SECONDS)
    assert reason_of(attempt.wait_ended()) == "cancelled"
    attempt.wait_gone()


def test_an_image_that_is_not_there_is_told(attempts: Attempts) -> None:
    attempt = attempts("succeed", image=MISSING_IMAGE)
    attempt.start()
    seen = attempt.wait_noted()
    assert seen.admitted, "the cluster has a place; that time counts"
    assert "ErrImagePull" in (seen.note or "")


def test_why_a_node_does_not_start_a_pod_is_told(
    attempts: Attempts, cluster: HarnessCluster
) -> None:
    attempt = attempts("succeed", nodes=1)
    cluster.kubelet.frozen = True
    try:
        attempt.start()

        def placed() -> str | None:
            mine = (
                pod
                for pod in cluster.items("pods")
                if pod["metadata"]["labels"].get(JOB_NAME) == attempt.name
            )
            return next(
                (pod["metadata"]["name"] for pod in mine if pod["spec"].get("nodeName")), None
            )

        pod = wait_for(placed, SECONDS)
        for reason, message in (
            ("FailedMount", "mount failed: exit status 32"),
            ("FailedScheduling", "no nodes available"),
        ):
            event = {
                "metadata": {"name": f"{pod}.{reason.lower()}", "namespace": cluster.namespace},
                "involvedObject": {"kind": "Pod", "name": pod, "namespace": cluster.namespace},
                "type": "Warning",
                "reason": reason,
                "message": message,
                "lastTimestamp": "2026-11-26T12:00:00Z",
            }
            cluster.http.post(
                f"/api/v1/namespaces/{cluster.namespace}/events", json=event
            ).raise_for_status()
        seen = attempt.wait_noted()
        assert (seen.note, seen.level) == (
            f"pod {pod} has not started: mount failed: exit status 32",
            "warn",
        )
        assert seen.admitted, "that time counts"
    finally:
        cluster.kubelet.frozen = False


def test_a_queue_admits(attempts: Attempts, cluster: HarnessCluster) -> None:
    attempt = attempts("event,succeed", nodes=1, queue="team-a")
    attempt.start()
    seen = attempt.wait_noted()
    assert (seen.admitted, seen.level) == (False, "error")
    assert "the queue team-a, and this cluster has no Kueue" in (seen.note or "")
    job = cluster.get("jobs", attempt.name)
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert not [
        pod for pod in cluster.items("pods") if pod["metadata"]["name"].startswith(attempt.name)
    ]
    cluster.patch_job(attempt.name, {"spec": {"suspend": False}})  # as Kueue does
    assert reason_of(attempt.wait_ended()) == "succeeded"


def test_killing_ends_everything_and_says_why(attempts: Attempts) -> None:
    attempt = attempts("event,hang", nodes=1)
    attempt.start()
    attempt.wait_reported()
    attempt.launcher.kill(attempt.handle, Reason.STALLED)
    ended = attempt.wait_ended()
    assert reason_of(ended) == "stalled"
    attempt.wait_gone()
    attempt.start()
    assert attempt.cluster.get("jobs", attempt.name) is None, (
        "an attempt that was ended cannot be started"
    )


def test_an_attempt_that_was_given_up_before_its_start_cannot_be_started(
    attempts: Attempts, cluster: HarnessCluster
) -> None:
    attempt = attempts("succeed")
    attempt.launcher.kill(attempt.handle, Reason.USER_CANCELLED)
    attempt.start()
    assert cluster.get("jobs", attempt.name) is None
    assert reason_of(attempt.wait_ended()) == "cancelled"


def test_a_job_that_somebody_deletes_was_lost_and_not_absent(
    attempts: Attempts, cluster: HarnessCluster
) -> None:
    attempt = attempts("succeed", node_selector={"gpu": "none-has-it"})
    attempt.start()
    attempt.wait_noted()
    cluster.delete_job(attempt.name)
    attempt.wait_gone()
    assert attempt.seen() == Ended(None)


def test_unfinished_jobs_of_this_installation_are_listed_and_can_be_ended(
    attempts: Attempts, cluster: HarnessCluster
) -> None:
    mine = attempts("event,hang", nodes=1, grace=1.0)
    done = attempts("succeed", nodes=1)
    foreign = attempts("hang", nodes=1, grace=1.0, labels=dict.fromkeys(INSTANCE, "other"))
    for attempt in (mine, done, foreign):
        attempt.start()
    done.wait_ended()
    assert {listed.name: listed.job_id for listed in mine.launcher.unfinished()} == {
        mine.name: mine.job_id
    }
    assert [listed.name for listed in foreign.launcher.unfinished()] == [foreign.name]
    mine.launcher.end_unfinished(mine.name)
    mine.launcher.end_unfinished(mine.name)
    mine.wait_gone()


def test_a_look_that_is_remembered_says_so(attempts: Attempts, cluster: HarnessCluster) -> None:
    attempt = attempts("event,hang", nodes=1)
    launcher = KubernetesLauncher(
        cluster.client(), attempt.profile, Site(cluster.namespace, attempt.home), watch=True
    )
    launcher.start(attempt.handle)
    attempt.wait_reported()

    def seen() -> Running | None:
        found = launcher.observe(attempt.handle)
        return found if isinstance(found, Running) and not found.fresh else None

    wait_for(seen, SECONDS)
    launcher.signal(attempt.handle, Control(generation=2, desired=Desired.CANCEL))


def test_a_node_that_does_not_answer_keeps_the_attempt_alive(
    attempts: Attempts, cluster: HarnessCluster
) -> None:
    """Its processes may still run: a second attempt would write into the same run directory."""
    attempt = attempts("event,hang", nodes=1)
    attempt.start()
    attempt.wait_reported()
    cluster.kubelet.frozen = True
    try:
        attempt.launcher.kill(attempt.handle, Reason.STALLED)
        wait_for(lambda: cluster.get("jobs", attempt.name) is None, SECONDS)
        assert isinstance(attempt.seen(), Running)
    finally:
        cluster.kubelet.frozen = False
    assert reason_of(attempt.wait_ended()) == "stalled"


# the words: test_status.py
@pytest.mark.slow
def test_a_quota_is_told_while_it_lasts(attempts: Attempts, cluster: HarnessCluster) -> None:
    attempt = attempts("event,succeed", nodes=1)
    with cluster.quota_used_up():
        attempt.start()
        seen = attempt.wait_noted()
        assert not seen.admitted
        assert "exceeded quota: none" in (seen.note or "")
    cluster.patch_job(attempt.name, {"metadata": {"labels": {"poke": "1"}}})
    assert reason_of(attempt.wait_ended()) == "succeeded"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of launchers that are made from now on."""
    clock = Clock()
    monkeypatch.setattr(
        "tests.cluster.harness.KubernetesLauncher", partial(KubernetesLauncher, clock=clock)
    )
    return clock


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_quota_on_jobs_is_waited_for(
    clock: Clock, attempts: Attempts, cluster: HarnessCluster
) -> None:
    attempt = attempts("event,succeed", nodes=1)
    with cluster.quota_used_up("count/jobs.batch"):
        for waits in (5.0, 10.0, 20.0, 40.0, 60.0, 60.0):  # longer each time
            attempt.start()
            clock.now += waits - 1
            seen = attempt.seen()
            assert isinstance(seen, Running)
            assert not seen.admitted
            assert "exceeded quota: none, requested: count/jobs.batch=1" in (seen.note or "")
            clock.now += 1
            assert attempt.seen() == Absent(), "it is time for another try"
    wait_for(lambda: attempt.start() or cluster.get("jobs", attempt.name), SECONDS)
    assert reason_of(attempt.wait_ended()) == "succeeded"


@pytest.mark.parametrize(
    ("wish", "ended"), [(Desired.CANCEL, Absent()), (Desired.PAUSE, "stopped")]
)
def test_what_waits_for_a_quota_on_jobs_can_be_stopped(
    attempts: Attempts, cluster: HarnessCluster, wish: Desired, ended: str | Absent
) -> None:
    attempt = attempts("succeed")
    with cluster.quota_used_up("count/jobs.batch"):
        attempt.start()
        assert isinstance(attempt.seen(), Running)
        attempt.launcher.signal(attempt.handle, Control(generation=2, desired=wish))
        seen = attempt.seen()
        assert (reason_of(seen) if isinstance(seen, Ended) else seen) == ended


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_quota_on_services_is_no_failure(
    attempts: Attempts, cluster: HarnessCluster, nodes: int
) -> None:
    attempt = attempts("event,succeed", nodes=nodes, node_selector={"gpu": "none-has-it"})
    with cluster.quota_used_up("services"):
        attempt.start()
    ended = attempt.wait_ended()
    assert (reason_of(ended), ended.delay_seconds) == ("stopped", RETRY_SECONDS)
    assert ended.exit is not None
    assert "exceeded quota: none, requested: services=1" in ended.exit.message
    attempt.wait_gone()


def test_a_service_without_rights_starts_nothing_and_fails_nothing(
    clock: Clock, attempts: Attempts, cluster: HarnessCluster
) -> None:
    attempt = attempts("event,succeed", nodes=1)
    bindings = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{cluster.namespace}/rolebindings"
    binding = cluster.http.get(f"{bindings}/ft-launcher").json()
    cluster.http.delete(f"{bindings}/ft-launcher").raise_for_status()
    attempt.start()
    seen = attempt.seen()
    assert isinstance(seen, Running)
    assert (seen.admitted, seen.level) == (False, "error")
    assert 'cannot create resource "jobs"' in (seen.note or "")
    clock.now += 5.0
    assert isinstance(attempt.seen(), Unknown)
    metadata = {key: binding["metadata"][key] for key in ("name", "namespace")}
    cluster.http.post(bindings, json={**binding, "metadata": metadata}).raise_for_status()
    wait_for(lambda: attempt.start() or cluster.get("jobs", attempt.name), SECONDS)
    assert reason_of(attempt.wait_ended()) == "succeeded"


def data_file(home: Path) -> DataFileRef:
    """A file that the pods can see."""
    path = home / "files/file-1"
    path.parent.mkdir()
    path.touch()
    return DataFileRef(name="train.jsonl", path=str(path), sha256="0")


# the pauses: test_placement.py
@pytest.mark.slow
def test_a_job_that_nodes_evict_before_each_checkpoint_is_tried_less_and_less_often(
    cluster: HarnessCluster, tmp_path: Path
) -> None:
    """As one that makes its nodes short of memory: tried at once it would train in vain for ever,
    and disturb its neighbours. With a new checkpoint it goes on at once.
    """
    vain = "event,hang"
    useful = "event,checkpoint=4,hang"
    script = "/".join((vain, vain, useful, vain, "succeed"))
    store = new_store(tmp_path)
    launcher = cluster.launcher(
        profile_for(tmp_path, script, node_selector=cluster.node_selector), tmp_path
    )
    job_id = add_job(store, "ftjob-evicted", training_data=data_file(tmp_path)).id
    reconciler = new_reconciler(tmp_path, store, launcher)
    for number, seconds in enumerate((15, 30, None, 15), 1):
        wait_for(lambda: reconciler.step() and get(store, job_id).phase is Phase.TRAINING, SECONDS)
        pod = wait_for(lambda: cluster.pod(object_name(job_id, number), 0), SECONDS)  # noqa: B023
        if seconds is None:
            wait_for(lambda: list(tmp_path.glob(f"runs/{job_id}/checkpoints/*/COMPLETE")), SECONDS)
        cluster.kubelet.evict_under_pressure(pod)
        wait_for(lambda: reconciler.step() and get(store, job_id).state is State.QUEUED, SECONDS)
        waiting = get(store, job_id)
        assert (waiting.attempt, waiting.failures) == (number, 0)
        if seconds is None:
            assert (waiting.pending, waiting.not_before <= store.now()) == (None, True)
            continue
        taken = (
            f"pod {pod} is taken away (TerminationByKubelet): The node was low on resource: memory."
        )
        assert waiting.pending == f"{taken} The next attempt is made in {seconds} seconds."
        assert waiting.pending in messages(store, job_id)
        assert waiting.not_before > store.now()
        set_clock(store, 1000.0 * number)
    store.jobs.request(PROJECT, job_id, Verb.PAUSE)
    store.jobs.request(PROJECT, job_id, Verb.RESUME)
    assert (get(store, job_id).pending, get(store, job_id).not_before) == (None, 0.0), (
        "what its user resumes waits for no delay"
    )
    wait_for(lambda: reconciler.step() and get(store, job_id).state is State.SUCCEEDED, SECONDS)
    for number in range(1, 6):
        cluster.delete_job(object_name(job_id, number))
    reconciler.close()
    store.close()


def test_a_job_that_waits_for_a_quota_on_jobs_is_no_failure(
    cluster: HarnessCluster, tmp_path: Path
) -> None:
    store = new_store(tmp_path)
    launcher = cluster.launcher(
        profile_for(tmp_path, "succeed", node_selector=cluster.node_selector), tmp_path
    )
    reconciler = new_reconciler(tmp_path, store, launcher)
    add_job(store, training_data=data_file(tmp_path))
    with cluster.quota_used_up("count/jobs.batch"):
        wait_for(lambda: reconciler.step() and get(store).phase is Phase.WAITING, SECONDS)
        job = get(store)
        assert (job.attempt, job.failures) == (1, 0)
        assert "exceeded quota: none" in (job.pending or "")
        assert [message for message in messages(store) if "exceeded quota" in message] == [
            job.pending
        ]
        store.jobs.request(PROJECT, job.id, Verb.CANCEL)
        wait_for(lambda: reconciler.step() and get(store).phase is None, SECONDS)
    assert (get(store).state, get(store).attempt) == (State.CANCELLED, 1)
    assert store.leases.free_slots(launcher.host, launcher.slots) == list(range(launcher.slots))
    reconciler.close()
    store.close()


# what is decided: test_placement.py
@pytest.mark.slow
def test_places_for_some_of_the_pods_are_given_back_and_cost_nothing(
    clock: Clock, cluster: HarnessCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pod runs and waits for a second one, which a quota refuses."""
    monkeypatch.setattr("ft_service.launcher.kubernetes.placement.RETRY_SECONDS", 0.1)
    store = new_store(tmp_path)
    profile = profile_for(tmp_path, "hang/event,succeed", node_selector=cluster.node_selector)
    reconciler = new_reconciler(tmp_path, store, cluster.launcher(profile, tmp_path))
    job = add_job(
        store,
        training_data=data_file(tmp_path),
        distributed=DistributedOptions(nnodes=2, nproc_per_node=1),
    )

    def turn() -> None:
        clock.now += SNAPSHOT_SECONDS  # so that it looks
        reconciler.step()

    with cluster.quota_used_up(room=1):
        wait_for(lambda: turn() or get(store).phase is Phase.WAITING, SECONDS)
        wait_for(
            lambda: turn() or (get(store).pending or "").startswith("The cluster refuses pods"),
            SECONDS,
        )
        assert (get(store).attempt, get(store).failures, get(store).state) == (1, 0, State.RUNNING)
        wait_for(lambda: turn() or get(store).attempt > 1, SECONDS)
        assert "exceeded quota" in (get(store).pending or "".join(messages(store)))
        assert get(store).failures == 0
    wait_for(lambda: turn() or get(store).state is State.SUCCEEDED, SECONDS)
    told = messages(store)
    assert get(store).failures == 0, told
    given_back = [
        message for message in told if "had a place for 120 seconds; it was given back." in message
    ]
    assert given_back, told
    assert given_back[0].startswith("Only 1 of the attempt's 2 pods")
    assert (
        len([message for message in told if message.startswith("The cluster refuses pods")])
        <= get(store).attempt
    )
    assert not cluster.kubelet.alive()
    cluster.delete_job(object_name(job.id, get(store).attempt))
    reconciler.close()
    store.close()


def test_the_time_in_which_a_pod_waits_for_one_without_a_place_does_not_count(
    clock: Clock, attempts: Attempts, cluster: HarnessCluster
) -> None:
    attempt = attempts("hang", placement_seconds=900)
    with cluster.quota_used_up(room=1):
        attempt.start()
        attempt.pod(0)
        for _ in range(4):
            seen = attempt.seen()
            assert isinstance(seen, Running)
            assert (seen.silent_seconds, seen.admitted) == (0, False)
            clock.now += SILENCE_LIMIT_SECONDS / 8
        assert isinstance(attempt.seen(), Running), "one turn to end it, more until it is gone"
        ended = attempt.wait_ended()
    assert reason_of(ended) == "stopped"
    assert ended.delay_seconds > 0
    attempt.wait_gone()
    assert attempt.seen() == ended, "the next try comes no later for being asked"


# what is decided: test_placement.py
@pytest.mark.slow
def test_a_pod_that_gave_up_waiting_for_one_without_a_place_is_no_failure(
    attempts: Attempts, cluster: HarnessCluster
) -> None:
    """The places were not released in time: the service was away."""
    attempt = attempts("vain")
    with cluster.quota_used_up(room=1):
        attempt.start()
        ended = attempt.wait_ended()
    assert reason_of(ended) == "stopped"
    assert ended.exit is not None
    assert (
        ended.exit.message
        == "Of 2 pods these never ran, and the others waited for them in vain: 1."
    )
    assert ended.delay_seconds > 0


@pytest.mark.usefixtures("clock")
def test_another_replica_that_creates_the_job_is_believed(
    attempts: Attempts, cluster: HarnessCluster
) -> None:
    attempt = attempts("event,hang", nodes=1)
    with cluster.quota_used_up("count/jobs.batch"):
        attempt.start()
    other = cluster.launcher(attempt.profile, attempt.home)
    wait_for(lambda: other.start(attempt.handle) or cluster.get("jobs", attempt.name), SECONDS)
    attempt.wait_reported()
    other.kill(attempt.handle, Reason.STALLED)
    assert reason_of(attempt.wait_ended()) == "stalled"


def test_what_the_cluster_refuses_for_good_is_told_and_cannot_come_to_life_later(
    attempts: Attempts, cluster: HarnessCluster
) -> None:
    twice = [{"name": "data", "mountPath": "/data"}] * 2
    attempt = attempts("succeed", volume_mounts=twice)
    with pytest.raises(LaunchError, match=r"mountPath: Invalid value: \"/data\": must be unique"):
        attempt.start()
    attempt.start()
    assert cluster.get("jobs", attempt.name) is None
    assert attempt.seen() != Absent()


def test_changes_are_told_by_watching(attempts: Attempts, cluster: HarnessCluster) -> None:
    """Of what is there already, and of what comes."""
    attempt = attempts("event,hang", nodes=1)
    later = attempts("event,hang", nodes=1)
    attempt.start()
    changes = JobChanges(cluster.client())
    wait_for(lambda: changes.take(attempt.name), SECONDS)
    assert not changes.take(later.name)
    later.start()
    wait_for(lambda: changes.take(later.name), SECONDS)


# What only our own cluster can be made to do
# ------------------------------------------------------------------------------


@pytest.fixture
def ours(cluster: HarnessCluster) -> HarnessCluster:
    if cluster.fake is None:
        pytest.skip("a real control plane cannot be taken away, and grants the tests everything")
    return cluster


@pytest.fixture
def queues(ours: HarnessCluster) -> Iterator[dict[str, int]]:
    """Of Kueue, which is there for this test: LocalQueue → pods that it has room for."""
    assert ours.fake is not None
    yield ours.fake.state.queues
    ours.fake.state.queues.clear()


# the words: test_status.py
@pytest.mark.slow
def test_a_queue_says_why_an_attempt_waits(attempts: Attempts, queues: dict[str, int]) -> None:
    queues["team-a"] = 1
    attempt = attempts("event,succeed", queue="team-a")
    lost = attempts("event,succeed", queue="team-b")
    attempt.start()
    lost.start()
    text = "couldn't assign flavors to pod set main: insufficient unused quota, 1 more needed"
    waits = "The attempt waits for admission in the queue"
    attempt.wait_told(f"{waits} team-a: {text}")
    lost.wait_told(f"{waits} team-b: LocalQueue team-b doesn't exist")
    queues["team-a"] = 2
    attempt.cluster.patch_job(attempt.name, {"metadata": {"labels": {"poke": "1"}}})
    assert reason_of(attempt.wait_ended()) == "succeeded"


def test_coscheduling_needs_its_plugin(attempts: Attempts, ours: HarnessCluster) -> None:
    attempt = attempts("event,succeed", gang="coscheduling")
    with pytest.raises(LaunchError, match="it has no PodGroup"):
        attempt.start()
    assert attempt.wait_ended()


# as an eviction does, above
@pytest.mark.slow
def test_a_queue_that_takes_its_place_back_ends_the_attempt_at_a_checkpoint(
    attempts: Attempts, ours: HarnessCluster, queues: dict[str, int]
) -> None:
    """Its Job goes too: admitted a second time it would start pods of an attempt that is over."""
    assert ours.fake is not None
    queues["team-a"] = 1
    attempt = attempts("event,checkpoint=3,wait", nodes=1, queue="team-a")
    attempt.start()
    attempt.wait_reported()
    ours.kubelet.frozen = True  # so that there is time to see it
    try:
        Kueue(ours.fake.state).preempt(ours.get("jobs", attempt.name))
        queues["team-a"] = 0
        attempt.wait_told(
            "The queue team-a takes the attempt's place back (Preempted): Preempted to "
            "accommodate a workload"
        )
    finally:
        ours.kubelet.frozen = False
    ended = attempt.wait_ended()
    assert (reason_of(ended), ended.checkpoint_step) == ("stopped", 3)
    attempt.wait_gone()
    assert reason_of(attempt.wait_ended()) == "stopped"


def test_while_the_api_server_is_away_nothing_is_known_and_nothing_starts(
    attempts: Attempts, ours: HarnessCluster
) -> None:
    assert ours.fake is not None
    attempt = attempts("event,hang", nodes=1)
    other = attempts("event,hang", nodes=1)
    attempt.start()
    attempt.wait_reported()
    assert attempt.launcher.away_seconds == 0
    ours.fake.stop()
    try:
        assert isinstance(attempt.seen(), Unknown)
        assert attempt.launcher.away_seconds > 0
        other.start()
        assert isinstance(other.seen(), Unknown)
    finally:
        ours.fake.start()
    wait_for(lambda: isinstance(attempt.seen(), Running))
    assert attempt.launcher.away_seconds == 0
    wait_for(lambda: other.seen() == Absent())
    other.start()
    other.wait_reported()


def test_after_a_break_changes_are_told_again(attempts: Attempts, ours: HarnessCluster) -> None:
    assert ours.fake is not None
    later = attempts("event,hang", nodes=1)
    changes = JobChanges(ours.client())
    ours.fake.stop()
    ours.fake.state.history.clear()  # too long a break: versions are forgotten
    ours.fake.state.version += 100
    ours.fake.start()
    later.start()
    wait_for(lambda: changes.take(later.name), SECONDS)


def test_the_role_in_deploy_grants_what_is_used_and_nothing_else(
    attempts: Attempts, ours: HarnessCluster
) -> None:
    """All requests of this module are made under that role; here each kind is made once more, and
    compared.
    """
    assert ours.fake is not None
    attempt = attempts("succeed", node_selector={"gpu": "none-has-it"})
    for _ in range(2):  # what is there already is looked at
        attempt.start()
    attempt.wait_noted()
    client = ours.client()
    client.warnings(attempt.name)
    with pytest.raises(RefusedError, match="not found"):
        client.log("none")
    assert [job["metadata"]["name"] for job in client.jobs()] == [attempt.name]
    assert client.workload("none") is None, "without Kueue, too"
    attempt.launcher.kill(attempt.handle, Reason.STALLED)
    JobChanges(client)
    wait_for(
        lambda: {"jobs", "pods"} <= {r.resource for r in made(ours) if r.verb == "watch"}, SECONDS
    )
    granted = {
        (verb, group, resource)
        for rule in role_rules()
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert {(r.verb, r.group, r.resource) for r in made(ours)} == granted


def made(cluster: HarnessCluster) -> set[Request]:
    assert cluster.fake is not None
    return {
        request for request in set(cluster.fake.requests) if request.user.endswith(f":{ACCOUNT}")
    }
