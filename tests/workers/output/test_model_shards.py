"""Models in several safetensors files."""

from __future__ import annotations

from workers.output.model_shards import TensorPlan, in_files


def test_codes_and_scales_stay_in_one_file() -> None:
    units = [
        (TensorPlan(f"{i}", (10,), "U8"), TensorPlan(f"{i}_scale", (1,), "BF16")) for i in range(5)
    ]
    files = in_files(units, limit=25)
    assert [len(group) for group in files.values()] == [2, 2, 1]
