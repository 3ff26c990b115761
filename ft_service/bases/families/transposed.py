"""Families whose files hold matrices as [in, out]: GPT-2, and the experts of gpt-oss, in its plain form, and of Llama 4."""

from ft_service.bases.families.family import Family

GPT_2 = Family(types=("gpt2", "gpt-sw3"), turned=("c_attn", "c_proj", "c_fc"))
"""In its class they are convolutions of width one."""
GPT_OSS = Family(types=("gpt_oss",), experts_transposed=True)
"""Gate and up rows alternate; as published, in MXFP4, the stacks lie the other way round."""
LLAMA_4 = Family(types=("llama4", "llama4_text"), experts_transposed=True)
"""Experts whose shares multiply what goes into them."""
