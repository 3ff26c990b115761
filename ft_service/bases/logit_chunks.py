"""How many tokens' logits exist at once: the one rule, for the plan before a job and for the worker in it."""

from __future__ import annotations

IN_CHUNKS = frozenset(
    {
        *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neox"),
        *("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gemma3n_text"),
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
