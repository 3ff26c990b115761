"""Which forms of which family were really made, read again and compared: `python -m
tests.support.programs.serving_matrix`.

On tiny random bases with an adapter of stock PEFT on every linear layer. Writes
docs/serving-matrix.md. For that it needs the bindings `llama_cpp_py_sync` in PYTHONPATH, whose
logits are compared, and in FT_TEST_VLLM a Python that has vLLM.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from ft_service.errors import FtError, SpecError
from tests.support.bases import SAMPLE, TOKENIZER
from tests.support.training.adapters import merged_by_peft, save_adapter
from tests.support.training.checks import BOUND, check_here
from tests.support.training.models import FAMILIES, OF_EXPERTS, save_tiny
from workers.exports.gguf_layout import layout_of
from workers.exports.to_gguf import export_adapter, export_model
from workers.model.build import base_on_meta
from workers.model.multimodal import text_decoder
from workers.tasks.merge import merge
from workers.tasks.pad_ranks import pad_ranks

PAGE = Path(__file__).parents[3] / "docs/serving-matrix.md"
FORMS = ("peft", "vllm", "merged", "merged-fp8", "merged-int4", "gguf", "gguf-adapter")
SIZE = {"hidden_size": 64, "vocab_size": 1040, "eos_token_id": 2, "bos_token_id": 1}
FITTING: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "mistral": {"sliding_window": None, "head_dim": 16},
    "qwen3": {"head_dim": 16},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 128},
    "bamba": {"mamba_n_heads": 8},
    "mixtral": {"intermediate_size": 64},
    "qwen3_moe": {"moe_intermediate_size": 64, "head_dim": 16},
    "olmoe": {"intermediate_size": 64},
    "deepseek_v3": {"moe_intermediate_size": 64},
    "qwen3_next": {
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
}
"""What published models of a family have, and the tiny ones of other tests have not."""
CONVERTED = ("olmo_hybrid", "kimi_linear")
"""Families whose published layout transformers converts, which jobs refuse by name."""
IN_VLLM = ("llama", "qwen3")
"""Families that vLLM itself is tried with, where a start takes it minutes."""
FOR_VLLM = {"hidden_size": 128, "head_dim": 32, "initializer_range": 0.05}
"""Its kernels on processors know no head smaller than 32."""
IDS = torch.arange(24) * 37 % 1000 + 5
BOUNDS = {"merged": 0.02, "merged-fp8": 0.2, "merged-int4": 0.5, "gguf": 0.02, "gguf-adapter": 0.02}
"""Of the relative difference of logits from PEFT's: random tiny models feel rounding more than
trained ones.
"""
VLLM_BOUND = 0.02
"""Nats, of the largest difference of log-probabilities from PEFT's."""
HEAD = """\
# What was tried in which form

Made by a program (`tests/support/programs/serving_matrix.py`) on tiny random bases of each family, with an adapter on every
linear layer (in mixtures of experts on attention).

- **logits**: made, read again, and its logits compared: `peft`, written by the workers as a job's outcome, on the published
  class by plain PEFT with those that the worker computes; merged forms by transformers and GGUF by llama.cpp with those of
  PEFT's own merge.
- **served**: put there as by the hand-off, loaded by vLLM itself, on processors, whose log-probabilities are PEFT's.
- **matrices**: what was written was read again, and is what the adapter computes.
- **differs**: made, and its logits lie farther from PEFT's than the bound for tiny random models (where a router is near a
  tie, rounding chooses another expert).
- **no**: refused by name, as below.

Where `vllm` says matrices, vLLM itself was not tried with the family, and SGLang with none: the hand-off verifies it on the
operator's server, by log-probabilities, for each model
([how](serving-and-trying.md#hand-off-to-vllm-and-compatible-servers)).
"""


def gguf_refusal(base: Path) -> str | None:
    """Why a family is not exported to GGUF; None: it is. The cheap part: no weight is read."""
    try:
        layout_of(text_decoder(base_on_meta(str(base))).config.to_dict())
    except FtError as error:
        return error.message
    return None


def save_family(family: str, folder: Path, **size: Any) -> Path:
    changes = {
        **SIZE,
        **({"intermediate_size": 128} if "intermediate_size" not in FAMILIES[family] else {}),
    }
    save_tiny(
        family,
        folder,
        original_format=family not in CONVERTED,
        **{**changes, **FITTING.get(family, {}), **size},
    )
    for name in TOKENIZER:
        shutil.copy(SAMPLE / name, folder / name)
    return folder


def cells(family: str, scratch: Path) -> dict[str, tuple[str, str]]:
    """Form → what was seen, and why there is none."""
    base = save_family(family, scratch / "base")
    targets: Any = OF_EXPERTS.get(family, "all-linear")
    adapter = save_adapter(base, scratch / "adapter", target_modules=targets)
    expected = _logits(merged_by_peft(base, adapter))
    found: dict[str, tuple[str, str]] = {}
    for form in FORMS:
        try:
            found[form] = _tried(form, base, adapter, scratch / form, expected), ""
        except FtError as error:
            found[form] = "no", error.message
        except AssertionError as error:
            found[form] = "differs", str(error)
    return found


def _tried(form: str, base: Path, adapter: Path, out: Path, expected: torch.Tensor) -> str:
    if form == "peft":
        seen = check_here(base, out)
        if seen.refused:
            raise SpecError(seen.refused)
        assert seen.reloaded <= 10 * BOUND, f"its logits lie {seen.reloaded:.3f} from the worker's"
        return "logits"
    out.mkdir()
    if form == "vllm":
        pad_ranks(adapter, out)  # which compares
        return "matrices"
    if form.startswith("merged"):
        merge(
            base,
            adapter,
            out,
            to={"merged": "bf16", "merged-fp8": "fp8", "merged-int4": "int4"}[form],
        )
        seen = _logits(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32))
        return _close(seen, expected, form)
    merged = out / "merged"
    if form == "gguf":
        merge(base, adapter, merged, to="bf16")
        export_model(merged, out, "bf16", title="x")
        return _by_llama_cpp(out / "model.gguf", None, expected, form) or "matrices"
    export_model(base, out, "bf16", title="x")
    export_adapter(base, adapter, out, title="x")
    return _by_llama_cpp(out / "model.gguf", out / "adapter.gguf", expected, form) or "matrices"


def served_by_vllm(python: str, family: str, scratch: Path) -> tuple[str, str]:
    """What vLLM itself answers with a base of the family and an adapter: the cell, and why it is
    none.
    """
    base = save_family(family, scratch / "base", **FOR_VLLM)
    adapter = save_adapter(base, scratch / "adapter", lora_alpha=32)
    (scratch / "served").mkdir()
    pad_ranks(adapter, scratch / "served")
    logs = _logits(merged_by_peft(base, adapter)).log_softmax(-1)[:-1]
    expected = logs.gather(1, IDS[1:, None])[:, 0]
    asked = {"model": str(base), "adapter": str(scratch / "served"), "ids": IDS.tolist()}
    program = Path(__file__).with_name("vllm_logprobs.py")
    ended = subprocess.run(
        [python, "-P", str(program)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    # vLLM logs to it too.
    said = json.loads(
        next(line for line in ended.stdout.splitlines() if line.startswith('{"version"'))
    )
    if "refused" in said:
        return "no", f"vLLM: {said['refused']}"
    off = float((torch.tensor(said["logprobs"]) - expected).abs().max())
    return (
        ("served", "")
        if off < VLLM_BOUND
        else ("differs", f"vLLM's log-probabilities lie {off:.3f} nats from PEFT's")
    )


def _by_llama_cpp(
    model: Path, adapter: Path | None, expected: torch.Tensor, form: str
) -> str | None:
    if importlib.util.find_spec("llama_cpp_py_sync") is None:
        return None
    asked = {
        "model": str(model),
        "adapter": adapter and str(adapter),
        "ids": IDS.tolist(),
        "texts": [],
    }
    program = Path(__file__).with_name("llama_cpp.py")
    ended = subprocess.run(
        [sys.executable, str(program)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    body = base64.b64decode(json.loads(ended.stdout)["logits"])
    return _close(
        torch.from_numpy(np.frombuffer(body, np.float32).copy()).view(len(IDS), -1), expected, form
    )


def _close(seen: torch.Tensor, expected: torch.Tensor, form: str) -> str:
    off = float((seen - expected).norm() / expected.norm())
    assert off < BOUNDS[form], f"its logits lie {off:.3f} from PEFT's"
    return "logits"


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS[None]).logits[0].float()


def page(found: dict[str, dict[str, tuple[str, str]]]) -> str:
    rows = [
        f"| {family} | {' | '.join(of[form][0] for form in FORMS)} |"
        for family, of in found.items()
    ]
    table = ["| family | " + " | ".join(FORMS) + " |", "| --- |" + " --- |" * len(FORMS), *rows]
    reasons: dict[str, list[str]] = {}
    for family, of in found.items():
        for form in FORMS:
            if why := of[form][1]:
                reasons.setdefault(_general(why), []).append(f"{family} ({form})")
    notes = [f"- {', '.join(whose)}: {why}" for why, whose in reasons.items()]
    return f"{HEAD}\n" + "\n".join(table) + "\n\n## Why not\n\n" + "\n".join(notes) + "\n"


def _general(why: str) -> str:
    """Without the folder of one run."""
    plain = " ".join(word if not word.startswith("/") else "the base" for word in why.split())
    plain = re.sub(r"the architecture \w+ is", "the architecture is", plain)
    return re.sub(r"model\.layers\.\d+\.\S+\.experts\.", "model.layers.*.experts.", plain)


def each(tell: Callable[[str], None] = print) -> dict[str, dict[str, tuple[str, str]]]:
    found = {}
    python = os.environ.get("FT_TEST_VLLM")
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as scratch:
            found[family] = cells(family, Path(scratch))
        if family in IN_VLLM and python:
            with tempfile.TemporaryDirectory() as scratch:
                found[family]["vllm"] = served_by_vllm(python, family, Path(scratch))
        tell(
            f"{family}: {', '.join(f'{form} {seen}' for form, (seen, _) in found[family].items())}"
        )
    return found


if __name__ == "__main__":
    if importlib.util.find_spec("llama_cpp_py_sync") is None or "FT_TEST_VLLM" not in os.environ:
        sys.exit(
            "The page is made with llama.cpp (llama_cpp_py_sync in PYTHONPATH) and vLLM "
            "(FT_TEST_VLLM, a Python that has it)."
        )
    PAGE.write_text(page(each()), encoding="utf-8")
