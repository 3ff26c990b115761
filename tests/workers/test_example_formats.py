"""Every example of a format is trained on, two steps, as it lies in `examples/data/formats`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ft_service.data.data_file import check_lines
from ft_service.data.formats.reading import open_data
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.rundir.documents import Outcome, OutcomeKind
from ft_service.spec import DataFileRef
from tests.support.bases import SAMPLE
from tests.support.training.attempts import losses, run_attempt
from tests.support.training.models import spec_for

EXAMPLES = sorted((Path(__file__).parents[2] / "examples/data/formats").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_trained_on(path: Path, tmp_path: Path) -> None:
    assert check_lines(path).examples == 5
    reader = open_data(path)
    reader.look()
    assert reader.shape.format is not None
    dpo: dict[str, Any] = {"method": {"type": "dpo"}} if reader.shape.format.is_pairs else {}
    run = RunDir(tmp_path)
    file = DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path))
    training = {"max_steps": 2, "batch_size": 2, "max_length": 128}
    run.write(
        "spec.json",
        spec_for(
            SAMPLE, file, precision={"compute": "fp32"}, training=training, lora={"r": 4}, **dpo
        ),
    )
    assert run_attempt(run, 1, 1) == Outcome(kind=OutcomeKind.SUCCEEDED)
    assert list(losses(run)) == [1, 2]
