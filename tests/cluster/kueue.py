"""A queue as Kueue's: Jobs that name it wait, are admitted whole while there is room, and can lose
their place again.
"""

from __future__ import annotations

from tests.cluster.apiserver import Key, Object, Refused, State, merge

QUEUE = "kueue.x-k8s.io/queue-name"
JOB_UID = "kueue.x-k8s.io/job-uid"


class Kueue:
    """Of a State with queues."""

    def __init__(self, state: State) -> None:
        self.state = state

    def turn(self) -> None:
        """One look at everything, as a controller's."""
        if not self.state.queues:
            return
        jobs = {job["metadata"]["uid"]: job for job in self.state.list("jobs")}
        for item in self.state.list("workloads"):
            if item["metadata"]["labels"][JOB_UID] not in jobs:
                self.state.delete(_key(item), 0)
        for job in jobs.values():
            queue = job["metadata"].get("labels", {}).get(QUEUE)
            if queue is not None and job["spec"].get("suspend"):
                self._admit(job, queue)

    def preempt(self, job: Object) -> None:
        """For a workload that is more important."""
        evicted = {
            "type": "Evicted",
            "status": "True",
            "reason": "Preempted",
            "message": "Preempted to accommodate a workload",
        }
        reserved = {
            "type": "QuotaReserved",
            "status": "False",
            "reason": "Pending",
            "message": evicted["message"],
        }
        admitted = {
            "type": "Admitted",
            "status": "False",
            "reason": "NoReservation",
            "message": "It has no reservation",
        }
        self._say(job, evicted, reserved, admitted)
        key = ("jobs", job["metadata"]["namespace"], job["metadata"]["name"])
        self.state.change(key, lambda there: there["spec"].update(suspend=True))

    def _admit(self, job: Object, queue: str) -> None:
        metadata = job["metadata"]
        if _workload_key(job) not in self.state.objects:
            body = {
                "metadata": {"name": _workload_key(job)[2], "labels": {JOB_UID: metadata["uid"]}}
            }
            try:
                self.state.create(
                    "workloads",
                    metadata["namespace"],
                    {**body, "spec": {"queueName": queue, "active": True}},
                )
            except Refused:  # its namespace goes
                return
        waiting = {"type": "QuotaReserved", "status": "False"}
        if queue not in self.state.queues:
            self._say(
                job,
                {
                    **waiting,
                    "reason": "Inadmissible",
                    "message": f"LocalQueue {queue} doesn't exist",
                },
            )
            return
        free = self.state.queues[queue] - self._used(queue)
        wanted = job["spec"]["parallelism"]
        if wanted > free:
            text = (
                "couldn't assign flavors to pod set main: insufficient unused quota, "
                f"{wanted - free} more needed"
            )
            self._say(job, {**waiting, "reason": "Pending", "message": text})
            return
        done = {"status": "True", "reason": "Admitted", "message": ""}
        kept = {**done, "type": "Evicted", "status": "False"}
        self._say(job, {**done, "type": "QuotaReserved"}, {**done, "type": "Admitted"}, kept)
        self.state.change(
            ("jobs", metadata["namespace"], metadata["name"]),
            lambda there: there["spec"].update(suspend=False),
        )

    def _used(self, queue: str) -> int:
        mine = [
            job
            for job in self.state.list("jobs")
            if job["metadata"].get("labels", {}).get(QUEUE) == queue
        ]
        return sum(job["spec"]["parallelism"] for job in mine if not job["spec"].get("suspend"))

    def _say(self, job: Object, *conditions: Object) -> None:
        self.state.change(
            _workload_key(job),
            lambda there: merge(there["status"], {"conditions": list(conditions)}),
        )


def _workload_key(job: Object) -> Key:
    return "workloads", job["metadata"]["namespace"], f"job-{job['metadata']['name']}"


def _key(item: Object) -> Key:
    return "workloads", item["metadata"]["namespace"], item["metadata"]["name"]
