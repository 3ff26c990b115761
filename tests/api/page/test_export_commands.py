"""Commands that run an export. Pure."""

from __future__ import annotations

import pytest

from api.page.export_commands import PLACES, run_commands
from ft_service.rundir.documents import ExportFormat


def test_every_form_has_one_place_and_commands() -> None:
    forms = [form for place in PLACES for form in place.forms]
    assert sorted(forms) == sorted(set(ExportFormat) - {ExportFormat.PEFT})
    for form in forms:
        text = run_commands(form, {"id": "ftjob-1", "lora": {"r": 8}}, "base", "mine")
        assert text.startswith(f"tar xf ftjob-1-{form}.tar\n")


@pytest.mark.parametrize(
    ("lora", "limit"), [({"r": 4}, 8), ({"r": 300}, 320), ({"r": 8, "rank_pattern": {"q": 40}}, 64)]
)
def test_vllm_is_told_a_rank_that_holds_the_adapter(lora: dict[str, object], limit: int) -> None:
    text = run_commands("vllm", {"id": "ftjob-1", "lora": lora}, "org/base", "my model")
    assert f"vllm serve org/base --enable-lora --max-lora-rank {limit} " in text
    assert "--lora-modules 'my model'=./vllm" in text
