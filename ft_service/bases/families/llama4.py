"""Llama 4: experts whose shares multiply what goes into them."""

from ft_service.bases.families.family import Family

FAMILY = Family(types=("llama4", "llama4_text"), experts_transposed=True)
