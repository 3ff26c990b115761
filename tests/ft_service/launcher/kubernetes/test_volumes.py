"""What worker pods see of the service's files: by the manifest, and in a pod that looks for
more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from ft_service.launcher.kubernetes.manifests import AttemptShape, Site, job_manifest
from ft_service.launcher.kubernetes.profile import PodProfile
from ft_service.launcher.kubernetes.volumes import Home, VisibleFiles, reads_of, visible_reads
from ft_service.launcher.protocol import LaunchError
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Start
from ft_service.spec import AdapterRef, BaseModelRef, DataFileRef, JobSpec
from tests.cluster.harness import HarnessCluster, open_cluster
from tests.cluster.kubelet import can_mount
from tests.support.attempts import wait_for
from tests.support.pods import SECONDS, profile_for
from tests.support.reconciling import spec_of

HOME = Path("/var/lib/ft")
JOB = "ftjob-1"
DATA = {"name": "data", "persistentVolumeClaim": {"claimName": "ft-home"}}
WHOLE = {"name": "data", "mountPath": "/var/lib/ft"}
PUBLISHED = {
    "name": "models",
    "persistentVolumeClaim": {"claimName": "ft-models", "readOnly": True},
}

Shown = dict[str, bool]
"""Path on the volume of FT_HOME → whether the pod may write there."""


def file(name: str, folder: Path = HOME) -> DataFileRef:
    return DataFileRef(name=name, path=str(folder / "files" / name), sha256="0")


def spec(base: str = "/var/lib/ft/models/tiny", **changes: Any) -> JobSpec:
    values = {
        "model": BaseModelRef(name="tiny", path=base),
        "training_data": file("file-1"),
        "validation_data": file("file-2"),
    }
    return spec_of(JOB, **{**values, **changes})


def parent(key: str = "adapter", folder: Path = HOME) -> AdapterRef:
    return AdapterRef(
        name="ft:tiny:local::0", job_id="ftjob-0", path=str(folder / "runs/ftjob-0" / key)
    )


def profile_of(mounts: list[dict[str, Any]], *volumes: dict[str, Any], **more: Any) -> PodProfile:
    values = {
        "image": "w:1",
        "slots": 1,
        "ranks_per_node": 1,
        "volumes": [DATA, *volumes],
        "volume_mounts": mounts,
    }
    return PodProfile.model_validate({**values, **more})


def mounts_of(
    profile: PodProfile, job: JobSpec, *, models: str = "/var/lib/ft/models", storage: str = ""
) -> list[dict[str, Any]]:
    site = Site("default", HOME, storage, models=(Path(models),))
    reads = tuple(reads_of(job, site.files, profile))
    pod = job_manifest(
        AttemptShape(job.job_id, 1, 1, 1, HOME / "runs" / job.job_id, VisibleFiles(reads)),
        profile,
        site,
    )["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    return [
        {**mount, "volume": volumes[mount["name"]]}
        for mount in pod["containers"][0]["volumeMounts"]
    ]


def shown_of(mounts: list[dict[str, Any]], claim: str = "ft-home") -> Shown:
    found: Shown = {}
    for mount in mounts:
        if mount["volume"].get("persistentVolumeClaim", {}).get("claimName") == claim:
            found[mount.get("subPath", "")] = not mount.get("readOnly", False)
    return found


OWN = {"runs/ftjob-1": True, "models": False, "files/file-1": False, "files/file-2": False}


def sees(shown: Shown, path: str) -> bool:
    return any(PurePosixPath(path).is_relative_to(place) for place in shown)


def test_a_pod_sees_its_run_directory_its_data_and_the_models() -> None:
    shown = shown_of(mounts_of(profile_of([WHOLE]), spec()))
    assert shown == OWN
    for other in (
        "credentials",
        "files/file-10",
        "files",
        "uploads/x",
        "runs/ftjob-10/spec.json",
        "runs/ftjob-0",
        "server.json",
    ):
        assert not sees(shown, other), other
    assert sees(shown, "runs/ftjob-1/adapter/x")


def test_of_the_job_that_it_goes_on_from_a_pod_sees_the_adapter() -> None:
    for key in ("adapter", "adapters/step-3-a1"):
        shown = shown_of(mounts_of(profile_of([WHOLE]), spec(parent=parent(key))))
        assert shown == {**OWN, f"runs/ftjob-0/{key}": False}
        assert not sees(shown, "runs/ftjob-0/checkpoints/step-3-a1/x")


@pytest.mark.parametrize(
    ("mounts", "volumes", "shown"),
    [
        (
            [{**WHOLE, "subPath": "tenants/a"}],
            (),
            {f"tenants/a/{path}": write for path, write in OWN.items()},
        ),
        (
            [{"name": "data", "mountPath": "/var/lib"}],
            (),
            {f"ft/{path}": write for path, write in OWN.items()},
        ),
        ([WHOLE, {"name": "data", "mountPath": "/all"}], (), OWN),
        ([WHOLE, {"name": "again", "mountPath": "/all"}], ({**DATA, "name": "again"},), OWN),
        ([WHOLE, {"name": "data", "mountPath": "/f", "subPath": "files"}], (), OWN),
        ([WHOLE, {"name": "data", "mountPath": "/f", "subPath": "./runs/ftjob-2"}], (), OWN),
        ([WHOLE, {"name": "data", "mountPath": "/var/lib/ft/runs", "subPath": "runs"}], (), OWN),
        ([WHOLE, {"name": "data", "mountPath": "/k", "subPathExpr": "$(KEY)"}], (), OWN),
        (
            [WHOLE, {"name": "data", "mountPath": "/ca", "subPath": "certificates"}],
            (),
            {**OWN, "certificates": False},
        ),
    ],
    ids=[
        "sub-path",
        "above",
        "twice",
        "two volumes",
        "files",
        "a run",
        "nested",
        "expression",
        "something else",
    ],
)
def test_however_the_operator_mounts_the_volume_nothing_else_of_the_services_is_seen(
    mounts: list[dict[str, Any]], volumes: tuple[dict[str, Any], ...], shown: Shown
) -> None:
    assert shown_of(mounts_of(profile_of(mounts, *volumes), spec())) == shown


def test_a_volume_at_a_place_that_only_the_kubelet_knows_is_narrowed_there() -> None:
    mount = {"name": "data", "mountPath": "/var/lib/ft", "subPathExpr": "$(TENANT)"}
    found = {
        m["mountPath"]: m.get("subPathExpr")
        for m in mounts_of(profile_of([mount]), spec("/m/t"), models="/m")
    }
    assert found["/var/lib/ft/runs/ftjob-1"] == "$(TENANT)/runs/ftjob-1"
    assert "/var/lib/ft" not in found


def test_host_paths_and_nfs_are_known_by_where_they_lie() -> None:
    for volume in ({"hostPath": {"path": "/srv"}}, {"nfs": {"server": "nas", "path": "/srv"}}):
        (kind,) = volume
        inner = {kind: {**volume[kind], "path": "/srv/ft/files"}}
        profile = profile_of(
            [{**WHOLE, "name": "disk", "subPath": "ft"}, {"name": "inner", "mountPath": "/f"}],
            {"name": "disk", **volume},
            {"name": "inner", **inner},
        )
        found = {mount["mountPath"]: mount.get("subPath") for mount in mounts_of(profile, spec())}
        assert "/f" not in found
        assert found["/var/lib/ft/runs/ftjob-1"] == "ft/runs/ftjob-1"


def test_other_volumes_are_the_operators_own_affair() -> None:
    at_models = {"name": "models", "mountPath": "/models", "readOnly": True}
    mounts = mounts_of(
        profile_of([WHOLE, at_models], PUBLISHED), spec("/models/tiny"), models="/models"
    )
    assert shown_of(mounts) == {path: write for path, write in OWN.items() if path != "models"}
    assert shown_of(mounts, "ft-models") == {"": False}
    inside = {"name": "models", "mountPath": "/var/lib/ft/models", "readOnly": True}
    mounts = mounts_of(profile_of([WHOLE, inside], PUBLISHED), spec())
    assert shown_of(mounts) == {path: write for path, write in OWN.items() if path != "models"}
    assert shown_of(mounts, "ft-models") == {"": False}


def test_a_folder_of_models_that_is_the_services_own_shows_the_jobs_base_alone() -> None:
    shown = shown_of(mounts_of(profile_of([WHOLE]), spec("/var/lib/ft/tiny"), models="/var/lib/ft"))
    assert shown == {
        **{path: write for path, write in OWN.items() if path != "models"},
        "tiny": False,
    }


def test_a_cache_in_the_home_is_shared_and_nothing_else_is() -> None:
    profile = profile_of([WHOLE], env=[{"name": "FT_CACHE", "value": "/var/lib/ft/cache"}])
    assert shown_of(mounts_of(profile, spec())) == {**OWN, "cache": True}
    whole = profile_of([WHOLE], env=[{"name": "FT_CACHE", "value": "/var/lib/ft"}])
    assert shown_of(mounts_of(whole, spec())) == OWN


def test_with_object_storage_the_home_is_the_pods_own() -> None:
    """Also for a profile that still mounts the shared volume there."""
    for mounts in ([WHOLE], []):
        found = mounts_of(profile_of(mounts), spec("/m/t"), models="/m", storage="s3://b/ft")
        assert shown_of(found) == {}
        (home,) = [mount for mount in found if mount["mountPath"] == "/var/lib/ft"]
        assert "emptyDir" in home["volume"]
    disk = {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}}
    found = mounts_of(
        profile_of([{**WHOLE, "name": "scratch"}], disk),
        spec("/m/t"),
        models="/m",
        storage="s3://b/ft",
    )
    assert [mount["name"] for mount in found if mount["mountPath"] == "/var/lib/ft"] == ["scratch"]


def test_what_no_volume_holds_is_refused() -> None:
    job = spec(training_data=file("file-1", Path("/old/home")))
    with pytest.raises(LaunchError, match=r"/old/home/files/file-1.*volume_mounts"):
        reads_of(job, Home(HOME), profile_of([WHOLE]))
    climbing = spec(
        training_data=DataFileRef(name="x", path="/var/lib/ft/files/../credentials", sha256="0")
    )
    with pytest.raises(LaunchError, match=r"\.\./credentials"):
        reads_of(climbing, Home(HOME), profile_of([WHOLE]))
    assert Path("/in/image/tiny") not in reads_of(
        spec("/in/image/tiny"), Home(HOME), profile_of([WHOLE])
    )


def test_what_is_gone_is_left_out_and_a_link_in_a_run_directory_is_refused(tmp_path: Path) -> None:
    """A kubelet would make a folder of root's in place of the one, and follow the other."""
    profile = profile_of([{"name": "data", "mountPath": str(tmp_path)}])
    files = tmp_path / "files"
    adapter = tmp_path / "runs/ftjob-0/adapter"
    files.mkdir()
    (files / "file-1").touch()
    job = spec(
        "/in/image",
        training_data=file("file-1", tmp_path),
        validation_data=None,
        parent=parent(folder=tmp_path),
    )
    assert visible_reads(job, Home(tmp_path), profile) == (files / "file-1",)
    adapter.mkdir(parents=True)
    assert visible_reads(job, Home(tmp_path), profile) == (files / "file-1", adapter)
    adapter.rmdir()
    adapter.symlink_to("../../files")
    with pytest.raises(LaunchError, match="symbolic link"):
        visible_reads(job, Home(tmp_path), profile)


def test_a_pod_sees_the_tokens_of_its_own_data_alone(tmp_path: Path) -> None:
    profile = profile_of([{"name": "data", "mountPath": str(tmp_path)}])
    data = file("file-1", tmp_path)
    for name in ("files", "tokens/0.a", "tokens/0.b", "tokens/1.a"):
        (tmp_path / name).mkdir(parents=True)
    Path(data.path).touch()
    reads = visible_reads(
        spec("/in/image", training_data=data, validation_data=None), Home(tmp_path), profile
    )
    assert reads == (Path(data.path), tmp_path / "tokens/0.a", tmp_path / "tokens/0.b")
    pod = job_manifest(
        AttemptShape(JOB, 1, 1, 1, tmp_path / "runs" / JOB, VisibleFiles(reads)),
        profile,
        Site("default", tmp_path),
    )["spec"]["template"]["spec"]
    shown = {
        mount.get("subPath"): mount.get("readOnly")
        for mount in pod["containers"][0]["volumeMounts"]
    }
    assert (shown["tokens/0.a"], shown["tokens/0.b"]) == (True, True)
    assert not shown.keys() & {"tokens", "tokens/1.a", ""}
    assert visible_reads(spec("/in/image"), Home(tmp_path, shared=False), profile) == (), (
        "each fetches its own"
    )


# In a pod
# ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def separate() -> Iterator[HarnessCluster]:
    """Whose pods have file systems of their own."""
    if not can_mount():
        pytest.skip("pods need mount namespaces, which this user may not make (unshare)")
    with open_cluster(mounts=True) as cluster:
        yield cluster


LOOK = """
import json, os, sys
from pathlib import Path
home, run = Path(sys.argv[1]), Path(sys.argv[2])
said = {"seen": sorted(str(p.relative_to(home)) for p in home.rglob("*")), "refused": []}
for key in ("files/file-1", "models/config.json"):
    try:
        (home / key).write_text("x")
    except OSError as error:
        said["refused"].append(key)
(run / "looked.tmp").write_text(json.dumps(said))
os.replace(run / "looked.tmp", run / "looked.json")
"""


def test_a_pod_that_looks_for_more_finds_nothing(separate: HarnessCluster, tmp_path: Path) -> None:
    """An old profile, which mounts FT_HOME whole; keys, other files and a job whose id begins like
    this one's are in it too.
    """
    home = tmp_path / "home"
    for key in (
        "credentials",
        "files/file-1",
        "files/file-10",
        "files/file-2",
        "runs/ftjob-10/spec.json",
        "models/config.json",
    ):
        (home / key).parent.mkdir(parents=True, exist_ok=True)
        (home / key).write_text(key)
    (home / "runs/ftjob-0/adapter").mkdir(parents=True)
    (home / "runs/ftjob-0/events.jsonl").touch()
    script = tmp_path / "look.py"
    script.write_text(LOOK)
    run = RunDir(home / "runs" / JOB)
    run.write(
        "attempts/1/start.json",
        Start(job_id=JOB, attempt=1, world_size=1, generation=1, checkpoint=None),
    )
    profile = profile_for(home, "", node_selector=separate.node_selector)
    words = ["sh", "-c", f'exec "{profile.command[0]}" "{script}" "{home}" "{run.root}"']
    profile = profile.model_copy(update={"command": words})
    launcher = separate.launcher(profile, home, models=(home / "models",))
    job = spec(
        str(home / "models"),
        training_data=file("file-1", home),
        validation_data=None,
        parent=parent(folder=home),
    )
    launcher.start(Attempt(run, 1), job)
    wait_for((run.root / "looked.json").is_file, SECONDS)
    said = run.get("looked.json")
    assert said is not None
    found = json.loads(said)
    visible = {key for key in found["seen"] if not key.startswith("runs/ftjob-1")}
    assert visible == {
        "files",
        "files/file-1",
        "models",
        "models/config.json",
        "runs",
        "runs/ftjob-0",
        "runs/ftjob-0/adapter",
    }
    assert found["refused"] == ["files/file-1", "models/config.json"]
    assert (home / "files/file-1").read_text() == "files/file-1"
