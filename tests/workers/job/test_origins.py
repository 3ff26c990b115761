"""A base is identified by what its files hold, which later attempts do not read again for
nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

from ft_service.rundir.directory import RunDir
from ft_service.rundir.file_digest import FileDigest
from ft_service.rundir.manifest import ORIGINS, BaseOrigin, FrozenModule, Origins
from ft_service.spec import WeightFormat
from tests.support.ranks import run_on_ranks
from tests.support.training.models import spec_for
from workers.job.origins import changed_arithmetic, identify
from workers.quant.weights import VERSIONS


def identified(rank: int, world: int, root: str, base: str) -> tuple[str, list[str]]:
    """The base's digest, and the files that this rank read for it."""
    read: list[str] = []
    digest_of = FileDigest.of

    def noted(path: Path) -> FileDigest:
        read.append(path.name)
        return digest_of(path)

    run = RunDir(root)
    with patch.object(FileDigest, "of", noted):
        found = identify(run, spec_for(Path(base)))
    if rank == 0:
        run.write_if_absent(ORIGINS, Origins(base=found, data=[], frozen_modules=[], quantiser={}))
    return found.digest, read


def rewrite(path: Path) -> None:
    """Other contents of the same length, at the same time."""
    before = path.stat()
    new = path.with_suffix(".new")
    new.write_bytes(path.read_bytes()[::-1])
    new.rename(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_only_a_touched_base_is_read_again(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    weights = base / "model.safetensors"
    weights.write_bytes(b"weights")

    def attempt() -> tuple[str, list[str]]:
        (digest, first), (same, second) = run_on_ranks(
            identified, 2, str(tmp_path / "run"), str(base)
        )
        assert digest == same
        return digest, sorted([*first, *second])

    digest, read = attempt()
    assert read == ["config.json", "model.safetensors"], "each file once, by one of the ranks"
    assert attempt() == (digest, [])
    rewrite(weights)
    changed, read = attempt()
    assert changed != digest
    assert read == ["config.json", "model.safetensors"]


def test_a_job_that_began_with_other_arithmetic_is_told() -> None:
    """Not where the base itself is in that format, nor where the version is the same."""

    def stored(error: float, weight_format: WeightFormat = "fp8") -> FrozenModule:
        return FrozenModule(
            module="m", format=weight_format, shape=[2, 2], bytes=8, relative_error=error
        )

    base = BaseOrigin(name="base", path="/base", files={}, digest="")
    former = Origins(
        base=base,
        data=[],
        frozen_modules=[],
        quantiser={"fp8": VERSIONS["fp8"] - 1, "nf4": VERSIONS["nf4"]},
    )
    [told] = changed_arithmetic(former, [stored(0.02), stored(0.05, "nf4")])
    assert f"in fp8 by version {VERSIONS['fp8']}" in told
    assert f"began with version {VERSIONS['fp8'] - 1}" in told
    assert changed_arithmetic(former, [stored(0.0)]) == []
    assert changed_arithmetic(former, [stored(0.05, "nf4")]) == []
    assert changed_arithmetic(None, [stored(0.02)]) == []
