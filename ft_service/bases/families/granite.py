"""Granite's mixtures: experts stacked under other names."""

from ft_service.bases.families.family import Family

FAMILY = Family(
    types=("granitemoe", "granitemoehybrid", "granitemoeshared", "granitemoe_swa"),
    renamed={
        r"\bblock_sparse_moe\.input_linear\.weight$": "block_sparse_moe.experts.gate_up_proj",
        r"\bblock_sparse_moe\.output_linear\.weight$": "block_sparse_moe.experts.down_proj",
        r"\bblock_sparse_moe\.router\.layer\.": "block_sparse_moe.router.",
    },
)
