"""Model types and classes of transformers with what neither a rule nor a probe finds of them: each
with a reason and a source.

This is the only place where the product names a model type for what that type computes. A test
counts the names, and finds those that stand anywhere else.
"""

from __future__ import annotations

_DRAFTS = "it only drafts for another model, whose hidden states it reads in place of tokens"
_POSITIONS = (
    "it counts its positions from the number of its padding token on, so that a position "
    "depends on where a text was padded"
)
NOT_TUNED = {
    # The forward of these classes does not look at `input_ids`. Source:
    # transformers/models/gemma4_assistant, `forward`.
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _DRAFTS),
    # Source: transformers/models/kosmos2, `create_position_ids_from_input_ids`.
    **dict.fromkeys(("kosmos-2", "kosmos-2.5"), _POSITIONS),
    # Its experts are drawn in training alone, with the same weights. Source:
    # transformers/models/phimoe, `sparsemixer`.
    "phimoe": "its router draws experts at random in training: no step could be repeated, and no "
    "resume be exact",
    # The window is one of its cache, which training does not have. Source:
    # transformers/models/unlimited_ocr.
    "unlimited_ocr": "it sees all that it has written while it is trained, and through a window "
    "while it answers",
}
"""Model type → why it cannot be tuned."""

INPUT_SCALED_EXPERTS = "Llama4TextExperts"
"""Class of experts whose shares multiply what goes into them, where those of all others multiply
what comes out. Its forward takes tokens that the block around it has multiplied already. Source:
transformers/models/llama4, `Llama4TextMoe.forward`.
"""

NOT_PREVIEWED = frozenset({"kimi_linear"})
"""Model types whose answers in a preview were seen to differ from those of the published class: of
their cache, not of their weights. Source: tests/support/programs/serving_matrix.py.
"""
