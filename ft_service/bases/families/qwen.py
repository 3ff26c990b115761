"""Qwen3-VL's mixture: experts stacked one way in the files that were published, the other way in those saved since."""

from ft_service.bases.families.family import Family

FAMILY = Family(types=("qwen3_vl_moe", "qwen3_vl_moe_text"), experts_either_way=True)
