"""Exports pushed to a hub and to a registry on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_service.errors import SpecError
from ft_service.serving.pushing import check_address
from tests.support.rest.fake_places import FakePlace, fake_place

PROGRAM = """
import json, sys
from pathlib import Path
from ft_service.errors import FtError
from ft_service.serving.pushing import push
try:
    print(json.dumps({"pushed": push(Path(sys.argv[1]), sys.argv[2], "tuned as gguf")}))
except FtError as error:
    print(json.dumps({"error": error.message}))
"""


@pytest.fixture
def place() -> Iterator[FakePlace]:
    with fake_place() as place:
        yield place


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(b"weights")
    (folder / "README.md").write_text("# mine\n")
    return folder


def pushed(folder: Path, address: str, **environment: str) -> dict[str, str]:
    """In a process of its own: the libraries read the environment as they are imported."""
    given = {
        **os.environ,
        "HOME": str(folder.parent),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **environment,
    }
    command = [sys.executable, "-c", PROGRAM, str(folder), address]
    ended = subprocess.run(
        command, env=given, capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(ended.stdout.splitlines()[-1])


def test_a_hub_gets_the_files_in_a_private_repository(place: FakePlace, folder: Path) -> None:
    place.key = "hf_secret"
    endpoint = f"http://{place.address}"
    refused = pushed(folder, "hf://org/name", HF_ENDPOINT=endpoint, HF_TOKEN="hf_other")
    assert "hf://org/name was not pushed" in refused["error"]
    assert not place.files
    done = pushed(folder, "hf://org/name", HF_ENDPOINT=endpoint, HF_TOKEN="hf_secret")
    assert done == {"pushed": f"{endpoint}/org/name/commit/abc"}
    assert place.files == {"model.gguf": b"weights", "README.md": b"# mine\n"}
    assert (place.made[0]["name"], place.made[0]["organization"]) == ("name", "org")
    assert place.made[0].get("private") is True or place.made[0].get("visibility") == "private"


def test_a_registry_gets_a_manifest_with_a_layer_for_each_file(
    place: FakePlace, folder: Path
) -> None:
    done = pushed(folder, f"oci://{place.address}/models/mine:v1")
    [(name, manifest)] = place.manifests.items()
    assert name == "models/mine/manifests/v1"
    assert done["pushed"].startswith(f"{place.address}/models/mine:v1@sha256:")
    layers = {
        layer["annotations"]["org.opencontainers.image.title"]: layer
        for layer in manifest["layers"]
    }
    assert layers["model.gguf"]["mediaType"] == "application/vnd.ft-service.model.gguf"
    assert place.files[layers["model.gguf"]["digest"]] == b"weights"
    assert place.files[layers["README.md"]["digest"]] == b"# mine\n"
    assert manifest["annotations"]["org.opencontainers.image.title"] == "tuned as gguf"


@pytest.mark.parametrize(
    "address",
    ["org/name", "hf://name", "hf://a/b/c", "oci://host", "oci://host/Large:v1", "s3://bucket/x"],
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(SpecError, match="give hf://ORG/NAME"):
        check_address(address)
