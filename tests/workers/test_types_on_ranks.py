"""Every type that can be tuned, tiny: two ranks in NF4 train as one, and an interrupted job ends
bitwise as a whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.training.causal_types import OF_SEVERAL, ROWS, TYPES, save_type
from tests.support.training.checks import BOUND, between_ranks, resume_all
from tests.support.training.composites import EXACT, save_composite
from tests.support.training.models import save_tokenizer
from tests.support.training.tested_types import TESTED

KINDS = [*sorted(TESTED & set(TYPES)), *sorted(EXACT & set(OF_SEVERAL))]
TOGETHER = 18
"""Types in the same processes: to start two costs as much as several types do."""
CHUNKS = [KINDS[first : first + TOGETHER] for first in range(0, len(KINDS), TOGETHER)]
ODD = [
    *("deepseek_v32", "glm_moe_dsa", "gpt_oss", "llama4_text", "minimax", "nemotron_h"),
    *("gemma4", "kimi_k25", "mistral4", "qwen3_vl_moe"),
]
MIXED: dict[str, Any] = {
    "default": "bf16",
    "overrides": {
        r".*\.layers\.0\..*": "nf4",
        r".*\.layers\.1\..*(o_proj|out_proj|down_proj|up_proj)": "fp8",
    },
}
"""All kinds of storage, by names that nearly all types have."""


def _saved(kinds: Sequence[str], folder: Path) -> dict[str, Path]:
    for kind in kinds:
        assert (
            save_composite(kind, folder / kind)
            if kind in OF_SEVERAL
            else save_type(kind, folder / kind, ROWS)
        )
        save_tokenizer(folder / kind)
    return {kind: folder / kind for kind in kinds}


@pytest.mark.filterwarnings("ignore")  # of architectures that are not trained here
def test_what_looks_at_the_dtype_of_a_weight_finds_that_of_the_arithmetic(tmp_path: Path) -> None:
    """Zaya rounds what it gives its last norm to the weight's, A.X K2 what it gives its indexer,
    gathered or not.
    """
    folders = _saved([kind for kind in ("axk2", "zaya") if kind in KINDS], tmp_path)
    assert not {
        kind: error for kind, error in between_ranks(folders, 2).items() if not error <= BOUND
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kinds", CHUNKS, ids=lambda kinds: "-".join(kinds))
def test_two_ranks_train_as_one_and_a_job_resumes_bitwise(
    kinds: Sequence[str], tmp_path: Path
) -> None:
    folders = _saved(kinds, tmp_path / "bases")
    apart = {kind: error for kind, error in between_ranks(folders, 2).items() if not error <= BOUND}
    other = [kind for kind, same in resume_all(folders, tmp_path / "runs").items() if not same]
    assert (apart, other) == ({}, [])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("weights", [{}, MIXED], ids=["nf4", "mixed"])
def test_three_ranks_whose_rows_are_uneven_train_as_one(
    weights: dict[str, Any], tmp_path: Path
) -> None:
    """Shares of three end inside experts, and some ranks have no row of what is small."""
    folders = _saved([kind for kind in ODD if kind in KINDS], tmp_path)
    assert not {
        kind: error
        for kind, error in between_ranks(folders, 3, **weights).items()
        if not error <= BOUND
    }
