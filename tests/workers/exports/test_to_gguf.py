"""GGUF files by what llama.cpp's own package reads in them; and, where it is installed, by what
llama.cpp computes.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from ft_service.data.template_process import TemplateProcess
from ft_service.errors import SpecError
from tests.support import programs
from tests.support.bases import SAMPLE, TOKENIZER
from tests.support.training.adapters import merged_by_peft, save_adapter
from tests.support.training.models import save_tiny
from tests.support.training.rendered_here import RenderedHere
from workers.exports import to_gguf
from workers.exports.to_gguf import export_adapter, export_model
from workers.tasks.merge import merge

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
EXACT: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}},
    "mistral": {"sliding_window": None},
    "qwen2": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "qwen3": {"head_dim": 16},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 16, "num_hidden_layers": 3},
    "gemma3_text": {"query_pre_attn_scalar": 16, "num_hidden_layers": 7},
    "phi3": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    },
}
"""Family → what of it llama.cpp computes the same, and more than the plainest of it."""


def save_base(family: str, folder: Path, **changes: Any) -> Path:
    """A tiny base with the sample's tokenizer, which has merges, and rows of embeddings beyond
    it.
    """
    size = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 1040,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    save_tiny(family, folder, **{**size, **changes})
    for name in TOKENIZER:
        shutil.copy(SAMPLE / name, folder / name)
    return folder


def values(file: Path) -> dict[str, torch.Tensor]:
    return {
        t.name: torch.from_numpy(np.array(dequantize(t.data, t.tensor_type)))
        for t in GGUFReader(file).tensors
    }


def fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in GGUFReader(file).fields.items()}


@pytest.fixture(autouse=True)
def rendered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_gguf, "TemplateProcess", RenderedHere)


def test_a_llama_in_gguf_holds_its_weights_in_llama_cpps_order_and_its_vocabulary(
    tmp_path: Path,
) -> None:
    base = save_base("llama", tmp_path / "base", **EXACT["llama"])
    report = export_model(base, tmp_path, "bf16", title="ft:tiny:local:mine:1")
    assert (report["tensors"], report["exact"], report["relative_error"]) == (22, 22, 0.0)
    there = values(tmp_path / "model.gguf")
    here = load_file(base / "model.safetensors")
    assert torch.equal(
        there["blk.1.ffn_down.weight"], here["model.layers.1.mlp.down_proj.weight"].float()
    )
    q = here[
        "model.layers.0.self_attn.q_proj.weight"
    ].float()  # 4 heads of 16: row i and row i + 8 become neighbours
    assert torch.equal(there["blk.0.attn_q.weight"][:4], q[[0, 8, 1, 9]])
    assert torch.equal(there["blk.0.attn_q.weight"][16:18], q[[16, 24]])
    divisors = there["rope_freqs.weight"]
    assert (divisors[0], divisors[-1]) == (1.0, 8.0)
    assert ((divisors > 1) & (divisors < 8)).any(), (
        "between high and low frequencies they are blended"
    )
    said = fields(tmp_path / "model.gguf")
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert said["tokenizer.ggml.pre"] == "smollm"
    assert said["tokenizer.ggml.tokens"][:1024] == tokenizer.convert_ids_to_tokens(
        list(range(1024))
    )
    assert said["tokenizer.ggml.tokens"][1039] == "[PAD1039]"
    assert (said["tokenizer.ggml.eos_token_id"], said["tokenizer.ggml.add_bos_token"]) == (2, False)
    assert said["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    assert said["tokenizer.chat_template"] == tokenizer.chat_template
    assert (said["llama.attention.head_count_kv"], said["llama.context_length"]) == (2, 128)
    assert said["general.name"] == "ft:tiny:local:mine:1"


def test_a_conversation_begins_in_gguf_as_its_template_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer may put a beginning before each text (Llama's, Mistral's), and a job's template,
    such as chatml, none.
    """
    monkeypatch.setattr(to_gguf, "TemplateProcess", TemplateProcess)  # as in an export
    base = save_base("llama", tmp_path / "base")
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(base)
    begins = {"": False, "{{ bos_token }}{{ messages[0].content }}": True}
    for number, (template, expected) in enumerate(begins.items()):
        (out := tmp_path / f"{number}").mkdir()
        report = export_model(base, out, "bf16", title="x", chat_template=template)
        assert fields(out / "model.gguf")["tokenizer.ggml.add_bos_token"] is expected
        assert any("does not begin with" in note for note in report["notes"]) is not expected


def test_the_day_of_the_export_is_not_said_for_ever(tmp_path: Path) -> None:
    """Llama 3.2's template writes today's date, which Ollama's language cannot."""
    base = save_base("llama", tmp_path / "base")
    adapter = tmp_path / "adapter"
    text = "{{ strftime_now('%d %b') }}\n" + (base / "chat_template.jinja").read_text()
    export_adapter(base, save_adapter(base, adapter), tmp_path, title="x", chat_template=text)
    assert "TEMPLATE" not in (tmp_path / "Modelfile").read_text()


def test_norms_of_gemma_are_what_they_multiply_by(tmp_path: Path) -> None:
    base = save_base("gemma3_text", tmp_path / "base", **EXACT["gemma3_text"])
    export_model(base, tmp_path, "bf16", title="x")
    there = values(tmp_path / "model.gguf")
    here = load_file(base / "model.safetensors")
    assert torch.equal(
        there["blk.3.attn_q_norm.weight"],
        here["model.layers.3.self_attn.q_norm.weight"].float() + 1,
    )


def test_q8_0_is_measured_by_what_the_file_holds(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base")
    report = export_model(base, tmp_path, "q8_0", title="x", restored=tmp_path / "restored")
    assert 0 < report["relative_error"] < 0.01
    kinds = {
        tensor.name: tensor.tensor_type for tensor in GGUFReader(tmp_path / "model.gguf").tensors
    }
    assert kinds["blk.0.attn_q.weight"] is GGMLQuantizationType.Q8_0
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path / "restored", dtype=torch.float32
    ).state_dict()
    for name, tensor in load_file(base / "model.safetensors").items():
        assert (plain[name] - tensor.float()).norm() < 0.01 * tensor.float().norm(), name


def test_an_adapter_of_patterns_says_in_gguf_what_peft_computes(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base")
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 48}, "use_rslora": True}
    adapter = save_adapter(base, tmp_path / "adapter", **patterns)
    export_adapter(base, adapter, tmp_path, title="ft:tiny:local:mine:1")
    there = values(tmp_path / "adapter.gguf")
    said = fields(tmp_path / "adapter.gguf")
    assert (said["general.type"], said["adapter.type"]) == ("adapter", "lora")
    before = load_file(base / "model.safetensors")
    after = merged_by_peft(base, adapter).state_dict()
    for name, gguf_name in (("q_proj", "attn_q"), ("v_proj", "attn_v")):
        a = there[f"blk.0.{gguf_name}.weight.lora_a"]
        b = there[f"blk.0.{gguf_name}.weight.lora_b"]
        change = said["adapter.lora.alpha"] / len(a) * (b @ a)  # as llama.cpp scales
        if name == "q_proj":
            change = change.view(4, 8, 2, 64).transpose(1, 2).reshape(64, 64)
        weight = f"model.layers.0.self_attn.{name}.weight"
        torch.testing.assert_close(
            change, after[weight] - before[weight].float(), atol=1e-5, rtol=1e-4
        )
    assert "ADAPTER ./adapter.gguf" in (tmp_path / "Modelfile").read_text()


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_trained_whole_is_in_the_merged_models_file_and_in_no_adapters(
    tied: bool, tmp_path: Path
) -> None:
    base = save_base("llama", tmp_path / "base", tie_word_embeddings=tied)
    whole = {
        "modules_to_save": ["embed_tokens"] if tied else ["embed_tokens", "lm_head"],
        "ensure_weight_tying": tied,
    }
    adapter = save_adapter(base, tmp_path / "adapter", **whole)
    merge(base, adapter, tmp_path / "merged", to="bf16")
    export_model(tmp_path / "merged", tmp_path, "bf16", title="x")
    there = values(tmp_path / "model.gguf")
    exact = merged_by_peft(base, adapter).state_dict()
    before = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    assert not torch.equal(there["token_embd.weight"], before.float())
    assert torch.equal(
        there["token_embd.weight"], exact["model.embed_tokens.weight"].bfloat16().float()
    )
    assert ("output.weight" in there) is not tied, (
        "llama.cpp takes the embedding where there is no head"
    )
    if not tied:
        assert torch.equal(there["output.weight"], exact["lm_head.weight"].bfloat16().float())
    with pytest.raises(
        SpecError, match=r"replaces whole weights .*export the merged model \(gguf\)"
    ):
        export_adapter(base, adapter, tmp_path, title="x")


def test_a_tied_weight_that_the_files_hold_as_the_head_is_the_embedding(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base", tie_word_embeddings=True)
    held = load_file(base / "model.safetensors")
    embedding = held["lm_head.weight"] = held.pop("model.embed_tokens.weight")
    save_file(held, base / "model.safetensors", metadata={"format": "pt"})
    export_model(base, tmp_path, "bf16", title="x", restored=tmp_path / "restored")
    there = values(tmp_path / "model.gguf")
    assert torch.equal(there["token_embd.weight"], embedding.float())
    assert "output.weight" not in there
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "restored", dtype=torch.float32)
    assert torch.equal(plain.model.embed_tokens.weight, embedding.float())


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gpt_neox", {}, "the architecture gpt_neox is not exported to GGUF"),
        ("gemma2", {"query_pre_attn_scalar": 24}, "query_pre_attn_scalar = 24: llama.cpp takes 16"),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type = 'dynamic'",
        ),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu': llama.cpp computes silu"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], words: str
) -> None:
    base = save_base(family, tmp_path / "base", **changes)
    with pytest.raises(SpecError, match=words):
        export_model(base, tmp_path, "bf16", title="x")
    assert not (tmp_path / "model.gguf").exists()


def test_a_window_that_llama_cpp_does_not_know_bounds_the_context(tmp_path: Path) -> None:
    base = save_base("mistral", tmp_path / "base", sliding_window=24)
    report = export_model(base, tmp_path, "bf16", title="x")
    assert fields(tmp_path / "model.gguf")["llama.context_length"] == 24
    assert "its context is cut to the window, 24 tokens" in report["notes"][0]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp_py_sync") is None,
    reason="llama.cpp (llama-cpp-py-sync) is not installed",
)
@pytest.mark.parametrize("family", EXACT)
def test_llama_cpp_computes_what_transformers_and_peft_do(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, where llama.cpp rounds nothing: with bf16 matrices it rounds what it multiplies them
    with.
    """
    monkeypatch.setattr(to_gguf, "kind_of", lambda shape, stored: GGMLQuantizationType.F32)
    base = save_base(family, tmp_path / "base", **EXACT[family])
    adapter = save_adapter(
        base, tmp_path / "adapter", rank_pattern={"o_proj": 2}, alpha_pattern={"down_proj": 32}
    )
    export_model(base, tmp_path, "bf16", title="x")
    export_adapter(base, adapter, tmp_path, title="x")
    ids = torch.arange(24) * 37 % 1000 + 5
    texts = [
        "Hi, I ordered 12 of the\n\n  round bottles!",
        "It's 3.14 \u00e9\u00df \u4f60\u597d",
        "a  b\tc\r\nd",
    ]
    plain = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(base)
    for model, file in (
        (plain, None),
        (merged_by_peft(base, adapter).eval(), tmp_path / "adapter.gguf"),
    ):
        answer = by_llama_cpp(tmp_path / "model.gguf", file, ids.tolist(), texts)
        with torch.no_grad():
            expected = model(ids[None]).logits[0].float()
        found = torch.from_numpy(
            np.frombuffer(base64.b64decode(answer["logits"]), np.float32).copy()
        ).view(len(ids), -1)
        assert float((found - expected).abs().max()) < 2e-3 * float(expected.abs().max())
        assert answer["ids"] == [
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts
        ]


def by_llama_cpp(
    model: Path, adapter: Path | None, ids: list[int], texts: list[str]
) -> dict[str, Any]:
    program = Path(programs.__file__).parent / "llama_cpp.py"
    asked = {"model": str(model), "adapter": adapter and str(adapter), "ids": ids, "texts": texts}
    ended = subprocess.run(
        [sys.executable, str(program)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)
