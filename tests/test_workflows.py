"""What CI of others runs exists: workflows can be read, and every target, script, file and job that
they name is there.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ft_service import __version__

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
_USES = re.compile(r"uses: (.*)")
_PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
_EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
_CONTEXTS = ("github.", "vars.", "secrets.", "matrix.", "env.", "steps.", "runner.arch")


def _jobs(path: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(path.read_text())["jobs"]


def _steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in _jobs(path).values():
        yield from job["steps"]


def _commands() -> Iterator[str]:
    for path in WORKFLOWS:
        yield from (step["run"] for step in _steps(path) if "run" in step)


def test_there_are_workflows() -> None:
    assert {path.stem for path in WORKFLOWS} == {"ci", "nightly", "release"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_whole(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    assert document["permissions"] == {"contents": "read"}, "more is given to single jobs"
    jobs = document["jobs"]
    for name, job in jobs.items():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(jobs), name
        assert job["timeout-minutes"] <= 180, name
        ids = {step["id"] for step in job["steps"] if "id" in step}
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, name
            for text in _EXPRESSION.findall(json.dumps(step)):
                assert text.startswith(_CONTEXTS), text
                assert not text.startswith("steps.") or text.split(".")[1] in ids, text
                assert (
                    not text.startswith("matrix.")
                    or text.split(".")[1] in job["strategy"]["matrix"]
                ), text


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_digest_with_their_version_beside_it(path: Path) -> None:
    """A tag can be moved. The version is what renovate updates."""
    used = _USES.findall(path.read_text())
    assert len(used) == sum("uses" in step for step in _steps(path))
    assert [one for one in used if not _PINNED.fullmatch(one)] == []


def test_what_is_run_exists() -> None:
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)) | {
        ".venv/.ready"
    }
    named: set[str] = set()
    for command in _commands():
        assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0, command
        assert "${{" not in command, (
            "what others may choose reaches a shell by the environment alone"
        )
        assert set(re.findall(r"\bmake ([\w./-]+)", command)) <= targets, command
        named |= set(
            re.findall(r"(?<![\w/.\"])((?:\.ci|tests|docs|deploy|examples)/[\w./-]+)", command)
        )
    files = {
        step["with"]["file"]
        for path in WORKFLOWS
        for step in _steps(path)
        if "file" in step.get("with", {})
    }
    named |= {
        file.replace("${{ matrix.image }}", image) for file in files for image in ("api", "worker")
    }
    assert len(named) >= 9
    assert not [path for path in named if not (ROOT / path).exists()]
    assert not [
        path
        for path in named
        if path.startswith(".ci/") and not (ROOT / path).stat().st_mode & 0o111
    ]


def test_other_machines_prepare_tests_as_our_own_ci_does() -> None:
    ours = re.findall(r"^\.ci/\w+$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert len(ours) >= 3
    jobs = [job for path in WORKFLOWS for job in _jobs(path).values()]
    commands = [[step.get("run") for step in job["steps"]] for job in jobs]
    testing = [
        run for run in commands if any((command or "").startswith("make test") for command in run)
    ]
    assert len(testing) == len(WORKFLOWS)
    assert all(set(ours) <= set(run) for run in testing)


def test_every_python_that_is_allowed_is_tested() -> None:
    classes = re.search(
        r'requires-python = ">=3\.(\d+),<3\.(\d+)"', (ROOT / "pyproject.toml").read_text()
    )
    assert classes is not None
    allowed = [f"3.{minor}" for minor in range(int(classes[1]), int(classes[2]))]
    for name in ("ci", "release"):
        assert (
            _jobs(ROOT / f".github/workflows/{name}.yml")["test"]["strategy"]["matrix"]["python"]
            == allowed
        )


def test_nothing_is_published_for_good_before_the_images() -> None:
    """Jobs that GitHub leaves out, as without a registry, must not leave out what needs them."""
    jobs = _jobs(ROOT / ".github/workflows/release.yml")
    for name in ("publish-wheel", "release"):
        assert {"wheel", "images"} <= set(jobs[name]["needs"]), name
    for name in ("publish-wheel", "release", "site"):
        assert "!failure() && !cancelled()" in jobs[name]["if"], name


def test_images_are_of_both_architectures_on_a_base_by_digest_and_the_chart_stands_beside_them() -> (
    None
):
    jobs = _jobs(ROOT / ".github/workflows/release.yml")
    assert jobs["builds"]["strategy"]["matrix"] == {
        "image": ["api", "worker"],
        "runner": ["ubuntu-24.04", "ubuntu-24.04-arm"],
    }
    (build,) = [
        step["with"] for step in jobs["builds"]["steps"] if "context" in step.get("with", {})
    ]
    assert build["build-args"].splitlines() == [
        "PYTHON_IMAGE=${{ steps.base.outputs.image }}",
        "SOURCE_COMMIT=${{ github.sha }}",
    ]
    assert build["tags"].endswith("-${{ runner.arch }}")
    joined = next(step["run"] for step in jobs["images"]["steps"] if step.get("id") == "build")
    assert '--tag "$image" "$image-X64" "$image-ARM64"' in joined
    bases = [
        re.findall(r"^ARG PYTHON_IMAGE=(.+)$", path.read_text(), re.MULTILINE)
        for path in sorted((ROOT / "deploy/containers").glob("*.Dockerfile"))
    ]
    assert len(bases) == 2
    assert bases[0] == bases[1], "the release looks its digest up once"
    push = jobs["publish-chart"]
    assert push["needs"] == ["chart", "images"]
    assert "helm push" in push["steps"][-1]["run"]


def test_known_holes_are_looked_for_every_night() -> None:
    runs = [
        step.get("run", "")
        for step in _jobs(ROOT / ".github/workflows/nightly.yml")["known-holes"]["steps"]
    ]
    assert "pip-audit --requirement constraints.txt --no-deps --disable-pip" in runs


def _changelog(tag: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / ".ci/changelog", tag], capture_output=True, text=True, check=False
    )


def test_a_releases_notes_are_its_section_of_the_changelog() -> None:
    notes = _changelog(f"v{__version__}").stdout
    assert "### " in notes
    assert "## [" not in notes
    first = re.search(
        rf"^## \[{re.escape(__version__)}\] - .*\n\n(.*)",
        (ROOT / "CHANGELOG.md").read_text(),
        re.MULTILINE,
    )
    assert first is not None
    assert notes.strip().startswith(first[1])


def test_another_tag_is_refused() -> None:
    refused = _changelog("v99.0.0")
    assert refused.returncode == 1
    assert f"The tag is v99.0.0, and ft_service/__init__.py says {__version__}." in refused.stderr


def test_updates_are_asked_for_what_is_pinned() -> None:
    renovate = json.loads((ROOT / "renovate.json").read_text())
    assert "helpers:pinGitHubActionDigests" in renovate["extends"]
    (torch,) = [
        rule["allowedVersions"]
        for rule in renovate["packageRules"]
        if rule.get("matchPackageNames") == ["torch"]
    ]
    assert f'"torch>=2.11,{torch}"' in (ROOT / "pyproject.toml").read_text()
