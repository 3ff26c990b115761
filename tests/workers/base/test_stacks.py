"""Experts that are published stacked and in FP8: any rows of any matrix, whichever way round, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ft_service.errors import SpecError
from tests.support.training.composites import save_composite
from tests.support.training.models import spec_for
from tests.support.training.parity import CPU
from workers.base.load import load
from workers.base.source import Safetensors
from workers.base.stacks import FP8Stack
from workers.model.build import build
from workers.quant.rowwise import RowQuantized

CODES = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
SCALES = {
    "one": torch.tensor(0.5),
    "one in a row": torch.tensor([0.5]),
    "one a matrix": torch.tensor([0.5, 2.0, 3.0]),
    "one a matrix, as a block": torch.tensor([0.5, 2.0, 3.0]).view(3, 1, 1),
    "gate and up": torch.arange(1.0, 7.0).view(3, 2, 1),
    "rows": torch.arange(1.0, 19.0).view(3, 6, 1),
    "blocks": torch.arange(1.0, 13.0).view(3, 2, 2).bfloat16(),
}
BLOCK = (4, 5)
"""Neither divides the matrices, which have a last block that is smaller."""


def _each(scales: torch.Tensor) -> torch.Tensor:
    """A scale for every code [3, 6, 8]."""
    grid = (scales if scales.ndim == 3 else scales.reshape(-1, 1, 1)).float()
    height, width = BLOCK if grid.shape[1:] == (2, 2) else (6 // grid.shape[1], 8 // grid.shape[2])
    return grid.repeat_interleave(height, 1).repeat_interleave(width, 2)[:, :6, :8].expand(3, 6, 8)


def _stack(folder: Path, scales: torch.Tensor) -> FP8Stack:
    save_file({"mlp.experts.up_proj": CODES, "mlp.experts.up_proj_scale_inv": scales}, folder / "model.safetensors")
    return FP8Stack(Safetensors(folder), "mlp.experts.up_proj", BLOCK)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", SCALES)
def test_any_rows_of_any_matrix_have_the_values_that_the_files_stand_for(layout: str, transposed: bool, tmp_path: Path) -> None:
    stack, values = _stack(tmp_path, SCALES[layout]), CODES.float() * _each(SCALES[layout])
    for index in range(3):
        matrix, value = stack.matrix(index, transposed=transposed), values[index].mT if transposed else values[index]
        assert matrix.shape == value.shape
        for start, end in [(0, len(value)), (1, 5), (5, 6), (2, 2), (len(value), len(value))]:
            assert torch.equal(matrix.rows(start, end), value[start:end])
        if matrix.exact:
            codes, scales = matrix.parts(1, 5)
            assert (codes.dtype, scales.shape) == (torch.float8_e4m3fn, (4, 1))
            assert torch.equal(codes.float() * scales, value[1:5])
        assert matrix.exact == (layout != "blocks" and (not transposed or layout not in ("rows", "gate and up")))


@pytest.mark.parametrize("scales", [torch.ones(2), torch.ones(3, 3, 1), torch.ones(3, 1, 8), torch.ones(3, 2, 2, 1)])
def test_scales_that_do_not_belong_to_the_codes_are_refused(scales: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"mlp\.experts\.up_proj is quantised in a layout that is not supported.*in blocks of 4 x 5"
    ):
        _stack(tmp_path, scales)


def test_stacks_that_lie_the_other_way_round_are_read_so_in_fp8_too(tmp_path: Path) -> None:
    """As Qwen3-VL's mixture is published in FP8: by blocks of [experts, in, out]."""
    assert save_composite("qwen3_vl_moe", tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(file)
    plain = {name: tensors.pop(name).float() for name in list(tensors) if ".experts." in name}
    for name, stack in plain.items():
        scale = stack.unflatten(2, (-1, 16)).unflatten(1, (-1, 16)).abs().amax((2, 4)) / 448
        each = scale.repeat_interleave(16, 1).repeat_interleave(16, 2)
        tensors |= {name: (stack / each).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    save_file(tensors, file, metadata={"format": "pt"})
    quantization = '"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}'
    config.write_text(config.read_text().replace("{", "{" + quantization + ",", 1))
    spec = spec_for(tmp_path)
    built = build(spec, CPU)
    loaded = load(built.peft_model, tmp_path, seed=1, compute_dtype=torch.float32, device=CPU)
    assert set(loaded.requantized.values()) == {"FP8 by blocks of 16 x 16"}
    weights = {name.removeprefix("base_model.model."): weight for name, weight in built.peft_model.named_parameters()}
    for name, stack in plain.items():
        weight = weights[f"{name}.weight"].data
        assert isinstance(weight, RowQuantized)
        wanted = stack.mT.flatten(0, 1)
        assert (weight.dequantize(torch.float32) - wanted).norm() < 0.05 * wanted.norm()
