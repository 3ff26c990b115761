from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ft_service.bases.safetensors_header import read_header
from ft_service.errors import FtError, SpecError
from ft_service.rundir.directory import RunDir
from ft_service.rundir.manifest import AdapterSource, Manifest, digest_of
from ft_service.rundir.model_card import describe_adapter
from ft_service.rundir.verify import verify
from tests.support.run_directories import (
    MODULES,
    RANK,
    SHAPES,
    finished_run,
    flip_a_bit,
    safetensors,
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return finished_run(tmp_path)


def test_what_was_written_verifies_as_run_directory_adapter_and_archive(
    run: RunDir, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "adapter.tar", "w") as archive:
        archive.add(run.path("adapter"), "adapter")
    for path, kind in (
        (run.root, "run directory"),
        (run.path("adapter"), "adapter"),
        (tmp_path / "adapter.tar", "archive"),
    ):
        report = verify(path)
        assert (report.kind, report.faults) == (kind, [])


def test_the_manifest_tells_the_whole_story(run: RunDir) -> None:
    manifest = run.read("adapter/manifest.json", Manifest)
    assert manifest is not None
    told = [(a.attempt, a.world_size, a.resumed_from, a.ended) for a in manifest.history]
    assert told == [
        (1, 2, None, "stopped"),
        (2, 2, "step-3-a1", "lost"),
        (3, 3, "step-3-a1", "published"),
    ]
    assert manifest.history[0].message == "Paused at step 3."
    assert manifest.base.files.keys() == {"config.json", "model.safetensors"}
    assert manifest.metrics is not None
    assert (manifest.seed, manifest.metrics.valid_loss, manifest.quantiser) == (7, 1.5, {"nf4": 1})
    assert manifest.files.keys() == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    }


CHANGED = "has other contents than when it was written"


OTHER_SPEC = "spec.json differs from the spec in the manifest"


OTHER_ORIGINS = "origins.json names another base or other data than the manifest"


OTHER_RESULT = "result.json names another attempt or step than the manifest"


TWO_MANIFESTS = "in the run directory: manifest.json and adapter/manifest.json differ"


EDITED = "manifest.json was edited: its digest does not match its contents"


NOT_OF_RANK_5 = "do not have the rank 5 of adapter_config.json"


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("adapter/adapter_model.safetensors", {"adapter_model.safetensors is missing"}),
        ("adapter/adapter_config.json", {"adapter_config.json is missing"}),
        ("adapter/manifest.json", {"manifest.json is missing", TWO_MANIFESTS}),
        ("manifest.json", {"in the run directory: manifest.json is missing"}),
        ("spec.json", {OTHER_SPEC}),
        ("origins.json", {OTHER_ORIGINS}),
        ("result.json", {OTHER_RESULT}),
        ("checkpoints/step-3-a1/__0_0.distcp", {"checkpoint step-3-a1: __0_0.distcp is missing"}),
    ],
)
def test_a_file_that_is_gone_shows(run: RunDir, name: str, faults: set[str]) -> None:
    run.path(name).unlink()
    assert set(verify(run.root).faults) == faults


@pytest.mark.parametrize(
    "name", ["adapter/adapter_model.safetensors", "checkpoints/step-3-a1/__0_0.distcp"]
)
def test_a_flipped_bit_shows(run: RunDir, name: str) -> None:
    flip_a_bit(run.path(name))
    (fault,) = verify(run.root).faults
    assert fault.removeprefix("checkpoint step-3-a1: ") == f"{Path(name).name} {CHANGED}"


@pytest.mark.parametrize(
    ("name", "was", "is_now", "faults"),
    [
        (
            "adapter/adapter_config.json",
            '"r": 4',
            '"r": 5',
            {
                f"adapter_config.json {CHANGED}",
                f"{MODULES[0]}: lora_A [4, 8] and lora_B [8, 4] {NOT_OF_RANK_5}",
                f"{MODULES[1]}: lora_A [4, 24] and lora_B [8, 4] {NOT_OF_RANK_5}",
            },
        ),
        ("adapter/manifest.json", '"seed": 7', '"seed": 8', {EDITED, TWO_MANIFESTS, OTHER_SPEC}),
        (
            "manifest.json",
            '"seed": 7',
            '"seed": 8',
            {f"in the run directory: {EDITED}", TWO_MANIFESTS},
        ),
        ("spec.json", '"seed": 7', '"seed": 8', {OTHER_SPEC}),
        ("origins.json", '"samples": 9', '"samples": 8', {OTHER_ORIGINS}),
        ("result.json", '"attempt": 3', '"attempt": 4', {OTHER_RESULT}),
        ("result.json", '"steps": 6', '"steps": 5', {OTHER_RESULT}),
    ],
)
def test_another_value_in_a_document_shows(
    run: RunDir, name: str, was: str, is_now: str, faults: set[str]
) -> None:
    text = run.path(name).read_text()
    assert was in text
    run.path(name).write_text(text.replace(was, is_now))
    assert set(verify(run.root).faults) == faults


def test_a_file_that_nobody_wrote_shows(run: RunDir) -> None:
    run.put("adapter/tokenizer.bin", b"x")
    assert verify(run.path("adapter")).faults == ["tokenizer.bin is not in the manifest"]


@pytest.mark.parametrize(
    "field", sorted(Manifest.model_fields.keys() - {"version", "forgetting"})
)  # older ones have none
def test_a_manifest_without_one_of_its_fields_is_incomplete(run: RunDir, field: str) -> None:
    path = run.path("adapter/manifest.json")
    body = json.loads(path.read_text())
    del body[field]
    path.write_text(json.dumps(body | {"digest": digest_of(body)} if field != "digest" else body))
    assert [f"manifest.json is incomplete or of another version: {field}"] == [
        fault for fault in verify(run.path("adapter")).faults if "incomplete" in fault
    ]


def rewritten(run: RunDir) -> None:
    """The manifest of what is in the adapter's folder now, as if a job had written that."""
    describe_adapter(run, run.path("adapter"), AdapterSource(attempt=3, step=6, versions={}))


def with_tensors(change: Callable[[dict[str, tuple[int, ...]]], object], run: RunDir) -> list[str]:
    path = run.path("adapter/adapter_model.safetensors")
    shapes = {name: entry.shape for name, entry in read_header(path).tensors.items()}
    change(shapes)
    path.write_bytes(safetensors(shapes))
    rewritten(run)
    return verify(run.path("adapter")).faults


Q_A, Q_B = (f"base_model.model.{MODULES[0]}.lora_{which}.weight" for which in "AB")


def test_shapes_must_be_those_of_the_config_and_of_the_base(run: RunDir) -> None:
    rows, cols = SHAPES[MODULES[0]]
    assert with_tensors(lambda t: None, run) == []
    assert with_tensors(lambda t: t.update({Q_A: (RANK + 1, cols)}), run)[0].startswith(
        f"{MODULES[0]}: lora_A [5, 8]"
    )
    assert (
        "do not fit its layer [8, 8]"
        in with_tensors(lambda t: t.update({Q_A: (RANK, cols + 1)}), run)[0]
    )
    assert with_tensors(lambda t: (t.update({Q_A: (RANK, cols)}), t.pop(Q_B)), run) == [
        f"{MODULES[0]} has no lora_B"
    ]
    faults = with_tensors(lambda t: t.update({Q_B: (rows, RANK), "lm_head.weight": (8, 8)}), run)
    assert faults == ["lm_head.weight is a tensor that adapter_config.json does not call for"]


def test_a_rank_of_its_own_by_pattern(run: RunDir) -> None:
    path = run.path("adapter/adapter_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rank_pattern": {"q_proj": 2}}))
    rows, cols = SHAPES[MODULES[0]]
    assert with_tensors(lambda t: t.update({Q_A: (2, cols), Q_B: (rows, 2)}), run) == []
    faults = with_tensors(lambda t: t.update({Q_A: (4, cols), Q_B: (rows, 4)}), run)
    assert faults == [
        f"{MODULES[0]}: lora_A [4, 8] and lora_B [8, 4] do not have the rank 2 of "
        "adapter_config.json"
    ]


def test_a_cut_file_is_not_taken_for_a_shorter_one(run: RunDir) -> None:
    path = run.path("adapter/adapter_model.safetensors")
    path.write_bytes(path.read_bytes()[:-4])
    rewritten(run)
    assert "a copy or download was cut short" in verify(run.path("adapter")).faults[0]
    path.write_bytes(b"\x00" * 4)
    rewritten(run)
    assert "does not begin with a safetensors header" in verify(run.path("adapter")).faults[0]


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"rank_pattern": [1]}',
        '{"rank_pattern": {"q_proj": []}}',
        '{"r": "x"}',
        "[" * 100_000,
    ],
)
def test_a_config_of_another_kind_is_a_fault(run: RunDir, text: str) -> None:
    run.path("adapter/adapter_config.json").write_text(text)
    assert "adapter_config.json" in verify(run.path("adapter")).faults[-1]


def test_an_export_is_checked_for_completeness_since_it_was_never_what_the_manifest_lists(
    run: RunDir,
) -> None:
    adapter = run.path("adapter")
    (adapter / "manifest.json").rename(adapter / "adapter_manifest.json")
    report = verify(adapter)
    assert (report.kind, report.checked, report.faults) == (
        "exported adapter",
        ["weight files"],
        [],
    )
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert "a copy or download was cut short" in verify(adapter).faults[0]
    weights.unlink()
    assert verify(adapter).faults == ["adapter_model.safetensors is missing"]


def test_what_holds_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="expected an adapter's folder"):
        verify(tmp_path)
    with tarfile.open(tmp_path / "evil.tar", "w") as archive:
        info = tarfile.TarInfo("../outside")
        archive.addfile(info)
    with pytest.raises(FtError, match="not a regular file inside it"):
        verify(tmp_path / "evil.tar")
