"""The examples for rented GPUs, and for vLLM beside the service, as far as they can be checked
without either.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from ft_service.cli.root_command import run as run_command
from ft_service.settings import Settings
from ft_service.spec_files.spec_file import load_spec_file
from tests.cluster.versions import KUBERNETES_VERSIONS
from tests.support.pod_security import pods_in, violations

ROOT = Path(__file__).parents[2]
HOSTS = ROOT / "deploy/examples/gpu-hosts"
FILES = sorted(path for path in HOSTS.iterdir() if path.is_file())


def test_there_is_one_file_for_each_kind_of_host() -> None:
    assert {path.name for path in FILES} == {"modal_job.py", "rented-host.sh", "skypilot.yaml"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_it_names_is_there(path: Path) -> None:
    """The files of the repository, the extras, and the commands with their options."""
    text = path.read_text()
    for name in re.findall(r"deploy/examples/[\w./-]+", text):
        assert (ROOT / name).is_file(), name
    for spec in set(re.findall(r"deploy/examples/[\w-]+\.yaml", text)):
        load_spec_file(ROOT / spec)
    assert "constraints.txt" in text
    assert "'.[workers]'" in text
    assert "--run-dir" in text
    assert "--model" in text


def test_the_commands_have_the_options_that_are_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    given = "".join(path.read_text() for path in FILES)
    for command, option in (("run", "--model"), ("run", "--run-dir"), ("pull", None)):
        assert run_command([command, "--help"]) == 0
        helped = capsys.readouterr().out
        assert option is None or (option in given and f"{option} " in helped), command


def test_skypilots_task_has_fields_that_it_knows() -> None:
    """SkyPilot's own schema was asked when this was written (0.14.1); here, that nothing was added
    since.
    """
    task = yaml.safe_load((HOSTS / "skypilot.yaml").read_text())
    assert task.keys() == {"name", "resources", "workdir", "envs", "secrets", "setup", "run"}
    assert task["resources"].keys() == {"accelerators", "disk_size"}
    for name in ("setup", "run"):
        subprocess.run(["bash", "-n", "-c", task[name]], check=True)
        assert set(re.findall(r"\$(\w+)", task[name])) <= task["envs"].keys()


def test_the_script_and_the_program_can_be_read() -> None:
    subprocess.run(["bash", "-n", HOSTS / "rented-host.sh"], check=True)
    names = {
        node.name
        for node in ast.walk(ast.parse((HOSTS / "modal_job.py").read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert names == {"train", "main"}


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_vllm_is_valid_and_restricted_and_sees_what_the_service_hands_off(version: str) -> None:
    text = (ROOT / "deploy/examples/vllm.yaml").read_text()
    objects = list(yaml.safe_load_all(text))
    for item in objects:
        kubernetes_validate.validate(item, version, strict=True)
    ((_, pod),) = pods_in(objects)
    assert violations(pod) == []
    settings = dict(re.findall(r"^# +(FT_\w+): (\S+)$", text, re.MULTILINE))
    assert (
        {name.removeprefix("FT_").lower() for name in settings}
        == {"inference_url", "adapters"}
        <= Settings.model_fields.keys()
    )
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert (
        mounts[settings["FT_ADAPTERS"]] | {"subPath": "adapters"} == mounts[settings["FT_ADAPTERS"]]
    ), "below FT_HOME"
    (service,) = [item for item in objects if item["kind"] == "Service"]
    assert (
        settings["FT_INFERENCE_URL"]
        == f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}/v1"
    )
