"""What a Job, its pods and its events say about an attempt. Pure: Kubernetes' objects in, words of ours out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_service.jobs.states import Level
from ft_service.launcher.kubernetes.manifests import CONTAINER, QUEUE_NAME
from ft_service.rundir.causes import Cause, cause_of
from ft_service.rundir.documents import ErrorInfo, Exit, ExitReason, Outcome, Result
from ft_service.supervisor.verdict import conclude, exit_of

Object = Mapping[str, Any]

_WAITING_FOR_NOTHING = frozenset({"ContainerCreating", "PodInitializing", ""})
"""Reasons of a waiting container that pass by themselves."""
NEVER_CAME = "RendezvousTimeoutError"
"""torchrun's error for nodes that did not come in time."""
STORE_GONE = "RendezvousConnectionError"
"""torchrun's error where node 0 cannot be reached: it did not come, or it died while the ranks trained."""
_POD_SUFFIX = re.compile(r"(-\d+)-[a-z0-9]{5}(?![a-z0-9-])")
"""Of a pod's name, after its index: another one each time the cluster tries to create it."""
_SCHEDULER = re.compile(
    r"\d+/\d+ nodes are available: (.+?)(?:\.? (?:no new claims to deallocate|preemption: ).*|\.?$)", re.DOTALL
)
"""Of what a scheduler says of a pod: the part that says what nodes lack, separated by commas."""
_COUNT = re.compile(r"^\d+ ")
_INDEX = "batch.kubernetes.io/job-completion-index"
_QUOTA = re.compile("exceeded quota|status unknown for quota")
_RULE = re.compile(r"matching FailJob rule at index (\d+)")
_MAX_TEXT = 400
_OWN = (Cause.REFUSED, Cause.ERROR)
"""Causes that lie in the ranks themselves, whatever became of their pods."""


@dataclass(frozen=True)
class Waiting:
    """Why the pods do not run yet."""

    reason: str
    admitted: bool
    """False: the cluster has no place for all of them yet. True: it has, and something is wrong with them."""
    level: Level = "info"
    """error: what time alone will not mend."""


def is_finished(job: Object) -> bool:
    """The Job has ended; its last pods may still be on their way out."""
    return _true_condition(job, "Complete") is not None or _true_condition(job, "Failed") is not None


def is_leaving(job: Object) -> bool:
    """Somebody has deleted the Job, and it waits for what belongs to it."""
    return bool(job["metadata"].get("deletionTimestamp"))


def is_alive(pod: Object) -> bool:
    """Whether processes of the pod may run. A pod on a node that does not answer may, however long that takes."""
    return _phase(pod) not in ("Succeeded", "Failed")


def has_started(pods: Sequence[Object]) -> bool:
    """Whether any of our supervisors runs, or has run."""
    return any(_container(pod).get("state", {}).keys() & {"running", "terminated"} for pod in pods)


def places(job: Object, pods: Sequence[Object]) -> tuple[int, int]:
    """How many of the Job's pods have a node, and how many there are to be."""
    return sum(map(_has_place, pods)), job.get("spec", {}).get("parallelism", 1)


def is_failing(job: Object) -> bool:
    """The Job is to fail, and its pods are on their way out."""
    return _true_condition(job, "FailureTarget") is not None


def all_started(pods: Sequence[Object]) -> bool:
    """Whether there are pods, and in each of them our supervisor runs, or has run."""
    return bool(pods) and all(has_started([pod]) for pod in pods)


def is_suspended(job: Object) -> bool:
    """Somebody keeps it from having pods, or takes them from it."""
    return bool(job.get("spec", {}).get("suspend"))


def queue_of(job: Object) -> str | None:
    """Kueue's LocalQueue."""
    return job["metadata"].get("labels", {}).get(QUEUE_NAME)


def waiting(job: Object, pods: Sequence[Object], warnings: Sequence[str], workload: Object | None = None) -> Waiting | None:
    """Why an attempt does not run yet; None: it does, or is about to. `warnings`: messages of the Job's own warning events.
    `workload`: Kueue's, of a Job that it keeps suspended."""
    if is_suspended(job):
        return Waiting(_admission(queue_of(job), workload), admitted=False)
    unplaced = [found for pod in pods if (found := _true_condition(pod, "PodScheduled", status="False")) is not None]
    if unplaced:
        wanted = job.get("spec", {}).get("parallelism", 1)
        return Waiting(f"The cluster has no place for {len(unplaced)} of {wanted} pods: {_wanting(unplaced)}", admitted=False)
    if len(pods) < job.get("spec", {}).get("parallelism", 1) and warnings:
        return _refused(warnings[-1])
    for pod in pods:
        state = _container(pod).get("state", {}).get("waiting", {})
        if state.get("reason", "") not in _WAITING_FOR_NOTHING:
            message = f"{state['reason']}: {state.get('message', '')}".rstrip(": ")
            return Waiting(f"{_name(pod)} cannot start: {message[:_MAX_TEXT]}", admitted=True, level="error")
    return None


def _wanting(unplaced: Sequence[Object]) -> str:
    """What nodes lack, in the scheduler's words, once for all pods of a gang.

    Left out are its counts, which change whenever a node comes or goes, and what it says of preemption and claims.
    """
    lacks: set[str] = set()
    for condition in unplaced:
        said = _SCHEDULER.match(_text(condition))
        lacks |= {_COUNT.sub("", lack) for lack in said[1].split(", ")} if said else {_text(condition)}
    return "; ".join(sorted(lacks))[:_MAX_TEXT]


def _refused(warning: str) -> Waiting:
    """The same words each time that the cluster tries again. A quota that is used up passes by itself."""
    text = _POD_SUFFIX.sub(r"\1", warning)[:_MAX_TEXT]
    return Waiting(f"The cluster refuses pods: {text}", admitted=False, level="info" if _QUOTA.search(text) else "error")


def _admission(queue: str | None, workload: Object | None) -> str:
    """What keeps a suspended Job, in Kueue's words where it has any."""
    if queue is None:
        return "The attempt waits for admission: its Job is suspended."
    found = f"The attempt waits for admission in the queue {queue}"
    if workload is None:
        return f"{found}."
    if workload.get("spec", {}).get("active") is False:
        return f"The queue {queue} does not admit the attempt: its Workload was deactivated."
    if _true_condition(workload, "Admitted") is not None:
        return f"The queue {queue} has admitted the attempt."
    if _true_condition(workload, "QuotaReserved") is not None:
        return f"{found}: it has quota, and waits for {_checks(workload)}."
    refused = _true_condition(workload, "QuotaReserved", status="False") or _true_condition(workload, "Evicted")
    return f"{found}: {_text(refused)}" if refused is not None else f"{found}."


def _checks(workload: Object) -> str:
    """Admission checks that are not done, such as nodes that are being made."""
    checks = workload.get("status", {}).get("admissionChecks") or []
    left = [f"{c['name']} ({c.get('message') or c['state']})" for c in checks if c.get("state") != "Ready"]
    return ", ".join(left)[:_MAX_TEXT] or "its admission checks"


def taken_back(job: Object, workload: Object | None) -> str | None:
    """Why Kueue suspends a Job whose pods run; None: it does not."""
    if not is_suspended(job) or workload is None:
        return None
    evicted = _true_condition(workload, "Evicted")
    why = f" ({evicted.get('reason', 'Evicted')}): {_text(evicted)}" if evicted is not None else "."
    return f"The queue {queue_of(job)} takes the attempt's place back{why}"


def disruption(pods: Sequence[Object]) -> str | None:
    """Who takes a pod away (eviction, preemption, a node that is drained or lost), in the cluster's words."""
    for pod in pods:
        condition = _true_condition(pod, "DisruptionTarget")
        if condition is not None:
            return f"{_name(pod)} is taken away ({condition.get('reason', 'disruption')}): {_text(condition)}"
    return None


def judge(
    nodes: int,
    exits: Mapping[int, Exit],
    outcome: Outcome | None,
    result: Result | None,
    job: Object | None,
    pods: Sequence[Object],
    *,
    trained: bool = False,
) -> Exit | None:
    """How an attempt ended whose Job has ended and whose pods are gone. None: nobody left a word, and nobody knows why.

    `trained`: rank 0 has written an event, so that all nodes had met.

    What the ranks agreed on, and an error that a rank raised, come first; then causes that they cannot see (out of memory,
    eviction, the deadline); then the errors of those who only lost their peers or could not stop.
    """
    agreed = result is not None or any(exit.reason is ExitReason.CANCELLED for exit in exits.values())
    said = conclude(nodes, exits, outcome, result) if agreed or outcome is not None or exits else None
    if said is not None and (agreed or (said.reason is ExitReason.STOPPED and outcome is not None) or cause_of(said) in _OWN):
        return said
    killed = _out_of_memory(pods)
    if killed is not None:
        return _killed("out_of_memory", killed)
    failed = _true_condition(job, "Failed") if job else None
    if failed is not None and failed.get("reason") == "DeadlineExceeded":
        return _killed("deadline_exceeded", "The attempt took longer than the cluster's operator allows one attempt to take.")
    taken = disruption(pods)
    if taken is not None:
        return exit_of(ExitReason.STOPPED, taken)
    cause = _evicted(pods) or _missing(nodes, exits, pods, said, trained=trained)
    return cause or said or _by_rule(failed)


def _missing(nodes: int, exits: Mapping[int, Exit], pods: Sequence[Object], said: Exit | None, *, trained: bool) -> Exit | None:
    """How an attempt ended of which some nodes left no record while the others only lost them; None: nothing of the kind.

    Nodes that never ran could not have been trained on: the attempt was stopped. A pod that ran and is gone was killed.
    """
    came = exits.keys() | {_index(pod) for pod in pods if has_started([pod])}
    missing = [index for index in range(nodes) if index not in came]
    only_lost = said is not None and cause_of(said) in (Cause.LOST_PEER, Cause.STOP_TIMEOUT, Cause.SILENT)
    if not missing or not only_lost:
        return None
    named = ", ".join(map(str, missing))
    waits = {_index(pod) for pod in pods if not has_started([pod])}
    if not trained and (_gave_up(exits, NEVER_CAME) or (_gave_up(exits, STORE_GONE) and waits & set(missing))):
        return exit_of(ExitReason.STOPPED, f"Of {nodes} pods these never ran, and the others waited for them in vain: {named}.")
    if not trained and not _gave_up(exits, STORE_GONE):
        return None
    gone = f"Of {nodes} pods these are gone without a record, deleted by force or lost with their node: {named}."
    return _killed("pod_gone", f"{gone} The others lost them: {said.message if said else ''}"[:_MAX_TEXT])


def _gave_up(exits: Mapping[int, Exit], error: str) -> bool:
    return any(error in _words(exit) for exit in exits.values())


def _words(exit: Exit) -> str:
    return f"{exit.message}\n{exit.error.traceback if exit.error else ''}"


def _by_rule(failed: Object | None) -> Exit | None:
    """By the rule of podFailurePolicy that matched: the exit code of a supervisor whose files did not arrive."""
    match = _RULE.search(failed.get("message", "")) if failed else None
    if failed is None or match is None:
        return None
    message = failed["message"][:_MAX_TEXT]
    return exit_of((ExitReason.PERMANENT_ERROR, ExitReason.STOPPED, ExitReason.STOPPED)[int(match[1])], message)


def _killed(code: str, message: str) -> Exit:
    return exit_of(ExitReason.WORKER_KILLED, message, ErrorInfo(code=code, message=message))


def _out_of_memory(pods: Sequence[Object]) -> str | None:
    for pod in pods:
        if _container(pod).get("state", {}).get("terminated", {}).get("reason") == "OOMKilled":
            return f"{_name(pod)} ran out of memory: raise its limit in the pod profile, or make the job smaller."
    return None


def _evicted(pods: Sequence[Object]) -> Exit | None:
    """A pod that the node ended for what it used itself, which is no disruption."""
    for pod in pods:
        if pod.get("status", {}).get("reason") == "Evicted":
            return _killed("evicted", f"{_name(pod)} was evicted: {_text(pod['status'])}")
    return None


def _has_place(pod: Object) -> bool:
    return bool(pod.get("spec", {}).get("nodeName")) or _true_condition(pod, "PodScheduled") is not None


def _index(pod: Object) -> int | None:
    metadata = pod["metadata"]
    found = {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}.get(_INDEX)
    return int(found) if found is not None else None


def _true_condition(object: Object, kind: str, status: str = "True") -> Object | None:
    conditions = object.get("status", {}).get("conditions") or []
    return next((c for c in conditions if c["type"] == kind and c["status"] == status), None)


def _container(pod: Object) -> Object:
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return next((s for s in statuses if s["name"] == CONTAINER), {})


def _text(part: Object) -> str:
    return str(part.get("message") or part.get("reason") or "no reason given")[:_MAX_TEXT]


def _phase(pod: Object) -> str:
    return pod.get("status", {}).get("phase", "Pending")


def _name(pod: Object) -> str:
    return f"pod {pod['metadata']['name']}"
