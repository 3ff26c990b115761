"""The container files, as far as they can be checked without building them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from ft_service import __version__
from ft_service.version import base_version

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy/containers").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_copied_and_installed_exists(path: Path) -> None:
    text = path.read_text()
    allowed = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line
        assert set(sources) <= allowed, line
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (wanted,) = re.findall(r"'\.\[(.+)\]'", text)
    assert set(wanted.split(",")) <= set(extras)
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE), "it does not run as root"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_images_say_what_they_are_and_what_is_in_them(path: Path) -> None:
    text = path.read_text()
    assert f'org.opencontainers.image.version="{base_version()}"' in text
    assert 'org.opencontainers.image.revision="${SOURCE_COMMIT}"' in text
    assert "ARG SOURCE_COMMIT\nCOPY ft_service" in text, "the wheel is called by it"
    assert f'org.opencontainers.image.title="ft-{path.stem}"' in text
    build, final = text.split("\nFROM ${PYTHON_IMAGE}\n")
    assert re.search(r"pip install 'cyclonedx-bom==[\d.]+'", build), (
        "the tool is pinned, and only in the stage that builds"
    )
    assert "--output-file /opt/ft/sbom.cdx.json" in build
    assert "cyclonedx" not in final
    assert "COPY --from=build /opt/ft /opt/ft" in final


@pytest.mark.parametrize(
    ("image", "left_out"),
    [
        ("api", {"quickstart", "workers", "torchao"}),
        ("worker", {"quickstart", "kubernetes"}),
    ],
)
def test_images_hold_what_the_documentation_offers(image: str, left_out: set[str]) -> None:
    """Without a package a setting of the chart, or of compose, would end in a refusal."""
    text = (ROOT / f"deploy/containers/{image}.Dockerfile").read_text()
    (wanted,) = re.findall(r"'\.\[(.+)\]'", text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (everything,) = project["optional-dependencies"]["all"]
    offered = set(everything.removeprefix("ft-service[").removesuffix("]").split(","))
    assert set(wanted.split(",")) == offered - left_out


def test_the_api_has_no_torch() -> None:
    text = (ROOT / "deploy/containers/api.Dockerfile").read_text()
    assert "torch" not in re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    assert "workers," not in text


def test_every_image_tag_is_the_version() -> None:
    text = "".join(
        path.read_text()
        for path in (ROOT / "deploy").rglob("*")
        if path.suffix in (".yaml", ".Dockerfile")
    )
    tags = re.findall(
        r"(?:\bft-(?:api|worker):|newTag: |kubernetes\.io/version: |appVersion: "
        r")([\w.]+)",
        text,
    )
    assert len(tags) > 5
    assert set(tags) - {"dev"} == {__version__}, "but for images that one builds oneself"


def test_compose_keeps_its_secrets_in_files_and_listens_on_the_host_only() -> None:
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    service = compose["services"]["ft"]
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    assert service["image"].endswith(f":{__version__}")
    assert service["read_only"]
    assert "/readyz" in service["healthcheck"]["test"][-1]
    assert all("exec" in mount for mount in service["tmpfs"]), (
        "compiled launchers are loaded from /tmp"
    )
    assert all("file" in secret for secret in compose["secrets"].values())
    assert (
        ROOT / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]
    ).is_file()


def test_without_a_gpu_compose_asks_for_none_and_changes_nothing_else() -> None:
    class Overriding(yaml.SafeLoader):
        """Reads compose's tag for what is taken away as None."""

    Overriding.add_constructor("!reset", lambda loader, node: None)
    over = yaml.load((ROOT / "deploy/compose.cpu.yaml").read_text(), Overriding)
    assert over == {"services": {"ft": {"deploy": None}}}
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    assert compose["services"]["ft"]["deploy"]["resources"].keys() == {"reservations"}, (
        "what is taken away is the GPU alone"
    )
