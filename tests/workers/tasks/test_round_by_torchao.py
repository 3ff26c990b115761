"""Models that torchao has rounded: what is read again, by transformers, is what was written, and
lies within half a step of what was merged.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ft_service.errors import SpecError
from ft_service.host.helper_process import Program, run_once
from tests.support.training.models import save_tiny_llama
from workers.base.base_tensors import Safetensors
from workers.tasks.round_by_torchao import write_torchao

COLUMNS_OF = {"torchao-int8": None, "torchao-fp8": None, "torchao-nvfp4": 16, "torchao-8da4w": 32}
"""Form → columns that share a scale; None: the row."""
LEVELS = {"torchao-int8": 127, "torchao-8da4w": 7}
"""Form → the largest code: half a step is the largest magnitude over twice of it."""
SHARE = {"torchao-fp8": 2**-4, "torchao-nvfp4": 0.26}
"""Form → largest error as a share of a group's largest magnitude: half the distance of the two
largest codes, and for NVFP4 what an e4m3 scale is off.
"""


def rounded(merged: Path, out: Path, form: str, restored: Path) -> dict[str, object]:
    """What the program says, in a process of its own as an export runs it."""
    command = (sys.executable, "-m", "workers.tasks.round_by_torchao", str(merged), str(out))
    return run_once(
        Program(
            command=(
                *command,
                *("--form", form.removeprefix("torchao-"), "--restored", str(restored)),
            )
        )
    )


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bf16 whose head is its embedding."""
    return save_tiny_llama(
        tmp_path_factory.mktemp("merged") / "model", tie_word_embeddings=True, hidden_size=64
    )


def largest_by_group(values: Tensor, columns: int | None) -> Tensor:
    """The largest magnitude of each value's group, [rows, columns]."""
    groups = values.unflatten(1, (-1, columns or values.shape[1]))
    return groups.abs().amax(dim=2, keepdim=True).expand_as(groups).flatten(1)


@pytest.mark.filterwarnings(  # of `_default`, which releases for phones have
    "ignore:Config Deprecation:UserWarning"
)
@pytest.mark.parametrize(
    "form",
    [
        "torchao-8da4w",
        *(
            pytest.param(form, marks=pytest.mark.slow)
            for form in ("torchao-int8", "torchao-fp8", "torchao-nvfp4")
        ),
    ],
)
def test_what_transformers_reads_is_what_was_written(
    merged: Path, tmp_path: Path, form: str
) -> None:
    report = rounded(merged, tmp_path / "out", form, tmp_path / "restored")
    config = json.loads((tmp_path / "out/config.json").read_text())
    phone = form == "torchao-8da4w"
    assert config["quantization_config"]["quant_method"] == "torchao"
    assert config["tie_word_embeddings"] is not phone
    with Safetensors(merged) as before, Safetensors(tmp_path / "restored") as after:
        names = [name for name in after.names() if name != "lm_head.weight"]
        assert set(names) == set(before.names()) - {"lm_head.weight"}
        changed = [n for n in names if not torch.equal(before.whole(n), after.whole(n))]
        assert all(name.endswith("proj.weight") or "embed" in name for name in changed)
        assert report["exact"] == report["tensors"] == len(changed) + phone
        for name in changed:
            was = before.whole(name).float()
            columns = None if "embed" in name else COLUMNS_OF[form]
            levels = 127 if "embed" in name else LEVELS.get(form)
            share = 0.5 / levels if levels else SHARE[form]
            now = after.whole(name).float()
            to_bf16 = 3 * now.abs() * 2**-8  # its scale, its quotient, its product
            bound = largest_by_group(was, columns) * share * 1.02 + to_bf16 + 1e-6
            assert ((now - was).abs() <= bound).all(), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "restored", dtype=torch.bfloat16)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        theirs, ours = again(ids).logits.float(), plain(ids).logits.float()
    apart = float((theirs - ours).norm() / ours.norm())
    assert apart < (0.1 if phone else 0.01), "inputs in 8 bits cost more than bf16 does"


def test_a_width_that_groups_do_not_divide_is_refused_by_name(tmp_path: Path) -> None:
    odd = save_tiny_llama(tmp_path / "odd", intermediate_size=48)
    with pytest.raises(SpecError, match=r"down_proj has 48") as refused:
        write_torchao(odd, tmp_path / "out", "8da4w", tmp_path / "restored")
    assert refused.value.param == "format"
    assert not (tmp_path / "out").exists()
