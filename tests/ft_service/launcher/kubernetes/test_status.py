"""What is made of Kubernetes' objects: every cause, and which of two comes first."""

from __future__ import annotations

from typing import Any

import pytest

from ft_service.launcher.kubernetes.status import PodWait, end_of, judge_pods, places, waiting
from ft_service.rundir.attempt_outcome import AttemptRecords, exit_of
from ft_service.rundir.documents import ErrorInfo, Exit, ExitReason, Outcome, OutcomeKind, Result

IN_VAIN = exit_of(
    ExitReason.WORKER_ERROR,
    "A rank failed: torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
    ErrorInfo(code="training_failed", message="m"),
)
STORE_GONE = exit_of(
    ExitReason.WORKER_ERROR,
    "A rank of node 1 failed: torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: "
    "the store has failed",
    ErrorInfo(code="training_failed", message="m"),
)
LOST_PEER = exit_of(ExitReason.WORKER_ERROR, "Rank 0 failed: Connection closed by peer")
DONE = exit_of(ExitReason.SUCCEEDED, "The ranks of this node are done.")
RESULT = Result(attempt=1, steps=5, trained_tokens=1, train_loss=None, valid_loss=None)


def failed(reason: str, message: str = "") -> dict[str, Any]:
    return {
        "status": {
            "conditions": [
                {"type": "Failed", "status": "True", "reason": reason, "message": message}
            ]
        }
    }


def pod(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p"}, "status": status}


def ended_by(reason: str, code: int = 137) -> dict[str, Any]:
    ended = {"terminated": {"reason": reason, "exitCode": code}}
    return pod(phase="Failed", containerStatuses=[{"name": "worker", "state": ended}])


def indexed(index: int, state: str = "running") -> dict[str, Any]:
    """The pod of an index, in this state."""
    labels = {"batch.kubernetes.io/job-completion-index": str(index)}
    status = {"containerStatuses": [{"name": "worker", "state": {state: {}}}]}
    return {"metadata": {"name": "p", "labels": labels}, "status": status}


def unplaced(message: str) -> dict[str, Any]:
    return pod(
        conditions=[
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": message,
            }
        ]
    )


DISRUPTED = pod(
    conditions=[
        {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "PreemptionByScheduler",
            "message": "by other",
        }
    ]
)
INDEX_1 = {"name": "p", "labels": {"batch.kubernetes.io/job-completion-index": "1"}}
INIT_FAILED = {
    "metadata": INDEX_1,
    "status": {
        "phase": "Failed",
        "initContainerStatuses": [
            {"name": "check", "state": {"terminated": {"exitCode": 9, "message": "no devices\n"}}}
        ],
        "containerStatuses": [
            {"name": "worker", "state": {"waiting": {"reason": "PodInitializing"}}}
        ],
    },
}
NODE_REFUSES = {
    "metadata": INDEX_1,
    "status": {
        "phase": "Failed",
        "reason": "UnexpectedAdmissionError",
        "message": "Allocate failed: nvidia.com/gpu",
    },
}
"""A pod as the kubelet leaves it for which a device is missing."""
STOPPED = Outcome(kind=OutcomeKind.STOPPED, checkpoint="step-5-a1")
REFUSED = Outcome(
    kind=OutcomeKind.FAILED, permanent=True, error=ErrorInfo(code="x", message="no such model")
)
RAISED = exit_of(
    ExitReason.WORKER_ERROR,
    "Rank 1 (node 1) failed: ValueError: b",
    ErrorInfo(code="training_failed", message="ValueError: b", rank=1),
)
UNSTOPPED = exit_of(
    ExitReason.STOP_TIMEOUT, "The ranks of node 0 did not stop in time and were killed."
)
WAITED = Outcome(
    kind=OutcomeKind.FAILED, error=ErrorInfo(code="collective_timeout", message="a rank is stuck")
)
RULE = "Container worker for pod ft/p failed with exit code {} matching FailJob rule at index {}"


@pytest.mark.parametrize(
    ("seen", "reason", "code"),
    [
        ({"result": RESULT, "pods": [ended_by("OOMKilled")]}, "succeeded", None),
        ({"outcome": STOPPED, "pods": [DISRUPTED], "exits": {1: LOST_PEER}}, "stopped", None),
        ({"outcome": REFUSED, "exits": {0: LOST_PEER}}, "permanent_error", "x"),
        ({"exits": {0: exit_of(ExitReason.CANCELLED, "c"), 1: LOST_PEER}}, "cancelled", None),
        (
            {"exits": {0: LOST_PEER}, "pods": [ended_by("OOMKilled")]},
            "worker_killed",
            "out_of_memory",
        ),
        (
            {"exits": {0: LOST_PEER}, "job": failed("DeadlineExceeded")},
            "worker_killed",
            "deadline_exceeded",
        ),
        ({"job": failed("DeadlineExceeded"), "waited": True}, "stopped", None),
        (
            {"exits": {0: LOST_PEER}, "job": failed("DeadlineExceeded"), "waited": True},
            "stopped",
            None,
        ),
        (
            {"job": failed("DeadlineExceeded"), "waited": True, "trained": True},
            "worker_killed",
            "deadline_exceeded",
        ),
        ({"exits": {0: LOST_PEER}, "pods": [DISRUPTED]}, "stopped", None),
        (
            {"exits": {0: LOST_PEER}, "pods": [pod(reason="Evicted", message="disk")]},
            "worker_killed",
            "evicted",
        ),
        ({"exits": {0: LOST_PEER, 1: DONE}}, "worker_error", None),
        (
            {"exits": {0: LOST_PEER, 1: exit_of(ExitReason.WORKER_KILLED, "k")}},
            "worker_killed",
            None,
        ),
        (
            {"exits": {0: UNSTOPPED, 1: RAISED}, "pods": [ended_by("Error")]},
            "worker_error",
            "training_failed",
        ),
        (
            {"exits": {0: LOST_PEER, 1: RAISED}, "pods": [DISRUPTED]},
            "worker_error",
            "training_failed",
        ),
        (
            {"exits": {0: UNSTOPPED}, "pods": [ended_by("OOMKilled")]},
            "worker_killed",
            "out_of_memory",
        ),
        ({"outcome": WAITED, "pods": [ended_by("OOMKilled")]}, "worker_killed", "out_of_memory"),
        ({"outcome": WAITED, "pods": [DISRUPTED]}, "stopped", None),
        ({"outcome": WAITED, "exits": {0: UNSTOPPED}}, "worker_error", "collective_timeout"),
        ({"exits": {1: DONE}}, "worker_killed", None),
        ({"exits": {0: DONE, 1: DONE}}, "worker_error", "training_failed"),
        ({"exits": {0: IN_VAIN}}, "stopped", None),
        ({"exits": {0: IN_VAIN, 1: LOST_PEER}}, "worker_error", "training_failed"),
        ({"exits": {0: LOST_PEER}, "pods": [indexed(0)]}, "worker_error", None),
        ({"exits": {0: IN_VAIN}, "pods": [indexed(1)]}, "worker_error", "training_failed"),
        ({"exits": {1: STORE_GONE}, "trained": True}, "worker_killed", "pod_gone"),
        ({"exits": {1: STORE_GONE}}, "worker_killed", "pod_gone"),
        ({"exits": {1: STORE_GONE}, "pods": [indexed(0, "waiting")]}, "stopped", None),
        ({"exits": {0: IN_VAIN}, "trained": True}, "worker_killed", "pod_gone"),
        ({"exits": {0: LOST_PEER}, "trained": True}, "worker_killed", "pod_gone"),
        ({"exits": {0: LOST_PEER}}, "worker_error", None),
        ({"exits": {0: RAISED}, "trained": True}, "worker_error", "training_failed"),
        ({"job": failed("PodFailurePolicy", RULE.format(64, 0))}, "permanent_error", None),
        ({"job": failed("PodFailurePolicy", RULE.format(75, 1))}, "stopped", None),
        ({"pods": [INIT_FAILED]}, "launch_failed", "pod_failed"),
        (
            {"exits": {0: LOST_PEER}, "pods": [indexed(0), INIT_FAILED]},
            "launch_failed",
            "pod_failed",
        ),
        ({"pods": [ended_by("StartError", 128)]}, "launch_failed", "pod_failed"),
        ({"pods": [NODE_REFUSES]}, "stopped", None),
        ({"exits": {0: LOST_PEER}, "pods": [indexed(0), NODE_REFUSES]}, "stopped", None),
        ({"pods": [ended_by("Error", 1)]}, "launch_failed", "pod_failed"),
    ],
)
def test_how_an_attempt_ended(seen: dict[str, Any], reason: str, code: str | None) -> None:
    cluster: dict[str, Any] = {"job": failed("BackoffLimitExceeded"), "pods": [], "waited": False}
    cluster |= {name: seen[name] for name in cluster.keys() & seen.keys()}
    records: dict[str, Any] = {
        "exits": {},
        **{name: value for name, value in seen.items() if name not in cluster},
    }
    found = judge_pods(AttemptRecords(2, **records), **cluster)
    assert isinstance(found, Exit)
    assert (found.reason, found.error.code if found.error else None) == (reason, code)


def test_how_one_pod_ended_is_a_clause() -> None:
    assert end_of(ended_by("OOMKilled")) == "ran out of memory"
    assert end_of(ended_by("Error", 3)) == "ended with code 3"
    assert end_of(pod()) is None


def test_where_nobody_left_a_word_nothing_is_made_up() -> None:
    assert (
        judge_pods(AttemptRecords(2, {}), failed("BackoffLimitExceeded"), [ended_by("Error")])
        is None
    )
    assert judge_pods(AttemptRecords(2, {}), None, []) is None


def test_a_pod_that_only_comes_up_is_not_waited_for_aloud() -> None:
    job: dict[str, Any] = {"metadata": {}, "spec": {"parallelism": 1}}
    creating = pod(
        containerStatuses=[
            {"name": "worker", "state": {"waiting": {"reason": "ContainerCreating"}}}
        ]
    )
    assert waiting(job, [creating], []) is None
    assert waiting(job, [], []) is None, "the controller has not come to it yet"
    refused = waiting(job, [], ["exceeded quota"])
    assert refused is not None
    assert (refused.admitted, refused.reason) == (False, "The cluster refuses pods: exceeded quota")


def test_what_an_init_container_waits_for_and_how_it_failed_is_told() -> None:
    pulled = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    waits = pod(
        initContainerStatuses=[{"name": "check", "state": pulled}],
        containerStatuses=[{"name": "worker", "state": {"waiting": {"reason": "PodInitializing"}}}],
    )
    told = waiting({"metadata": {}, "spec": {"parallelism": 1}}, [waits], [])
    assert told == PodWait(
        "pod p cannot start: ImagePullBackOff: no such image", admitted=True, level="error"
    )
    ended = judge_pods(AttemptRecords(1, {}), failed("BackoffLimitExceeded"), [INIT_FAILED])
    assert ended is not None
    assert (
        ended.message
        == "pod p did not start: its init container check ended with code 9: no devices"
    )


def test_only_a_pod_whose_node_has_begun_nothing_is_stuck() -> None:
    placed = {"metadata": {"name": "p"}, "spec": {"nodeName": "n"}}
    job: dict[str, Any] = {"metadata": {}, "spec": {"parallelism": 1}}
    ready = [{"type": "PodReadyToStartContainers", "status": "True"}]
    mounting = {
        **placed,
        "status": {"containerStatuses": [{"name": "worker", "state": {"waiting": {}}}]},
    }
    warning = f'failed to setup network for sandbox "{"9a" * 32}": plugin type="c"'
    said = 'pod p has not started: failed to setup network for sandbox "…": plugin type="c"'
    assert waiting(job, [mounting], ["old", warning]) == PodWait(said, admitted=True, level="warn")
    for status in ({"conditions": ready}, {"phase": "Failed"}, indexed(0)["status"]):
        assert waiting(job, [{**placed, "status": status}], [warning]) is None
    assert waiting(job, [pod()], [warning]) is None


def test_a_refusal_is_told_in_the_same_words_each_time() -> None:
    """The cluster makes up another name each time that it tries."""
    job: dict[str, Any] = {"metadata": {}, "spec": {"parallelism": 2}}
    text = (
        'Error creating: pods "ft-ab3de5-12-{}" is forbidden: violates PodSecurity '
        '"restricted:v1.31"'
    )
    told = [waiting(job, [], [text.format(name)]) for name in ("0-x7k2p", "0-9qwzt")]
    words = (
        'Error creating: pods "ft-ab3de5-12-0" is forbidden: violates PodSecurity '
        '"restricted:v1.31"'
    )
    assert (
        told == [PodWait(f"The cluster refuses pods: {words}", admitted=False, level="error")] * 2
    ), "no quota: that stays"


def test_what_the_scheduler_says_is_one_sentence_for_a_gang() -> None:
    job: dict[str, Any] = {"metadata": {}, "spec": {"parallelism": 3}}
    taint = "node(s) had untolerated taint {node.kubernetes.io/unreachable: }"
    behind = (
        "no new claims to deallocate, preemption: 0/{0} nodes are available: {0} Preemption "
        "is not helpful for scheduling."
    )
    said = [
        f"0/{n} nodes are available: 1 Insufficient cpu, {n - 1} {taint}. {behind.format(n)}"
        for n in (2, 5)
    ]
    words = f"Insufficient cpu; {taint}"
    assert waiting(job, [unplaced(said[0]), unplaced(said[1]), pod()], []) == PodWait(
        f"The cluster has no place for 2 of 3 pods: {words}", admitted=False
    )
    assert waiting(job, [unplaced(said[0])], []) == waiting(job, [unplaced(said[1])], []), (
        "no event a node that comes or goes"
    )
    other = waiting(job, [unplaced("another scheduler's words")], [])
    assert other is not None
    assert other.reason == "The cluster has no place for 1 of 3 pods: another scheduler's words"


def test_one_pod_that_cannot_start_does_not_hide_that_another_has_no_place() -> None:
    job: dict[str, Any] = {"metadata": {}, "spec": {"parallelism": 2}}
    pulling = pod(
        containerStatuses=[{"name": "worker", "state": {"waiting": {"reason": "ErrImagePull"}}}]
    )
    seen = waiting(job, [{**pulling, "spec": {"nodeName": "n"}}], ["exceeded quota"])
    assert seen is not None
    assert not seen.admitted
    assert places(job, [{**pulling, "spec": {"nodeName": "n"}}, pod()]) == (1, 2)
    alone = waiting(job, [pulling, pulling], [])
    assert alone is not None
    assert (alone.admitted, alone.level) == (True, "error")


def workload(
    *conditions: tuple[str, str, str], active: bool = True, **status: Any
) -> dict[str, Any]:
    """Conditions: type, status, message."""
    listed = [
        {"type": kind, "status": value, "reason": "Why", "message": message}
        for kind, value, message in conditions
    ]
    return {
        "metadata": {"name": "w"},
        "spec": {"active": active},
        "status": {"conditions": listed, **status},
    }


CHECKS = [
    {"name": "nodes", "state": "Pending", "message": "2 of 4 are made"},
    {"name": "budget", "state": "Ready"},
]
WAITS = "The attempt waits for admission in the queue q"


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (None, f"{WAITS}."),
        (workload(), f"{WAITS}."),
        (workload(("QuotaReserved", "False", "too many GPUs")), f"{WAITS}: too many GPUs"),
        (workload(("Evicted", "True", "preempted")), f"{WAITS}: preempted"),
        (
            workload(
                ("QuotaReserved", "True", ""), ("Admitted", "False", ""), admissionChecks=CHECKS
            ),
            f"{WAITS}: it has quota, and waits for nodes (2 of 4 are made).",
        ),
        (
            workload(("QuotaReserved", "True", "")),
            f"{WAITS}: it has quota, and waits for its admission checks.",
        ),
        (
            workload(("QuotaReserved", "True", ""), ("Admitted", "True", "")),
            "The queue q has admitted the attempt.",
        ),
        (
            workload(("Evicted", "True", "deactivated"), active=False),
            "The queue q does not admit the attempt: its Workload was deactivated.",
        ),
    ],
)
def test_what_a_queue_says(seen: dict[str, Any] | None, words: str) -> None:
    job = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "q"}}, "spec": {"suspend": True}}
    assert waiting(job, [], [], seen) == PodWait(words, admitted=False)
