"""Where a tuned model will run: the forms for it, the recommended one first, and the commands that
run what was downloaded. Pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ft_service.spec.resolved import vllm_rank


@dataclass(frozen=True)
class ExportPlace:
    """Where a model will run."""

    key: str
    title: str
    readers: str
    forms: Mapping[str, str]
    """Form → what it is. The first is recommended."""


PLACES = (
    ExportPlace(
        "laptop",
        "A laptop",
        "Ollama or llama.cpp, with or without a GPU.",
        {
            "gguf-q8_0": "one model in 8 bits",
            "gguf": "one model in bf16, twice as large",
            "gguf-adapter": "the adapter alone, for a GGUF file of the base that is there already",
        },
    ),
    ExportPlace(
        "server",
        "A GPU server",
        "vLLM, for many requests at once.",
        {
            "vllm": "the adapter, loaded beside its base; many can share one base",
            "merged-fp8": "one model with linear layers in FP8",
            "merged-int4": "one model with linear layers in INT4: the smallest",
            "merged-nvfp4": "one model with linear layers in NVFP4",
            "merged-mxfp4": "one model with linear layers, or experts published so, in MXFP4",
        },
    ),
    ExportPlace(
        "transformers",
        "Python",
        "Transformers, and whatever else reads safetensors.",
        {
            "merged": "one model in bf16",
            "torchao-int8": "linear layers in INT8, for processors and GPUs",
            "torchao-fp8": "linear layers in FP8",
            "torchao-nvfp4": "linear layers in NVFP4",
        },
    ),
    ExportPlace(
        "phone",
        "A phone",
        "ExecuTorch, which makes one file of it for the app.",
        {"torchao-8da4w": "4-bit weights, 8-bit inputs and embedding"},
    ),
)


def run_commands(form: str, job: Mapping[str, Any], base: str, name: str) -> str:
    """Return the shell commands that unpack a downloaded export and run it.

    `base`: the base's name; `name`: that of the tuned model where it runs. Raises KeyError for an
    unknown form.
    """
    name = shlex.quote(name)
    base = shlex.quote(base)
    ranks = (job["lora"]["r"], *(job["lora"].get("rank_pattern") or {}).values())
    serve = f"vllm serve ./{form} --served-model-name {name}"
    llama = f"ollama create {name} -f {form}/Modelfile\nollama run {name}"
    python = (
        "python - <<'END'\n"
        "from transformers import pipeline\n"
        f"answer = pipeline('text-generation', '{form}')\n"
        "print(answer([{'role': 'user', 'content': 'Hello'}])[0]['generated_text'][-1]['content'])\n"
        "END"
    )
    run = {
        "gguf-q8_0": llama,
        "gguf": llama,
        "gguf-adapter": "llama-server -m BASE.gguf --lora gguf-adapter/adapter.gguf",
        "vllm": (
            f"vllm serve {base} --enable-lora --max-lora-rank {vllm_rank(*ranks)} "
            f"--lora-modules {name}=./vllm"
        ),
        "merged-fp8": serve,
        **dict.fromkeys(("merged-int4", "merged-nvfp4", "merged-mxfp4"), serve),
        "merged": python,
        **dict.fromkeys(("torchao-int8", "torchao-fp8", "torchao-nvfp4"), python),
        "torchao-8da4w": (
            f"optimum-cli export executorch --model ./{form} --task text-generation "
            f"--recipe xnnpack --use_custom_sdpa --use_custom_kv_cache --output_dir {name}"
        ),
    }
    return f"tar xf {job['id']}-{form}.tar\n{run[form]}\n"
