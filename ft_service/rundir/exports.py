"""The forms in which a tuned model leaves, and what is said of one that was asked for."""

from __future__ import annotations

from enum import StrEnum


class ExportFormat(StrEnum):
    """What another program reads."""

    PEFT = "peft"
    """The adapter as it was trained."""
    VLLM = "vllm"
    """The adapter with one rank and one scale, which vLLM reads."""
    MERGED = "merged"
    """Base and adapter as one model in bf16."""
    MERGED_FP8 = "merged-fp8"
    """The same with linear layers in FP8 by rows (compressed-tensors)."""
    MERGED_INT4 = "merged-int4"
    """The same with linear layers in INT4 by groups (compressed-tensors, pack-quantized)."""
    GGUF = "gguf"
    """The merged model for llama.cpp and Ollama, in bf16."""
    GGUF_Q8 = "gguf-q8_0"
    """The same with matrices in Q8_0."""
    GGUF_ADAPTER = "gguf-adapter"
    """The adapter alone for llama.cpp and Ollama."""
