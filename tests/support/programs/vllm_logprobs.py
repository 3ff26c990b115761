"""vLLM reads a base and an adapter: `python vllm_logprobs.py`, with a request on stdin, by the
Python that has vLLM.

The request: {model, adapter, ids}. A line that it prints: {"version": …, "logprobs": […]}, of each
of `ids` but the first, with the adapter; or {"version": …, "refused": its last words}.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    asked = json.loads(sys.stdin.read())
    os.environ.update(
        {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    )
    import vllm  # pyright: ignore[reportMissingImports]  # where it is installed
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    try:
        said: dict[str, Any] = {
            "logprobs": logprobs(vllm, LoRARequest("tuned", 1, asked["adapter"]), asked)
        }
    except Exception as error:  # whatever it refuses with
        said = {"refused": (str(error).strip().splitlines() or [type(error).__name__])[-1]}
    print("\n" + json.dumps({"version": vllm.__version__, **said}))


def logprobs(vllm: Any, adapter: Any, asked: dict[str, Any]) -> list[float]:
    engine = vllm.LLM(
        asked["model"],
        dtype="float32",
        max_model_len=64,
        enable_lora=True,
        max_lora_rank=16,
        enforce_eager=True,
        disable_log_stats=True,
    )
    sampling = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    (out,) = engine.generate(
        [{"prompt_token_ids": asked["ids"]}], sampling, lora_request=adapter, use_tqdm=False
    )
    return [
        at[token].logprob
        for token, at in zip(asked["ids"][1:], out.prompt_logprobs[1:], strict=True)
    ]


if __name__ == "__main__":
    main()
