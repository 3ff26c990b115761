"""Aria: experts stacked the other way round."""

from ft_service.bases.families.family import Family

FAMILY = Family(types=("aria", "aria_text"), experts_transposed=True)
