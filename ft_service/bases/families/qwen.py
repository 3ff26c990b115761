"""Qwen3-VL's mixture: experts stacked one way in the files that were published, the other way in those saved since. Qwen4: a
table of hashed n-grams in as many parts as make files of a handy size.
"""

from ft_service.bases.families.family import DEFAULT, Family

FAMILIES = (
    Family(types=("qwen3_vl_moe", "qwen3_vl_moe_text"), experts_either_way=True),
    Family(
        types=("qwen4_exp", "qwen4_exp_text"),
        renamed={**DEFAULT.renamed, r"\.ngram_embedding\.shard_\d+\.": ".ngram_embedding."},
        other_layers=("ngram_embedding",),
    ),
)
