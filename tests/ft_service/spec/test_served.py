"""What vLLM would refuse of an adapter is refused before it is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.errors import SpecError
from ft_service.spec import parse_request
from ft_service.spec.resolved import note_served
from tests.support.bases import spec_on


def test_adapters_on_stacks_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    experts = {"target_parameters": ["mlp.experts.gate_up_proj"]}
    with pytest.raises(SpecError, match="it loads no adapters on stacks of experts") as caught:
        spec_on(tmp_path, serve="vllm", lora=experts)
    assert caught.value.param == "lora.target_parameters"
    assert spec_on(tmp_path, lora=experts).lora.target_parameters == ["mlp.experts.gate_up_proj"]


@pytest.mark.parametrize(
    ("lora", "step", "padded"),
    [({"r": 12}, 16, False), ({"r": 8, "rank_pattern": {"q_proj": 300}}, 320, True), ({"r": 512}, 512, False)],
)
def test_what_the_server_needs_is_said(lora: dict[str, object], step: int, padded: bool) -> None:
    request = parse_request({"model": "m", "training_file": "f", "serve": "vllm", "lora": lora})
    text = note_served(request.lora)
    assert f"--max-lora-rank {step} or more" in text
    assert ("padded to rank 300" in text) == padded


def test_another_server_is_refused() -> None:
    with pytest.raises(SpecError, match="serve"):
        parse_request({"model": "m", "training_file": "f", "serve": "ollama"})
