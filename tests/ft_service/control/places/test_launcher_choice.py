from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ft_service.control.places import launcher_choice
from ft_service.control.places.capacity import capacity_of, refuse_too_many
from ft_service.engines.engine_launcher import ClusterEngineLauncher, EngineLauncher
from ft_service.errors import SpecError
from ft_service.launcher.kubernetes import cluster as cluster_module
from ft_service.launcher.protocol import Launcher, ListsAttempts
from ft_service.launcher.slurm.slurm_launcher import SlurmLauncher
from ft_service.settings import Settings
from ft_service.spec import DistributedOptions
from ft_service.store.sql import Store
from tests.support.cluster_settings import cluster_settings
from tests.support.reconciling import add_job, get, new_store, spec_of


def new_launchers(settings: Settings, store: Store | None = None) -> list[Launcher]:
    return launcher_choice.new_launchers(
        settings, store.leases.move_host if store else lambda old, new: None
    )


def slurm_settings(folder: Path, profile: dict[str, Any] | None = None, **values: Any) -> Settings:
    path = folder / "slurm-profile.yaml"
    path.write_text(yaml.safe_dump({"ranks_per_node": 4, **(profile or {})}, sort_keys=False))
    database = f"sqlite:///{folder / 'ft.db'}"
    return Settings(
        **{
            "home": folder,
            "launcher": "slurm",
            "slurm_profile": path,
            "database_url": database,
            **values,
        }
    )


def test_slurm_is_chosen_where_its_commands_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_choice, "missing_commands", list)
    monkeypatch.setattr(SlurmLauncher, "refusal", lambda self: None)
    (launcher,) = new_launchers(slurm_settings(tmp_path))
    assert isinstance(launcher, ClusterEngineLauncher)
    assert isinstance(launcher, ListsAttempts)
    assert (launcher.host, launcher.counts, launcher.slots_name_gpus) == ("slurm", False, False)
    monkeypatch.setattr(launcher_choice, "missing_commands", lambda: ["sbatch", "srun"])
    with pytest.raises(
        SpecError, match="FT_LAUNCHER = slurm: sbatch and srun cannot be found here"
    ):
        new_launchers(slurm_settings(tmp_path))


def test_a_time_limit_that_leaves_no_time_to_train_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_choice, "missing_commands", list)
    monkeypatch.setattr(SlurmLauncher, "refusal", lambda self: None)
    with pytest.raises(SpecError, match=r"FT_SLURM_PROFILE: time = '4'.*120 seconds before"):
        new_launchers(slurm_settings(tmp_path, {"time": "4"}))
    assert new_launchers(slurm_settings(tmp_path, {"time": "5"}))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"slurm_profile": None}, "FT_LAUNCHER = slurm needs FT_SLURM_PROFILE"),
        ({"database_url": ""}, "FT_LAUNCHER = slurm needs FT_DATABASE_URL"),
        ({"storage": "s3://b/ft"}, "FT_STORAGE needs FT_LAUNCHER = kubernetes"),
    ],
)
def test_settings_that_slurm_cannot_work_with_are_refused(
    tmp_path: Path, values: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        slurm_settings(tmp_path, **values)


def test_slurm_has_the_queue_and_its_nodes_have_a_size(tmp_path: Path) -> None:
    capacity = capacity_of(slurm_settings(tmp_path))
    assert (capacity.gpus, capacity.several_nodes) == (4, True)
    refuse_too_many(
        spec_of("j", distributed=DistributedOptions(nnodes=64, nproc_per_node=4)), capacity
    )
    with pytest.raises(SpecError, match="a node of this cluster runs at most 4 ranks"):
        refuse_too_many(spec_of("j", distributed=DistributedOptions(nproc_per_node=5)), capacity)
    assert "Slurm orders the jobs" in capacity.ignores_priority
    assert capacity_of(slurm_settings(tmp_path, {"gres": None, "hardware": "cpu"})).gpus == 0


def test_engines_are_for_several_jobs_whose_files_all_ranks_see(tmp_path) -> None:
    (launcher,) = new_launchers(Settings(home=tmp_path))
    assert isinstance(launcher, EngineLauncher)
    assert not isinstance(launcher, ListsAttempts)
    assert Settings(home=tmp_path).seats == 8
    assert Settings(home=tmp_path, engine_jobs=0).seats == 0
    with pytest.raises(ValueError, match="an engine of one job shares nothing"):
        Settings(home=tmp_path, engine_jobs=1)
    assert slurm_settings(tmp_path).seats == 0, "in a cluster the operator asks for them"
    assert slurm_settings(tmp_path, engine_jobs=4).seats == 4


class ClosedCluster:
    """Never asked anything: it only has a namespace."""

    closed = True
    lacks_kueue = True

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def workload(self, job_uid: str) -> None:
        return None


def test_each_pod_profile_has_a_launcher_and_the_first_takes_over_what_ran_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster_module, "Cluster", ClosedCluster)
    volumes = {"volume_mounts": [{"name": "home", "mountPath": str(tmp_path)}], "namespace": "ft"}
    store = new_store(tmp_path)
    add_job(store, host="kubernetes/ft")
    (before,) = new_launchers(cluster_settings(tmp_path, **volumes), store)
    assert (before.host, before.slots) == ("kubernetes/ft", 8)
    profiles = {
        "big": {"slots": 16},
        "spot": {"slots": 4},
        "research": {"namespace": "research", "queue": "research"},
    }
    launchers = new_launchers(cluster_settings(tmp_path, **volumes, profiles=profiles), store)
    shown = [(launcher.host, launcher.slots, launcher.counts) for launcher in launchers]
    assert shown == [
        ("kubernetes/big", 16, True),
        ("kubernetes/spot", 4, True),
        ("kubernetes/research", 4096, False),
    ]
    assert get(store).host == "kubernetes/big"
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "queue = 'research', and the cluster has no Kueue" in told
    store.close()


def test_engines_of_a_cluster_work_on_object_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "Cluster", ClosedCluster)
    asked = {"engine_jobs": 4, "storage": "s3://bucket/ft"}
    given = cluster_settings(tmp_path, namespace="ft").model_dump()
    settings = Settings.model_validate({**given, **asked})
    assert settings.seats == 4
    (launcher,) = new_launchers(settings)
    assert isinstance(launcher, ClusterEngineLauncher)


def test_every_profile_must_have_the_run_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "Cluster", ClosedCluster)
    volumes = {"volume_mounts": [{"name": "home", "mountPath": str(tmp_path)}], "namespace": "ft"}
    with pytest.raises(SpecError, match="no volume_mounts entry contains FT_HOME"):
        new_launchers(
            cluster_settings(tmp_path, **volumes, profiles={"a": {}, "b": {"volume_mounts": []}}),
            new_store(tmp_path),
        )


@pytest.mark.parametrize(
    ("profile", "engine_jobs", "warns"),
    [
        ({}, 8, True),
        ({"hardware": "cpu", "gpu_resource": None}, 8, True),
        ({"hardware": "cpu", "gpu_resource": None, "limits": {"memory": "4Gi"}}, 8, False),
        ({"hardware": "H100"}, 8, False),
        ({}, None, False),
    ],
)
def test_the_log_says_where_no_engine_will_form(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    profile: dict[str, Any],
    engine_jobs: int | None,
    warns: bool,
) -> None:
    """Because the memory of a rank is not known, and so what is "auto" stays open."""
    monkeypatch.setattr(cluster_module, "Cluster", ClosedCluster)
    volumes = {"volume_mounts": [{"name": "home", "mountPath": str(tmp_path)}], "namespace": "ft"}
    settings = cluster_settings(tmp_path, **volumes, **profile)
    new_launchers(settings.model_copy(update={"engine_jobs": engine_jobs}))
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.startswith("FT_ENGINE_JOBS = 8, and FT_POD_PROFILE") for text in told] == (
        [True] if warns else []
    )


def test_each_slurm_profile_has_a_launcher_and_the_first_takes_over_what_ran_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launcher_choice, "missing_commands", list)
    monkeypatch.setattr(
        SlurmLauncher, "refusal", lambda self: "nosuch" if "others" in self.host else None
    )
    store = new_store(tmp_path)
    add_job(store, host="slurm")
    (before,) = new_launchers(slurm_settings(tmp_path), store)
    assert (before.host, get(store).host) == ("slurm", "slurm")
    profiles = {"vision": {"projects": ["proj_1"], "account": "v"}, "others": {"gres": "gpu:l4"}}
    settings = slurm_settings(tmp_path, {"profiles": profiles})
    launchers = new_launchers(settings, store)
    assert [launcher.host for launcher in launchers] == ["slurm/vision", "slurm/others"]
    assert get(store).host == "slurm/vision"
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told.startswith("FT_SLURM_PROFILE (profiles.others): ")
    assert capacity_of(settings, None, "proj_1").host == "slurm/vision"
    others = capacity_of(settings, None, "proj_2")
    assert (others.host, others.place) == ("slurm/others", "a node of the profile others")
    with pytest.raises(SpecError, match="no such kind of batch jobs"):
        capacity_of(settings, "vision", "proj_2")
    store.close()
