"""Experts that are published stacked and in FP8: any rows of any matrix, whichever way round, and
what is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ft_service.errors import SpecError
from tests.support.training.composites import save_composite
from tests.support.training.models import spec_for
from tests.support.training.parity import CPU
from workers.base.base_tensors import Safetensors
from workers.base.expert_stacks import FP8Stack
from workers.base.load import load
from workers.base.quantized_rows import PlainBase
from workers.model.build import build
from workers.quant import fp8_blocks
from workers.quant.weights import FP8BlocksWeight

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
    save_file(
        {"mlp.experts.up_proj": CODES, "mlp.experts.up_proj_scale_inv": scales},
        folder / "model.safetensors",
    )
    return FP8Stack(Safetensors(folder), "mlp.experts.up_proj", BLOCK)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_by_blocks_of_the_formats_width_are_kept(transposed: bool, tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(2)
    codes = torch.randn(2, 300, 200, generator=random).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, 2, generator=random)
    save_file(
        {"mlp.experts.up_proj": codes, "mlp.experts.up_proj_scale_inv": scales},
        tmp_path / "model.safetensors",
    )
    stack = FP8Stack(Safetensors(tmp_path), "mlp.experts.up_proj", (128, 128))
    for index in range(2):
        matrix = stack.matrix(index, transposed=transposed)
        each = scales[index].repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :200]
        own, each = (codes[index].mT, each.mT) if transposed else (codes[index], each)
        assert (matrix.format, matrix.exact, matrix.shape) == ("fp8_blocks", True, tuple(own.shape))
        kept = matrix.parts(100, 190)
        assert torch.equal(kept[0].view(torch.uint8), own[100:190].view(torch.uint8))
        assert torch.equal(kept[1], each[100:190, ::128])
        values = fp8_blocks.dequantize(
            fp8_blocks.FP8BlocksParts(kept[0].contiguous(), kept[1]), own.shape[1], torch.float32
        )
        assert torch.equal(values, matrix.rows(100, 190))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", SCALES)
def test_any_rows_of_any_matrix_have_the_values_that_the_files_stand_for(
    layout: str, transposed: bool, tmp_path: Path
) -> None:
    stack = _stack(tmp_path, SCALES[layout])
    values = CODES.float() * _each(SCALES[layout])
    for index in range(3):
        matrix = stack.matrix(index, transposed=transposed)
        value = values[index].mT if transposed else values[index]
        assert matrix.shape == value.shape
        for start, end in [(0, len(value)), (1, 5), (5, 6), (2, 2), (len(value), len(value))]:
            assert torch.equal(matrix.rows(start, end), value[start:end])
        if matrix.exact:
            codes, scales = matrix.parts(1, 5)
            assert (codes.dtype, scales.shape) == (torch.float8_e4m3fn, (4, 1))
            assert torch.equal(codes.float() * scales, value[1:5])
        assert matrix.exact == (
            layout != "blocks" and (not transposed or layout not in ("rows", "gate and up"))
        )


def test_merging_reads_matrices_whole_and_as_they_lie_there(tmp_path: Path) -> None:
    stack = _stack(tmp_path, SCALES["blocks"])
    (tmp_path / "config.json").write_text(
        '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 5]}}'
    )
    base = PlainBase(Safetensors(tmp_path), tmp_path)
    assert base.names() == ["mlp.experts.up_proj"]
    assert base.shape("mlp.experts.up_proj") == stack.shape
    assert base.dtype("mlp.experts.up_proj") == "BF16"
    assert torch.equal(
        base.rows("mlp.experts.up_proj", 1, 3), (CODES.float() * _each(SCALES["blocks"]))[1:]
    )


@pytest.mark.parametrize(
    "scales", [torch.ones(2), torch.ones(3, 3, 1), torch.ones(3, 1, 8), torch.ones(3, 2, 2, 1)]
)
def test_scales_that_do_not_belong_to_the_codes_are_refused(
    scales: torch.Tensor, tmp_path: Path
) -> None:
    with pytest.raises(
        SpecError,
        match=r"mlp\.experts\.up_proj is quantised in a layout that is not supported.*nor those "
        r"of blocks of 4 x 5",
    ):
        _stack(tmp_path, scales)


@pytest.mark.parametrize(("block", "default"), [(128, "fp8"), (128, "bf16"), (16, "bf16")])
def test_stacks_that_lie_the_other_way_round_are_read_so_in_fp8_too(
    block: int, default: str, tmp_path: Path
) -> None:
    """As Qwen3-VL's mixture is published in FP8: by blocks of [experts, in, out]."""
    assert save_composite(
        "qwen3_vl_moe",
        tmp_path,
        {"text_config": {"hidden_size": 160, "moe_intermediate_size": 144}},
    )
    file = tmp_path / "model.safetensors"
    config = tmp_path / "config.json"
    tensors = load_file(file)
    values = {}
    for name in [name for name in tensors if ".experts." in name]:
        stack = tensors.pop(name).float()
        high, wide = (-(-side // block) for side in stack.shape[1:])
        scale = (
            torch.rand(len(stack), high, wide, generator=torch.Generator().manual_seed(len(values)))
            / 448
        )
        each = scale.repeat_interleave(block, 1).repeat_interleave(block, 2)[
            :, : stack.shape[1], : stack.shape[2]
        ]
        codes = (stack / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors |= {name: codes, f"{name}_scale_inv": scale}
        values[name] = codes.float() * each
        assert min(stack.shape[1:]) > 128
    save_file(tensors, file, metadata={"format": "pt"})
    quantization = (
        f'"quantization_config": {{"quant_method": "fp8", "weight_block_size": [{block}, {block}]}}'
    )
    config.write_text(config.read_text().replace("{", "{" + quantization + ",", 1))
    spec = spec_for(tmp_path, precision={"default": default})
    built = build(spec, CPU)
    loaded = load(built.peft_model, tmp_path, seed=1, compute_dtype=torch.float32, device=CPU)
    assert set((loaded.kept if default == "fp8" else loaded.converted).values()) == {
        f"FP8 by blocks of {block} x {block}"
    }
    weights = {
        name.removeprefix("base_model.model."): weight
        for name, weight in built.peft_model.named_parameters()
    }
    for name, stack in values.items():
        weight: Any = weights[f"{name}.weight"].data
        exact = stack.mT.flatten(0, 1)
        if default == "fp8":
            assert isinstance(weight, FP8BlocksWeight)
            assert torch.equal(weight.dequantize(torch.float32), exact)
        else:
            assert torch.equal(weight, exact.bfloat16().float())
