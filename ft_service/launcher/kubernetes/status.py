"""State of an attempt by its Job, pods and events.

Pure: Kubernetes' objects in, the service's terms out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from signal import SIGKILL, SIGTERM
from typing import Any

from ft_service.jobs.states import Level
from ft_service.launcher.kubernetes.manifests import CONTAINER, QUEUE_NAME
from ft_service.rundir.attempt_outcome import AttemptRecords, conclude, exit_of, is_conclusive
from ft_service.rundir.documents import ErrorInfo, Exit, ExitReason
from ft_service.rundir.failure_origin import Cause, cause_of

Object = Mapping[str, Any]

_WAITING_FOR_NOTHING = frozenset({"ContainerCreating", "PodInitializing", ""})
"""Reasons of a waiting container that need no report."""
NEVER_CAME = "RendezvousTimeoutError"
"""torchrun's error for nodes that did not join in time."""
STORE_GONE = "RendezvousConnectionError"
"""torchrun's error if node 0 cannot be reached: it did not start, or it died during training."""
_SANDBOX = re.compile(r"\b[0-9a-f]{32,64}\b")
"""Id of a pod's sandbox in messages about its network, another one at each try."""
_NO_START = frozenset({"StartError", "ContainerCannotRun"})
"""Reasons of a container's end for which its command never ran: containerd's, and Docker's."""
_FIRST_SIGNAL = 128
"""Exit codes from here on are those of signals."""
_POD_SUFFIX = re.compile(r"(-\d+)-[a-z0-9]{5}(?![a-z0-9-])")
"""Suffix of a pod's name after its index, which differs each time the cluster tries to create
it.
"""
_SCHEDULER = re.compile(
    r"\d+/\d+ nodes are available: (.+?)(?:\.? (?:no new claims to deallocate|preemption: "
    r").*|\.?$)",
    re.DOTALL,
)
"""Scheduler's message on a pod; the group lists what nodes lack, separated by commas."""
_COUNT = re.compile(r"^\d+ ")
_INDEX = "batch.kubernetes.io/job-completion-index"
_QUOTA = re.compile("exceeded quota|status unknown for quota")
_RULE = re.compile(r"matching FailJob rule at index (\d+)")
_MAX_TEXT = 400


@dataclass(frozen=True)
class PodWait:
    """Reason for which the pods do not run yet."""

    reason: str
    admitted: bool
    """Whether the cluster has a place for all of them, so that something else is wrong."""
    level: Level = "info"
    """"error": somebody has to intervene."""


def is_finished(job: Object) -> bool:
    """Return whether the Job has ended; its last pods may still be terminating."""
    return (
        _true_condition(job, "Complete") is not None or _true_condition(job, "Failed") is not None
    )


def is_leaving(job: Object) -> bool:
    """Return whether the Job was deleted and waits for the objects that it owns."""
    return bool(job["metadata"].get("deletionTimestamp"))


def is_alive(pod: Object) -> bool:
    """Return whether processes of the pod may run, as they may on a node that does not answer,
    however long.
    """
    return _phase(pod) not in ("Succeeded", "Failed")


def has_started(pods: Sequence[Object]) -> bool:
    """Return whether any supervisor runs, or has run."""
    return any(_container(pod).get("state", {}).keys() & {"running", "terminated"} for pod in pods)


def places(job: Object, pods: Sequence[Object]) -> tuple[int, int]:
    """Return how many of the Job's pods have a node, and how many are wanted."""
    return sum(map(_has_place, pods)), job.get("spec", {}).get("parallelism", 1)


def is_failing(job: Object) -> bool:
    """Return whether the Job is about to fail, while its pods terminate."""
    return _true_condition(job, "FailureTarget") is not None


def all_started(pods: Sequence[Object]) -> bool:
    """Return whether there are pods, and a supervisor runs, or has run, in each."""
    return bool(pods) and all(has_started([pod]) for pod in pods)


def is_suspended(job: Object) -> bool:
    """Return whether the Job is suspended, which prevents or removes its pods."""
    return bool(job.get("spec", {}).get("suspend"))


def queue_of(job: Object) -> str | None:
    """Return the Job's LocalQueue of Kueue."""
    return job["metadata"].get("labels", {}).get(QUEUE_NAME)


def waiting(
    job: Object, pods: Sequence[Object], warnings: Sequence[str], workload: Object | None = None
) -> PodWait | None:
    """Return why an attempt does not run yet; None: it does, or is about to.

    `warnings`: messages of the warning events of the Job, or of the pod that is `stuck`.
    `workload`: Kueue's, of a Job that it keeps suspended.
    """
    if is_suspended(job):
        return PodWait(_admission(queue_of(job), workload), admitted=False)
    unplaced = [
        item
        for pod in pods
        if (item := _true_condition(pod, "PodScheduled", status="False")) is not None
    ]
    if unplaced:
        wanted = job.get("spec", {}).get("parallelism", 1)
        return PodWait(
            f"The cluster has no place for {len(unplaced)} of {wanted} pods: {_lacking(unplaced)}",
            admitted=False,
        )
    if len(pods) < job.get("spec", {}).get("parallelism", 1) and warnings:
        return _refused(warnings[-1])
    for pod in pods:
        for container in (*_init_containers(pod), _container(pod)):
            state = container.get("state", {}).get("waiting", {})
            if state.get("reason", "") not in _WAITING_FOR_NOTHING:
                message = f"{state['reason']}: {state.get('message', '')}".rstrip(": ")
                return PodWait(
                    f"{_name(pod)} cannot start: {message[:_MAX_TEXT]}",
                    admitted=True,
                    level="error",
                )
    if warnings and (name := stuck(pods)) is not None:
        return PodWait(
            f"pod {name} has not started: {_SANDBOX.sub('…', warnings[-1])[:_MAX_TEXT]}",
            admitted=True,
            level="warn",
        )
    return None


def stuck(pods: Sequence[Object]) -> str | None:
    """Return the name of a pod that has a node, none of whose containers has begun; None: there is
    none.
    """
    placed = [
        pod
        for pod in pods
        if _has_place(pod)
        and is_alive(pod)
        and not _true_condition(pod, "PodReadyToStartContainers")
    ]
    begun = {"running", "terminated"}
    for pod in placed:
        if not any(
            c.get("state", {}).keys() & begun for c in (*_init_containers(pod), _container(pod))
        ):
            return pod["metadata"]["name"]
    return None


def without_kueue(job: Object) -> PodWait:
    """Return why a Job is suspended in a cluster without Kueue: for ever."""
    message = (
        f"Nothing admits the attempt: the pod profile names the queue {queue_of(job)}, and this "
        "cluster has no Kueue of a known"
        " version (kueue.x-k8s.io/v1beta2). The operator has to install Kueue 0.15 or newer, or "
        "to leave out queue."
    )
    return PodWait(message, admitted=False, level="error")


def _lacking(unplaced: Sequence[Object]) -> str:
    """Return what nodes lack, in the scheduler's words, once for all pods of a gang.

    Left out are its counts, which change whenever a node is added or removed, and its remarks on
    preemption and claims.
    """
    lacks: set[str] = set()
    for condition in unplaced:
        match = _SCHEDULER.match(_text(condition))
        lacks |= (
            {_COUNT.sub("", lack) for lack in match[1].split(", ")} if match else {_text(condition)}
        )
    return "; ".join(sorted(lacks))[:_MAX_TEXT]


def _refused(warning: str) -> PodWait:
    """Return a reason with the same text at each retry of the cluster.

    An exhausted quota is not an error: it frees up.
    """
    text = _POD_SUFFIX.sub(r"\1", warning)[:_MAX_TEXT]
    return PodWait(
        f"The cluster refuses pods: {text}",
        admitted=False,
        level="info" if _QUOTA.search(text) else "error",
    )


def _admission(queue: str | None, workload: Object | None) -> str:
    """Return why a Job is suspended, in Kueue's words if it gives any."""
    if queue is None:
        return "The attempt waits for admission: its Job is suspended."
    waits = f"The attempt waits for admission in the queue {queue}"
    if workload is None:
        return f"{waits}."
    if workload.get("spec", {}).get("active") is False:
        return f"The queue {queue} does not admit the attempt: its Workload was deactivated."
    if _true_condition(workload, "Admitted") is not None:
        return f"The queue {queue} has admitted the attempt."
    if _true_condition(workload, "QuotaReserved") is not None:
        return f"{waits}: it has quota, and waits for {_checks(workload)}."
    refused = _true_condition(workload, "QuotaReserved", status="False") or _true_condition(
        workload, "Evicted"
    )
    return f"{waits}: {_text(refused)}" if refused is not None else f"{waits}."


def _checks(workload: Object) -> str:
    """Return the unfinished admission checks, such as the provisioning of nodes."""
    checks = workload.get("status", {}).get("admissionChecks") or []
    left = [
        f"{c['name']} ({c.get('message') or c['state']})"
        for c in checks
        if c.get("state") != "Ready"
    ]
    return ", ".join(left)[:_MAX_TEXT] or "its admission checks"


def taken_back(job: Object, workload: Object | None) -> str | None:
    """Return why Kueue suspends a Job whose pods run; None: it does not."""
    if not is_suspended(job) or workload is None:
        return None
    evicted = _true_condition(workload, "Evicted")
    why = f" ({evicted.get('reason', 'Evicted')}): {_text(evicted)}" if evicted is not None else "."
    return f"The queue {queue_of(job)} takes the attempt's place back{why}"


def disruption(pods: Sequence[Object]) -> str | None:
    """Return the reason for which a pod is removed (eviction, preemption, a node that is drained or
    lost), in the cluster's words.
    """
    for pod in pods:
        condition = _true_condition(pod, "DisruptionTarget")
        if condition is not None:
            return (
                f"{_name(pod)} is taken away ({condition.get('reason', 'disruption')}): "
                f"{_text(condition)}"
            )
    return None


def taken_away(pods: Sequence[Object]) -> str | None:
    """Return why the cluster took a pod away, or its node did not run it; None: neither."""
    return disruption(pods) or _refused_by_node(pods)


def judge_pods(
    records: AttemptRecords, job: Object | None, pods: Sequence[Object], *, waited: bool = False
) -> Exit | None:
    """Return the exit record of an attempt whose Job has ended and whose pods are gone; None: there
    is no evidence. `waited`: whether it had no place for all of its pods when it was last observed.

    What `is_conclusive` comes first; then causes that ranks cannot see (out of memory, eviction,
    the deadline); then errors of ranks that only lost their peers or could not stop.
    """
    reported = None if records.is_empty else conclude(records)
    if reported is not None and is_conclusive(reported, records):
        return reported
    killed = _out_of_memory(pods)
    if killed is not None:
        return _killed("out_of_memory", killed)
    failed = _true_condition(job, "Failed") if job else None
    if job is not None and failed is not None and failed.get("reason") == "DeadlineExceeded":
        if waited and not records.trained:
            limit = job.get("spec", {}).get("activeDeadlineSeconds")
            why = f"when its time was over (active_deadline_seconds = {limit} of the pod profile)."
            return exit_of(ExitReason.STOPPED, f"Not all of the attempt's pods had a place {why}")
        return _killed(
            "deadline_exceeded",
            "The attempt took longer than the cluster's operator allows one attempt to take.",
        )
    disrupted = disruption(pods)
    if disrupted is not None:
        return exit_of(ExitReason.STOPPED, disrupted)
    evicted = _evicted(pods) or _not_begun(records, pods)
    return (
        evicted
        or _missing_nodes(records, pods, reported)
        or reported
        or _by_rule(failed)
        or _without_record(pods)
    )


def _missing_nodes(
    records: AttemptRecords, pods: Sequence[Object], reported: Exit | None
) -> Exit | None:
    """Return the exit record of an attempt whose nodes only report the loss of nodes without a
    record; None: it is another case.

    If those nodes never ran, the attempt was stopped, since it cannot have trained. If they ran and
    are gone, they were killed.
    """
    started = records.exits.keys() | {_index(pod) for pod in pods if has_started([pod])}
    missing = [index for index in range(records.nodes) if index not in started]
    if (
        not missing
        or reported is None
        or cause_of(reported) not in (Cause.LOST_PEER, Cause.STOP_TIMEOUT, Cause.SILENT)
    ):
        return None
    waiting = {_index(pod) for pod in pods if not has_started([pod])}
    store_gone = _mentions(records.exits, STORE_GONE)
    named = f"Of {records.nodes} pods these {{}}: {', '.join(map(str, missing))}."
    if not records.trained and (
        _mentions(records.exits, NEVER_CAME) or (store_gone and waiting & set(missing))
    ):
        return exit_of(
            ExitReason.STOPPED, named.format("never ran, and the others waited for them in vain")
        )
    if not records.trained and not store_gone:
        return None
    gone = named.format("are gone without a record, deleted by force or lost with their node")
    return _killed("pod_gone", f"{gone} The others lost them: {reported.message}"[:_MAX_TEXT])


def _mentions(exits: Mapping[int, Exit], error: str) -> bool:
    return any(
        error in f"{exit.message}\n{exit.error.traceback if exit.error else ''}"
        for exit in exits.values()
    )


def _by_rule(failed: Object | None) -> Exit | None:
    """Return an exit record by the rule of podFailurePolicy that matched a supervisor's exit code,
    if its files did not arrive.
    """
    match = _RULE.search(failed.get("message", "")) if failed else None
    if failed is None or match is None:
        return None
    message = failed["message"][:_MAX_TEXT]
    return exit_of(
        (ExitReason.PERMANENT_ERROR, ExitReason.STOPPED, ExitReason.STOPPED)[int(match[1])], message
    )


def _killed(code: str, message: str) -> Exit:
    """Return an exit record; reasons.retry_of reads its code."""
    return exit_of(ExitReason.WORKER_KILLED, message, ErrorInfo(code=code, message=message))


def end_of(pod: Object) -> str | None:
    """Return how a pod's container ended, as a clause that follows "it"; None: the cluster does not
    say.
    """
    ended = _container(pod).get("state", {}).get("terminated")
    if ended is None:
        return None
    return (
        "ran out of memory"
        if ended.get("reason") == "OOMKilled"
        else f"ended with code {ended.get('exitCode')}"
    )


def was_killed(pod: Object) -> bool:
    """Return whether a pod's container was ended from outside, or because its memory ran out."""
    ended = _container(pod).get("state", {}).get("terminated") or {}
    return ended.get("reason") == "OOMKilled" or ended.get("exitCode") in (
        _FIRST_SIGNAL + SIGKILL,
        _FIRST_SIGNAL + SIGTERM,
    )


def _out_of_memory(pods: Sequence[Object]) -> str | None:
    for pod in pods:
        if _container(pod).get("state", {}).get("terminated", {}).get("reason") == "OOMKilled":
            return (
                f"{_name(pod)} ran out of memory: raise its limit in the pod profile, or make "
                "the job smaller."
            )
    return None


def _evicted(pods: Sequence[Object]) -> Exit | None:
    """Return the exit record for a pod that its node evicted because of its own use of
    resources.
    """
    for pod in pods:
        if pod.get("status", {}).get("reason") == "Evicted":
            return _killed("evicted", f"{_name(pod)} was evicted: {_text(pod['status'])}")
    return None


def _not_begun(records: AttemptRecords, pods: Sequence[Object]) -> Exit | None:
    """Return the exit record of an attempt of which a pod failed before its supervisor ran; None:
    there is no such pod.

    A node that refuses a pod, such as for a GPU that it has lost, is the cluster's affair: the
    attempt counts as stopped. An init container that fails, or a command that is not in the image,
    does not mend itself.
    """
    for pod in pods:
        if _phase(pod) != "Failed" or _index(pod) in records.exits:
            continue
        for container in _init_containers(pod):
            ended = container.get("state", {}).get("terminated", {})
            if ended.get("exitCode"):
                return _failed(
                    f"{_name(pod)} did not start: its init container {container['name']} "
                    f"{_end(ended)}"
                )
        ended = _container(pod).get("state", {}).get("terminated", {})
        if ended.get("reason") in _NO_START:
            return _failed(f"{_name(pod)} could not be started: {_text(ended)}")
    refused = _refused_by_node([pod for pod in pods if _index(pod) not in records.exits])
    return None if refused is None else exit_of(ExitReason.STOPPED, refused)


def _refused_by_node(pods: Sequence[Object]) -> str | None:
    for pod in pods:
        ended = _container(pod).get("state", {}).get("terminated", {})
        if _phase(pod) == "Failed" and not ended and pod.get("status", {}).get("reason"):
            return f"{_name(pod)} was not run by its node: {_text(pod['status'])}"
    return None


def _without_record(pods: Sequence[Object]) -> Exit | None:
    """Return the exit record of an attempt whose supervisor ended by itself without one, as if its
    package is missing.
    """
    for pod in pods:
        ended = _container(pod).get("state", {}).get("terminated", {})
        if 0 < ended.get("exitCode", 0) < _FIRST_SIGNAL:
            return _failed(f"The supervisor of {_name(pod)} left no record: it {_end(ended)}")
    return None


def _failed(message: str) -> Exit:
    return exit_of(ExitReason.LAUNCH_FAILED, message, ErrorInfo(code="pod_failed", message=message))


def _end(ended: Object) -> str:
    """Return how a container ended, with the end of its output (terminationMessagePolicy)."""
    said = str(ended.get("message") or "").strip()[-_MAX_TEXT:]
    return f"ended with code {ended.get('exitCode')}{f': {said}' if said else '.'}"


def _has_place(pod: Object) -> bool:
    return (
        bool(pod.get("spec", {}).get("nodeName"))
        or _true_condition(pod, "PodScheduled") is not None
    )


def _index(pod: Object) -> int | None:
    metadata = pod["metadata"]
    index = {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}.get(_INDEX)
    return int(index) if index is not None else None


def _true_condition(object: Object, kind: str, status: str = "True") -> Object | None:
    conditions = object.get("status", {}).get("conditions") or []
    return next((c for c in conditions if c["type"] == kind and c["status"] == status), None)


def _init_containers(pod: Object) -> Sequence[Object]:
    return pod.get("status", {}).get("initContainerStatuses") or []


def _container(pod: Object) -> Object:
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return next((s for s in statuses if s["name"] == CONTAINER), {})


def _text(part: Object) -> str:
    return str(part.get("message") or part.get("reason") or "no reason given")[:_MAX_TEXT]


def _phase(pod: Object) -> str:
    return pod.get("status", {}).get("phase", "Pending")


def _name(pod: Object) -> str:
    return f"pod {pod['metadata']['name']}"
