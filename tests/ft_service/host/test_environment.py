from __future__ import annotations

import ast
from pathlib import Path

import pytest
from pydantic import SecretStr

from ft_service.host.environment import DATABASE, NETWORK, STORAGE, child_environment
from ft_service.settings import Settings
from tests.support.secrets import SECRETS

ROOT = Path(__file__).parents[3]
USEFUL = {
    **{
        "PATH": "/bin",
        "HOME": "/h",
        "LC_ALL": "C",
        "LD_LIBRARY_PATH": "/l",
        "FT_CACHE": "/c",
        "FT_TOKENS": "",
    },
    **{
        "CUDA_VISIBLE_DEVICES": "1",
        "NCCL_SOCKET_IFNAME": "eth1",
        "OMP_NUM_THREADS": "7",
        "PYTORCH_ALLOC_CONF": "a",
    },
    **{"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    **{"TOKENIZERS_PARALLELISM": "false", "POD_IP": "10.0.0.1"},
}
WITHOUT = {
    "ft_service/host/hardware.py": "nvidia-smi, a program of the driver's",
    "workers/output/outcome.py": "a child of a rank",
}
"""Modules that start a process with their own environment, and which."""
STARTS = {
    "subprocess.Popen",
    "subprocess.run",
    "subprocess.check_output",
    "subprocess.call",
    "subprocess.check_call",
}


def test_what_steers_workers_is_passed_on_and_nothing_else() -> None:
    inherited = {**USEFUL, **SECRETS, "ANYTHING_ELSE": "s"}
    assert child_environment(inherited) == USEFUL
    assert child_environment(inherited, HOME="/other") == {**USEFUL, "HOME": "/other"}


def test_a_beginning_that_is_listed_does_not_pass_a_secret() -> None:
    named = {
        "NCCL_AUTH_TOKEN": "s",
        "CUDA_SECRET": "s",
        "PYTHON_KEYRING_PASSWORD": "s",
        "OMP_PLACES": "cores",
    }
    assert child_environment(named) == {"OMP_PLACES": "cores"}


def test_storage_network_and_database_are_for_those_that_need_them() -> None:
    given = {"AWS_SECRET_ACCESS_KEY": "a", "https_proxy": "http://u:p@proxy", "PGPASSWORD": "p"}
    assert child_environment(given) == {}
    assert set(child_environment(given, *NETWORK)) == {"https_proxy"}
    assert set(child_environment(given, *STORAGE)) == {"https_proxy", "AWS_SECRET_ACCESS_KEY"}
    assert set(child_environment(given, *DATABASE)) == {"PGPASSWORD"}


@pytest.mark.parametrize("asked", ["MY_PLUGIN, UCC_*", "MY_PLUGIN UCC_*", " UCC_*,,MY_PLUGIN "])
def test_the_operator_names_more(asked: str) -> None:
    given = {"MY_PLUGIN": "1", "UCC_TLS": "2", "MY_PLUGIN_2": "3", "FT_PASS_ENVIRONMENT": asked}
    assert set(child_environment(given)) == {"MY_PLUGIN", "UCC_TLS", "FT_PASS_ENVIRONMENT"}


def test_no_secret_of_the_settings_is_passed_on() -> None:
    secret = {
        name
        for name, field in Settings.model_fields.items()
        if "SecretStr" in str(field.annotation)
    }
    assert secret
    named = {
        f"FT_{name.upper()}": "s"
        for name in secret | {"database_url", "mlflow_tracking_uri", "trackio_url"}
    }
    assert child_environment(named) == {}
    assert SecretStr not in (type(value) for value in dict(Settings(home=Path("/ft"))).values())


@pytest.mark.parametrize("folder", ["ft_service", "api", "workers"])
def test_every_process_is_started_with_an_environment_of_its_own(folder: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in (ROOT / folder).rglob("*.py")
        if str(path.relative_to(ROOT)) not in WITHOUT
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in STARTS
        if not any(keyword.arg == "env" for keyword in call.keywords)
    }
    assert not found
