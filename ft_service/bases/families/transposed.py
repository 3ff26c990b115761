"""Families whose files stack experts as [experts, in, out]: gpt-oss, in its plain form, and Llama 4."""

from ft_service.bases.families.family import Family

GPT_OSS = Family(types=("gpt_oss",), experts_transposed=True)
"""Gate and up rows alternate; as published, in MXFP4, the stacks lie the other way round."""
LLAMA_4 = Family(types=("llama4", "llama4_text"), experts_transposed=True)
"""Experts whose shares multiply what goes into them."""
