"""Every method of the client works against a real server: of the newest client, of a 2.x and of a
1.x, and of each of them as Azure's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import State
from tests.support.older_clients import older_client
from tests.support.rest.described import an_eval
from tests.support.rest.receiver import Receiver, receiving
from tests.support.rest.service import Service, put

WALK = Path(__file__).parents[1] / "support/programs/walk.py"
AZURES = pytest.mark.parametrize(
    "azure",
    [
        ("azure_endpoint", ""),
        # whose paths alone are others: tests/api/http/test_azure_paths.py
        pytest.param(("base_url", "/openai/v1"), marks=pytest.mark.slow),
    ],
)
"""How Azure's users give the address."""
DATED = "2024-10-21"
# They work on what a webhook's receiver has got, and ask nothing of the server.
LOCAL = {"webhooks.unwrap", "webhooks.verify_signature"}


@pytest.fixture
def configure(configure: dict[str, Any]) -> dict[str, Any]:
    return configure | {"webhook_allow_private": True}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


def tuned(service: Service, client: openai.OpenAI, file_id: str) -> tuple[str, str]:
    """Id and outcome of a job that has succeeded."""
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=file_id).id
    job = put(
        service,
        job_id,
        checkpoints=(5, 10),
        state=State.SUCCEEDED,
        reason=Reason.SUCCEEDED,
        attempt=1,
        finished_at=1e9,
    )
    return job_id, job.spec.tuned_name


def walk(
    service: Service,
    client: openai.OpenAI,
    receiver: Receiver,
    file_id: str,
    path: str | None,
    azure: tuple[str, str] | None = None,
) -> dict[str, Any]:
    """What the walk printed, with the client from a folder (None: the installed one).

    `azure`: the argument of Azure's client that names the address, and the path of the address.
    """
    job_id, model = tuned(service, client, file_id)
    spare = {name: tuned(service, client, file_id)[1] for name in ("sync", "async")}
    ids = {"file": file_id, "job": job_id, "model": model, "receiver": receiver.url, **spare}
    ids |= an_eval(service, "default")
    environment = {**os.environ, "OPENAI_BASE_URL": f"{service.url}/v1"}
    environment |= {"OPENAI_API_KEY": service.key}
    if azure:
        ids[azure[0]] = service.url + azure[1]
        environment |= {"OPENAI_API_KEY": "", "OPENAI_BASE_URL": "", "OPENAI_API_VERSION": DATED}
        environment |= {"AZURE_OPENAI_API_KEY": service.key}
    if path:
        environment["PYTHONPATH"] = path
    result = subprocess.run(
        [sys.executable, str(WALK), json.dumps(ids), ""],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def check(found: dict[str, Any], version: str) -> None:
    assert found["version"].startswith(version)
    for result in found["walks"]:
        assert set(result["has"]) - LOCAL == set(result["called"])


def test_every_method_of_the_installed_client_works(
    service: Service, client: openai.OpenAI, receiver: Receiver, training_file: str
) -> None:
    found = walk(service, client, receiver, training_file, None)
    check(found, openai.__version__)
    assert len(found["walks"][0]["called"]) > 35


@AZURES
def test_every_method_of_azures_client_works(
    service: Service,
    client: openai.OpenAI,
    receiver: Receiver,
    training_file: str,
    azure: tuple[str, str],
) -> None:
    found = walk(service, client, receiver, training_file, None, azure)
    check(found, openai.__version__)
    assert [len(result["called"]) > 35 for result in found["walks"]] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("major", ["1", "2"])
@pytest.mark.parametrize("azure", [None, ("azure_endpoint", "")])
def test_every_method_of_an_older_client_works(
    service: Service,
    client: openai.OpenAI,
    receiver: Receiver,
    training_file: str,
    major: str,
    azure: tuple[str, str] | None,
) -> None:
    found = walk(service, client, receiver, training_file, older_client(major), azure)
    check(found, f"{major}.")
    assert len(found["walks"][1]["called"]) > 20
