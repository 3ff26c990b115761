"""What vLLM makes of an adapter on experts: `python vllm_experts.py`, with a request on stdin, by
the Python that has vLLM.

The request: {model, adapter, out}. The adapter goes the way of every adapter through vLLM, as far
as its layers' tensors, which are written to the file `out`; an adapter that vLLM refuses ends the
program with vLLM's error. Only the constructor of the experts' layer is replaced, since it asks for
a kernel, and there is one for GPUs only.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from typing import Any

import torch
from safetensors.torch import save_file


def main() -> None:
    asked = json.loads(sys.stdin.read())
    os.environ.update(
        {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    )
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model is then in this process
    import vllm  # pyright: ignore[reportMissingImports]  # where it is installed

    engine = vllm.LLM(
        asked["model"],
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
        disable_log_stats=True,
    )
    config = engine.llm_engine.vllm_config
    (tensors,) = engine.apply_model(lambda model: stacked(model, config, asked["adapter"]))
    save_file(tensors, asked["out"])


def stacked(model: Any, config: Any, adapter: str) -> dict[str, torch.Tensor]:
    """The tensors of all layers, by vLLM's names of layer, matrix and slice, after vLLM has loaded
    the adapter.
    """
    from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
    from vllm.config.lora import LoRAConfig  # pyright: ignore[reportMissingImports]
    from vllm.lora.layers import BaseLayerWithLoRA, FusedMoEWithLoRA  # pyright: ignore[reportMissingImports]
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]
    from vllm.lora.worker_manager import WorkerLoRAManager  # pyright: ignore[reportMissingImports]

    def without_kernel(layer: Any, base_layer: Any) -> None:
        BaseLayerWithLoRA.__init__(layer)
        layer.base_layer, layer.moe_config, layer.device = (
            base_layer,
            base_layer.moe_config,
            torch.device("cpu"),
        )
        parallel = base_layer.moe_config.moe_parallel_config
        layer.tp_size = parallel.tp_size
        layer.tp_rank = parallel.tp_rank
        layer._w13_slices = 2
        layer.enable_moe_shared_loras = False

    FusedMoEWithLoRA.__init__ = without_kernel
    FusedMoEWithLoRA.set_mapping = BaseLayerWithLoRA.set_mapping
    config = copy.copy(config)
    config.lora_config = LoRAConfig(
        max_lora_rank=16, max_loras=1, max_cpu_loras=1, lora_dtype=torch.float32
    )
    with set_current_vllm_config(config):
        manager = WorkerLoRAManager(
            config, torch.device("cpu"), getattr(model, "embedding_modules", {})
        )
        manager.create_lora_manager(model, config)
        manager.add_adapter(LoRARequest("tuned", 1, adapter))
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in manager._adapter_manager.modules.items():
        of_experts = isinstance(layer, FusedMoEWithLoRA)
        for part in (
            ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b")
            if of_experts
            else ("lora_a", "lora_b")
        ):
            for i, slots in enumerate(getattr(layer, f"{part}_stacked")):
                tensors[f"{name}.{part}.{i}"] = (slots[0] if of_experts else slots[0, 0]).clone()
    return tensors


if __name__ == "__main__":
    main()
