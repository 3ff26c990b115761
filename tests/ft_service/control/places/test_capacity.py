from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ft_service.control.places.capacity import capacity_of, refuse_too_many, total_slots
from ft_service.errors import SpecError
from ft_service.plan.machines import USABLE, usable_bytes
from ft_service.settings import Settings
from ft_service.spec import DistributedOptions
from tests.support.cluster_settings import cluster_settings
from tests.support.reconciling import spec_of


@pytest.mark.parametrize(
    ("nodes", "ranks", "param"),
    [
        (1, 5, "distributed.nproc_per_node"),
        (3, 4, "distributed.nnodes"),
        (2, 4, None),
        (8, 1, None),
    ],
)
def test_a_cluster_refuses_what_it_could_never_run(
    tmp_path: Path, nodes: int, ranks: int, param: str | None
) -> None:
    capacity = capacity_of(cluster_settings(tmp_path))
    assert (capacity.gpus, capacity.slots) == (4, 8)
    spec = spec_of("j", distributed=DistributedOptions(nnodes=nodes, nproc_per_node=ranks))
    if param is None:
        refuse_too_many(spec, capacity)
        return
    with pytest.raises(SpecError) as refused:
        refuse_too_many(spec, capacity)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("limits", "memory"),
    [
        ({"memory": "8Gi"}, 8 * 2**30),
        ({"memory": "500M"}, 500 * 10**6),
        ({"memory": 2**31}, 2**31),
        ({}, None),
    ],
)
def test_pods_without_gpus_have_the_memory_that_they_are_given(
    tmp_path: Path, limits: dict[str, Any], memory: int | None
) -> None:
    """Not that of the pod that asks."""
    settings = cluster_settings(tmp_path, hardware="cpu", gpu_resource=None, limits=limits)
    machine = capacity_of(settings).machine
    assert machine is not None
    assert machine.memory == memory


@pytest.mark.parametrize("ranks", [1, 4])
def test_memory_of_each_rank_is_a_ranks_whatever_their_number(tmp_path: Path, ranks: int) -> None:
    limits = {"limits": {"memory": "8Gi"}, "limits_per_rank": {"memory": "2Gi"}}
    settings = cluster_settings(tmp_path, hardware="cpu", gpu_resource=None, **limits)
    machine = capacity_of(settings).machine
    assert machine is not None
    usable = usable_bytes(
        machine, spec_of("j", distributed=DistributedOptions(nproc_per_node=ranks))
    )
    assert usable == int((8 // ranks + 2) * 2**30 * USABLE)


def test_with_a_queue_the_cluster_counts(tmp_path: Path) -> None:
    spec = spec_of("j", distributed=DistributedOptions(nnodes=100, nproc_per_node=4))
    refuse_too_many(spec, capacity_of(cluster_settings(tmp_path, queue="team-a")))


def test_each_profile_has_a_capacity_and_a_host_of_its_own(tmp_path: Path) -> None:
    profiles = {
        "big": {"ranks_per_node": 8, "slots": 16},
        "cpu": {"gpu_resource": None, "projects": ["proj_1"], "slots": 3},
    }
    settings = cluster_settings(tmp_path, profiles=profiles)
    big = capacity_of(settings)
    cpu = capacity_of(settings, "cpu", "proj_1")
    assert [(c.gpus, c.slots, c.profile, c.host) for c in (big, cpu)] == [
        (8, 16, "big", "kubernetes/big"),
        (0, 3, "cpu", "kubernetes/cpu"),
    ]
    assert total_slots(settings) == 19
    with pytest.raises(SpecError, match="a pod of the profile cpu runs at most 4 ranks"):
        refuse_too_many(spec_of("j", distributed=DistributedOptions(nproc_per_node=5)), cpu)
    with pytest.raises(SpecError, match="Choose from big"):
        capacity_of(settings, "cpu", "proj_2")
    assert capacity_of(cluster_settings(tmp_path)).host is None


def test_where_no_profiles_are_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError,
        match=r"distributed.profile = 'h100': this service does not run jobs in a cluster",
    ):
        capacity_of(Settings(home=tmp_path), "h100")


def test_without_a_cluster_a_job_has_one_host(tmp_path: Path) -> None:
    spec = spec_of("j", distributed=DistributedOptions(nnodes=2, nproc_per_node=1))
    with pytest.raises(SpecError, match=r"runs jobs on its own host.*`ft run` on each host"):
        refuse_too_many(spec, capacity_of(Settings(home=tmp_path, slots=4)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pod_profile": None}, "needs FT_POD_PROFILE"),
        ({"database_url": ""}, "needs PostgreSQL"),
        (
            {"launcher": "local", "storage": "s3://b/ft"},
            "FT_STORAGE needs FT_LAUNCHER = kubernetes",
        ),
        ({"storage": "http://b"}, "storage"),
    ],
)
def test_settings_that_cannot_work_together_are_refused(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    right = cluster_settings(tmp_path)
    values = {
        "home": tmp_path,
        "launcher": "kubernetes",
        "pod_profile": right.pod_profile,
        "database_url": right.database_url,
    }
    with pytest.raises(ValueError, match=says):
        Settings(**{**values, **changes})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"colour": "red"}, "colour: there is no such option"),
        ({"slots": 0}, "slots = 0"),
        ({"volumes": [{"name": "tmp", "emptyDir": {}}]}, "the name 'tmp' is used by the service"),
    ],
)
def test_a_profile_that_is_wrong_is_named_with_its_field(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError, match=says):
        capacity_of(cluster_settings(tmp_path, **change))
