"""Aria: experts stacked the other way round, under other names."""

from ft_service.bases.families.family import Family

FAMILY = Family(
    types=("aria", "aria_text"),
    experts_transposed=True,
    renamed={
        r"\bmlp\.experts\.fc1\.weight$": "mlp.experts.gate_up_proj",
        r"\bmlp\.experts\.fc2\.weight$": "mlp.experts.down_proj",
    },
)
