"""Published bases that no worker can train: refused by the plan, in words that name what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ft_service.bases import config_defaults
from ft_service.bases.contents import read_contents
from ft_service.bases.described import described
from ft_service.errors import SpecError
from ft_service.plan.base import base_shape
from tests.support.bases import TINY, llama_shapes, save_base, save_headers

UNKNOWN = ("kimi_k2", "kimi_k3", "minimax_m3", "mimo", "nemotron-nas", "internlm2", "chatglm")
NVFP4 = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
}


@pytest.fixture
def same_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version of transformers that the file was written with is the one that is installed, whatever the tests run with."""
    written = json.loads(config_defaults.FILE.read_bytes())["transformers"]
    monkeypatch.setattr(config_defaults, "_installed", lambda: written)


@pytest.mark.parametrize("kind", UNKNOWN)
@pytest.mark.usefixtures("same_version")
def test_a_type_that_transformers_does_not_know_is_refused(tmp_path: Path, kind: str) -> None:
    folder = save_base(tmp_path / "base", model_type=kind, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    for look in (lambda: base_shape(read_contents(folder)), lambda: described(folder)):
        with pytest.raises(SpecError, match=f"The base is a {kind} model, a type that transformers .* does not know; the code"):
            look()


def test_with_another_version_of_transformers_the_worker_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_defaults, "_installed", lambda: "99.0")
    assert base_shape(read_contents(save_base(tmp_path / "base", model_type="minimax_m3"))).untested


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}}, "NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "W4A16_AWQ"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "INT-QUANTIZED"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"bits": 4}, "a method that its config.json does not name"),
    ],
)
def test_a_format_is_refused_by_its_name(tmp_path: Path, given: dict[str, Any], named: str) -> None:
    folder = save_base(tmp_path / "base", quantization_config=given)
    with pytest.raises(SpecError, match=rf"The base is published quantised by {named}\. Bases can be plain"):
        base_shape(read_contents(folder))


def test_what_only_modelopt_s_own_file_announces_is_read(tmp_path: Path) -> None:
    folder = save_base(tmp_path / "base")
    base_shape(read_contents(folder))
    (folder / "hf_quant_config.json").write_text(json.dumps(NVFP4))
    with pytest.raises(SpecError, match=r"The base is published quantised by NVFP4\."):
        base_shape(read_contents(folder))


def test_codes_of_an_unnamed_format_are_refused_as_such(tmp_path: Path) -> None:
    folder = save_base(tmp_path / "base")
    shapes = llama_shapes(TINY)
    save_headers(folder / "model.safetensors", {name: shape for name, shape in shapes.items() if "o_proj" not in name})
    codes = {name: (*shape[:-1], shape[-1] // 2) for name, shape in shapes.items() if "o_proj" in name}
    path = folder / "codes.safetensors"
    _save_codes(path, codes)
    index = {name: "codes.safetensors" if name in codes else "model.safetensors" for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(
        SpecError, match=r"o_proj\.weight is quantised .*: its U8 numbers are codes of a format that config\.json"
    ):
        base_shape(read_contents(folder))


def _save_codes(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    sizes = {name: shape[0] * shape[1] for name, shape in shapes.items()}
    entries, end = {}, 0
    for name, shape in shapes.items():
        entries[name] = {"dtype": "U8", "shape": list(shape), "data_offsets": [end, end + sizes[name]]}
        end += sizes[name]
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(end))


def test_a_head_of_its_own_that_no_file_holds_is_refused(tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in llama_shapes(TINY).items() if name != "lm_head.weight"}
    folder = save_base(tmp_path / "base", TINY, shapes)
    with pytest.raises(SpecError, match=r"tie_word_embeddings = false, and its files hold no output head \(lm_head\)"):
        base_shape(read_contents(folder))
    assert base_shape(read_contents(save_base(folder, TINY, shapes, tie_word_embeddings=True)))
    named_otherwise = {**shapes, "output_projection.weight": llama_shapes(TINY)["lm_head.weight"]}
    assert base_shape(read_contents(save_base(tmp_path / "other", TINY, named_otherwise))), "a head of another name"


@pytest.mark.parametrize(
    ("kinds", "blocks", "taken"),
    [(["mamba", "hybrid"], 1, True), (["hybrid", "hybrid"], 2, True), (["hybrid", "hybrid"], 1, False)],
)
def test_layers_that_share_a_block_are_refused(tmp_path: Path, kinds: list[str], blocks: int, *, taken: bool) -> None:
    config = {**TINY, "model_type": "zamba2", "layers_block_type": kinds, "num_mem_blocks": blocks}
    folder = save_base(tmp_path / "base", config, llama_shapes(TINY))
    if taken:
        assert base_shape(read_contents(folder))
        return
    with pytest.raises(SpecError, match="several of its layers are one block, which its files hold once"):
        base_shape(read_contents(folder))
