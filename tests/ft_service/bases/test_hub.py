from __future__ import annotations

import pytest

from ft_service.bases.hub import HubFile, HubRepository, parse_name
from ft_service.errors import SpecError
from tests.support.hub import COMMIT


def test_only_weights_in_safetensors_are_taken_and_each_once() -> None:
    def model(*names: str) -> HubRepository:
        return HubRepository(
            "a/b", "main", COMMIT, None, {name: HubFile(1, None) for name in names}
        )

    whole = model(
        "config.json",
        "model.safetensors",
        "consolidated.safetensors",
        "onnx/model.safetensors",
        "tokenizer.json",
    )
    assert (whole.weights(), whole.small_files()) == (
        ["model.safetensors"],
        ["config.json", "tokenizer.json"],
    )
    with pytest.raises(SpecError, match=r"no weights in safetensors, only pytorch_model\.bin"):
        model("config.json", "pytorch_model.bin").weights()
    with pytest.raises(SpecError, match="an adapter is named by its base"):
        model("adapter_config.json", "adapter_model.safetensors").weights()


def test_a_page_s_address_is_a_name_too() -> None:
    assert parse_name("https://huggingface.co/Qwen/Qwen3-8B/") == ("Qwen/Qwen3-8B", "main")
    assert parse_name("Qwen/Qwen3-8B@v1") == ("Qwen/Qwen3-8B", "v1")
