"""docs/serving-matrix.md says what its program finds: here by what needs no weights, in the slow
test all of it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.programs import serving_matrix
from tests.support.training.models import FAMILIES
from workers.exports.gguf_layout import ARCHITECTURES


def rows() -> dict[str, dict[str, str]]:
    """Family → form → what the page says."""
    lines = [line for line in serving_matrix.PAGE.read_text().splitlines() if line.startswith("| ")]
    titles = [cell.strip() for cell in lines[0].strip("|").split("|")]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0]: dict(zip(titles[1:], row[1:], strict=True)) for row in found}


def test_the_page_has_every_family_and_says_which_llama_cpp_has() -> None:
    found = rows()
    assert list(found) == list(FAMILIES)
    for family, forms in found.items():
        assert tuple(forms) == serving_matrix.FORMS
        assert set(forms.values()) <= {"logits", "matrices", "served", "differs", "no"}
        assert (forms["vllm"] == "served") == (family in serving_matrix.IN_VLLM), family
        assert (forms["gguf"] == "logits") == (family in ARCHITECTURES), family
        assert (forms["gguf-adapter"] == "logits") == (family in ARCHITECTURES), family
    assert serving_matrix.PAGE.read_text().startswith(serving_matrix.HEAD)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_says_what_the_program_finds(family: str, tmp_path: Path) -> None:
    found = {form: seen for form, (seen, _) in serving_matrix.cells(family, tmp_path).items()}
    there = rows()[family]
    there["vllm"] = (
        "matrices"  # vLLM itself is asked where it is: tests/ft_service/serving/test_vllm.py
    )
    if importlib.util.find_spec("llama_cpp_py_sync") is None:  # whose logits the page was made with
        there = {
            form: "matrices" if form.startswith("gguf") and seen == "logits" else seen
            for form, seen in there.items()
        }
    assert found == there
