"""gpt-oss: experts with biases, gate and up rows alternating; published in MXFP4, which has them the other way round."""

from ft_service.bases.families.family import Family

FAMILY = Family(types=("gpt_oss",), experts_transposed=True)
