from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.bases.description import Described, Refusal, description_key
from ft_service.control.bases import describe_bases
from ft_service.control.bases.describe_bases import local_descriptions, models_report
from ft_service.settings import Settings
from tests.support.bases import save_base
from tests.support.describing import VERSIONS, small_document


def test_the_report_counts_bases_without_describing_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(home=tmp_path / "home", models=[tmp_path / "models", tmp_path / "none"])
    described, refused, _ = (
        save_base(tmp_path / "models" / name, rope_theta=float(len(name)))
        for name in ("a", "bb", "ccc")
    )
    (save_base(tmp_path / "models" / "pickled") / "model.safetensors").rename(
        tmp_path / "models/pickled/pytorch_model.bin"
    )
    descriptions = local_descriptions(settings, makes=False)
    descriptions.add(described, small_document(described))
    descriptions.add(
        refused, Described(description_key(refused, VERSIONS), VERSIONS, refused=Refusal("no"))
    )
    monkeypatch.setattr(
        describe_bases, "describe_in_process", lambda *_: pytest.fail("it was described")
    )

    assert list(models_report(settings)) == [
        f"{tmp_path}/models: 4 bases, 1 described, 2 refused, 1 not described yet.",
        f"{tmp_path}/none: 0 bases, 0 described, 0 refused, 0 not described yet.",
    ]
