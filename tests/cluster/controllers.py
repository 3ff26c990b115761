"""What a control plane does by itself: makes pods of Indexed Jobs, ends Jobs, gives pods nodes,
removes what lost its owner.
"""

from __future__ import annotations

import calendar
import copy
import threading
import time
import uuid
from contextlib import suppress

from tests.cluster.apiserver import TERMINAL, TRACKING, Key, Object, Refused, State, merge, now
from tests.cluster.kueue import Kueue

INDEX = "batch.kubernetes.io/job-completion-index"
JOB_NAME = "batch.kubernetes.io/job-name"


class Controllers:
    """All of them in one thread, which looks at everything after each change."""

    def __init__(self, state: State, *, schedules: bool = True) -> None:
        """`schedules`: False: as a control plane without a scheduler."""
        self.state = state
        self.stopped = threading.Event()
        self._schedules = schedules
        self._kueue = Kueue(state)
        self._counted: dict[str, list[Object]] = {}
        """Uid of a Job → its pods that have ended, as they were then."""
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.stopped.set()
        with self.state.changed:
            self.state.changed.notify_all()
        self._thread.join(10)

    def _run(self) -> None:
        version = -1
        while not self.stopped.is_set():
            with self.state.changed:
                if version == self.state.version:
                    self.state.changed.wait(0.2)
                version = self.state.version
                self._kueue.turn()
                for job in self.state.list("jobs"):
                    self._job(job)
                for pod in self.state.list("pods"):
                    if self._schedules:
                        self._schedule(pod)
                    self._give_up(pod)
                for quota in self.state.list("resourcequotas"):
                    self.state.change(
                        _key("resourcequotas", quota),
                        lambda there: there["status"].update(there["spec"]),
                    )
                self._collect()
                self._empty_namespaces()

    # Jobs
    # ------------------------------------------------------------------------------

    def _job(self, job: Object) -> None:
        key = _key("jobs", job)
        if _condition(job, "Complete") or _condition(job, "Failed"):
            self._expire(key, job)
            return
        pods = [pod for pod in self.state.list("pods", key[1]) if _owned(pod, job)]
        active = [pod for pod in pods if pod["status"]["phase"] not in TERMINAL]
        ended = self._count(job, pods)
        if job["spec"].get("suspend"):
            self._suspend(key, active)
            return
        if _condition(job, "Suspended"):
            self._set(key, {"type": "Suspended", "status": "False", "reason": "JobResumed"})
        self.state.change(key, lambda there: there["status"].setdefault("startTime", now()))
        failure = _condition(job, "FailureTarget") or self._failure(job, ended)
        if failure:
            self._fail(key, failure, active)
            return
        done = {_index(pod) for pod in ended if pod["status"]["phase"] == "Succeeded"}
        if len(done) == job["spec"]["completions"]:
            self._set(
                key,
                {"type": "SuccessCriteriaMet", "status": "True", "reason": "CompletionsReached"},
            )
            if not active:
                self._end(
                    key, {"type": "Complete", "status": "True", "reason": "CompletionsReached"}
                )
            return
        there = done | {_index(pod) for pod in active}
        for index in range(job["spec"]["completions"]):
            if index not in there:
                self._create_pod(job, index)

    def _count(self, job: Object, pods: list[Object]) -> list[Object]:
        """Its pods that have ended.

        Each is counted once, and may go then; with `podReplacementPolicy: Failed` one that is only
        on its way out has not ended.
        """
        ended = self._counted.setdefault(job["metadata"]["uid"], [])
        for pod in pods:
            if (
                TRACKING in pod["metadata"].get("finalizers", [])
                and pod["status"]["phase"] in TERMINAL
            ):
                ended.append(pod)
                self.state.change(_key("pods", pod), _untrack)
        return ended

    def _failure(self, job: Object, ended: list[Object]) -> Object | None:
        if self._overdue(job):
            return {
                "type": "FailureTarget",
                "status": "True",
                "reason": "DeadlineExceeded",
                "message": "Job was active too long",
            }
        for pod in ended:
            if pod["status"]["phase"] == "Failed":
                reason, message = _judged(job, pod)
                return {
                    "type": "FailureTarget",
                    "status": "True",
                    "reason": reason,
                    "message": message,
                }
        return None

    def _overdue(self, job: Object) -> bool:
        limit = job["spec"].get("activeDeadlineSeconds")
        start = job["status"].get("startTime")
        return bool(limit and start) and time.time() - _seconds(start) > limit

    def _fail(self, key: Key, failure: Object, active: list[Object]) -> None:
        self._set(key, failure)
        for pod in active:
            if "deletionTimestamp" not in pod["metadata"]:
                self.state.delete(_key("pods", pod), None)
        if not active:
            self._end(key, {**failure, "type": "Failed"})

    def _end(self, key: Key, condition: Object) -> None:
        self._set(key, condition)
        self.state.change(key, lambda job: job["status"].setdefault("completionTime", now()))

    def _expire(self, key: Key, job: Object) -> None:
        ttl = job["spec"].get("ttlSecondsAfterFinished")
        if (
            ttl is not None
            and time.time() - _seconds(job["status"].get("completionTime", now())) >= ttl
        ):
            self.state.delete(key, 0)

    def _suspend(self, key: Key, active: list[Object]) -> None:
        for pod in active:
            if "deletionTimestamp" not in pod["metadata"]:
                self.state.delete(_key("pods", pod), None)
        self._set(
            key,
            {
                "type": "Suspended",
                "status": "True",
                "reason": "JobSuspended",
                "message": "Job suspended",
            },
        )

    def _create_pod(self, job: Object, index: int) -> None:
        metadata = job["metadata"]
        template = copy.deepcopy({"metadata": {}, **job["spec"]["template"]})
        name = metadata["name"]
        labels = {**template["metadata"].get("labels", {}), JOB_NAME: name, INDEX: str(index)}
        annotations = {**template["metadata"].get("annotations", {}), INDEX: str(index)}
        template["spec"]["hostname"] = f"{name}-{index}"
        pod = {
            "metadata": {
                "name": f"{name}-{index}-{uuid.uuid4().hex[:5]}",
                "labels": labels,
                "annotations": annotations,
                "finalizers": [TRACKING],
                "ownerReferences": [
                    {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": metadata["uid"]}
                ],
            },
            "spec": template["spec"],
        }
        try:
            self.state.create("pods", metadata["namespace"], pod)
        except Refused as error:
            self._warn(job, f"Error creating: {error.message}")

    def _warn(self, job: Object, message: str) -> None:
        metadata = job["metadata"]
        event = {
            "metadata": {"name": f"{metadata['name']}.failed-create"},
            "involvedObject": {
                "kind": "Job",
                "name": metadata["name"],
                "namespace": metadata["namespace"],
            },
            "type": "Warning",
            "reason": "FailedCreate",
            "message": message,
            "lastTimestamp": now(),
        }
        with suppress(Refused):  # there already
            self.state.create("events", metadata["namespace"], event)

    def _set(self, key: Key, condition: Object) -> None:
        def put(job: Object) -> None:
            conditions = job["status"].setdefault("conditions", [])
            if not any(
                c["type"] == condition["type"] and c["status"] == condition["status"]
                for c in conditions
            ):
                conditions[:] = [c for c in conditions if c["type"] != condition["type"]] + [
                    condition
                ]

        self.state.change(key, put)

    # Nodes
    # ------------------------------------------------------------------------------

    def _schedule(self, pod: Object) -> None:
        if pod["spec"].get("nodeName") or pod["metadata"].get("deletionTimestamp"):
            return
        for node in self.state.list("nodes"):
            if self._fits(pod, node):
                self.state.change(_key("pods", pod), lambda there, node=node: _bind(there, node))
                return
        unable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        unable["message"] = (
            "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
        )
        self.state.change(
            _key("pods", pod), lambda there: merge(there["status"], {"conditions": [unable]})
        )

    def _give_up(self, pod: Object) -> None:
        """Of a pod that no node has, none says that it is gone."""
        if pod["metadata"].get("deletionTimestamp") and not pod["spec"].get("nodeName"):
            self.state.change(
                _key("pods", pod), lambda there: there["status"].update(phase="Failed")
            )

    def _fits(self, pod: Object, node: Object) -> bool:
        tolerated = {toleration["key"] for toleration in pod["spec"].get("tolerations", [])}
        if any(taint["key"] not in tolerated for taint in node["spec"].get("taints", [])):
            return False
        labels = node["metadata"].get("labels", {})
        return all(
            labels.get(name) == value for name, value in pod["spec"].get("nodeSelector", {}).items()
        )

    def _collect(self) -> None:
        """Objects without their owner are deleted too; a pod whose Job is gone is not kept for
        it.
        """
        there = {item["metadata"]["uid"] for item in self.state.list("jobs")}
        for plural in ("pods", "services", "networkpolicies"):
            for item in self.state.list(plural):
                owners = item["metadata"].get("ownerReferences", [])
                if not owners or any(owner["uid"] in there for owner in owners):
                    continue
                if "deletionTimestamp" not in item["metadata"]:
                    self.state.delete(_key(plural, item), None)
                elif TRACKING in item["metadata"].get("finalizers", []):
                    self.state.change(_key(plural, item), _untrack)

    def _empty_namespaces(self) -> None:
        for namespace in self.state.list("namespaces"):
            if "deletionTimestamp" not in namespace["metadata"]:
                continue
            name = namespace["metadata"]["name"]
            for key in [key for key in self.state.objects if key[1] == name]:
                if "deletionTimestamp" not in self.state.objects[key]["metadata"]:
                    self.state.delete(key, None)
            if not any(key[1] == name for key in self.state.objects):
                self.state.delete(("namespaces", "", name), 0)


def _untrack(pod: Object) -> None:
    pod["metadata"]["finalizers"] = [
        name for name in pod["metadata"].get("finalizers", []) if name != TRACKING
    ]


def _bind(pod: Object, node: Object) -> None:
    pod["spec"]["nodeName"] = node["metadata"]["name"]
    merge(pod["status"], {"conditions": [{"type": "PodScheduled", "status": "True"}]})


def _judged(job: Object, pod: Object) -> tuple[str, str]:
    """Reason and message of a Job that a failed pod ends."""
    where = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    for number, rule in enumerate(job["spec"].get("podFailurePolicy", {}).get("rules", [])):
        matching = f"matching {rule['action']} rule at index {number}"
        for status in pod["status"].get("containerStatuses", []) if "onExitCodes" in rule else []:
            code = status.get("state", {}).get("terminated", {}).get("exitCode")
            if code in rule["onExitCodes"]["values"]:
                return (
                    "PodFailurePolicy",
                    f"Container {status['name']} for pod {where} failed with exit code {code} "
                    f"{matching}",
                )
        kinds = {c["type"] for c in pod["status"].get("conditions", []) if c["status"] == "True"}
        if any(wanted["type"] in kinds for wanted in rule.get("onPodConditions", [])):
            return "PodFailurePolicy", f"Pod {where} has condition DisruptionTarget {matching}"
    return "BackoffLimitExceeded", "Job has reached the specified backoff limit"


def _condition(item: Object, kind: str) -> Object | None:
    return next(
        (
            c
            for c in item["status"].get("conditions", [])
            if c["type"] == kind and c["status"] == "True"
        ),
        None,
    )


def _owned(pod: Object, job: Object) -> bool:
    return any(
        owner["uid"] == job["metadata"]["uid"]
        for owner in pod["metadata"].get("ownerReferences", [])
    )


def _index(pod: Object) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def _key(plural: str, item: Object) -> Key:
    return plural, item["metadata"].get("namespace", ""), item["metadata"]["name"]


def _seconds(stamp: str) -> float:
    return float(calendar.timegm(time.strptime(stamp, "%Y-%m-%dT%H:%M:%SZ")))
