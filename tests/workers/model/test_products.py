"""What is measured of a processor's products, against what they take; also with instructions taken
away from it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from ft_service.host.processor import Products, processor_kind
from tests.support.training.live_bytes import peak_bytes
from workers.model.products import products

ROWS = 512
WIDTH = 192


def test_a_measurement_is_of_this_processor_and_made_once() -> None:
    threads = torch.get_num_threads()
    found = products()
    assert found is products()
    assert found.kind == processor_kind()
    assert found.fp32_flops > 0
    assert found.bf16_flops > 0
    assert torch.get_num_threads() == threads


def test_a_product_in_bf16_by_fp32_has_its_result_in_fp32_beside_it() -> None:
    """4 bytes for each number of the result, which the plan counts; and nothing where a plain loop
    computes it.
    """
    x, weight = (torch.ones(rows, 64, dtype=torch.bfloat16) for rows in (ROWS, WIDTH))
    numbers = ROWS * WIDTH
    beside = peak_bytes(lambda: torch.nn.functional.linear(x, weight)) - x.element_size() * numbers
    if products().by_fp32:
        assert beside == pytest.approx(4 * numbers, rel=0.01)
    elif not products().by_onednn:
        assert beside == 0
    single = peak_bytes(lambda: torch.nn.functional.linear(x.float(), weight.float()))
    assert single == 4 * (numbers + x.numel() + weight.numel())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names instructions of x86")
def test_a_processor_without_its_wide_instructions_is_another_kind_and_slow_in_bf16() -> None:
    program = "import json, dataclasses; from workers.model.products import products; "
    program += "print(json.dumps(dataclasses.asdict(products())))"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    limited = Products(**json.loads(done.stdout))
    assert limited.slow_in_bf16
    assert not limited.by_onednn
    assert (
        limited.kind
        == processor_kind(environment=environment)
        != processor_kind(environment=os.environ | {"MKL_A": "1"})
    )
    assert asdict(limited).keys() == asdict(products()).keys()
