"""ERNIE 4.5: statistics of the router beside it in the files, inside it in the model."""

from ft_service.bases.families.family import Family

FAMILY = Family(
    types=("ernie4_5_moe",),
    renamed={r"\bmlp\.moe_statics\.": "mlp.gate.moe_statics."},
    parameters=("e_score_correction_bias",),
)
