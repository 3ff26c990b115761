"""How many tokens' logits exist at once: the one rule, for the plan before a job and for the worker in it."""

from __future__ import annotations

IN_CHUNKS = frozenset(
    {
        *("bamba", "deepseek_v2", "deepseek_v3", "deepseek_v32", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma", "gemma2"),
        *("gemma3_text", "gemma3n_text", "gemma4_text", "glm4", "glm4_moe", "glm_moe_dsa", "gpt_neox", "gpt_oss", "jamba"),
        *("kimi_linear", "lfm2", "llama", "llama4_text", "minimax_m2", "ministral3", "mistral", "mistral4", "mixtral"),
        *("nemotron_h", "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen2", "qwen2_5_vl_text", "qwen2_moe"),
        *("qwen2_vl_text", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text"),
        *("qwen3_vl_text", "seed_oss", "smollm3", "stablelm"),
    }
)
"""Values of `model_type` whose output head is the last thing that the model does, but for `final_logit_softcapping`. Of these
the loss is computed a few rows at a time, and of all others on the logits as a whole."""

CHUNK_ROWS = 2**10
"""Tokens in a chunk, at least: with fewer of them a GPU reads the head's weight more slowly than it multiplies by it."""
CHUNK_LOGITS = 2**25
"""Logits in a chunk of a small vocabulary: more would only take memory."""
MOST_LOGITS = 2**28
"""Logits in a chunk at most, whatever the vocabulary: 2 GiB, at 8 bytes each."""


def chunk_rows(vocabulary: int) -> int:
    """The number of tokens in a chunk: 1,024, or with a small vocabulary as many as make 2^25 logits.

    With 128,256 words a chunk of 1,024 tokens takes 1 GiB, which the plan counts. Beyond 262,144 words it is fewer tokens, so
    that a chunk has no more than 2^28 logits. A micro-batch with fewer targets takes no more than those need.
    """
    words = max(1, vocabulary)
    return max(1, min(max(CHUNK_ROWS, CHUNK_LOGITS // words), MOST_LOGITS // words))
