"""The families that have a file here, by model type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ft_service.bases.families import aria, deepseek_v4, delta_nets, ernie, gemma, granite, mamba, qwen, renamed, transposed
from ft_service.bases.families.family import DEFAULT, Family
from ft_service.bases.wrapped import text_config

_FAMILIES = (
    *renamed.FAMILIES,
    aria.FAMILY,
    deepseek_v4.FAMILY,
    delta_nets.GLM_5_NEXT,
    delta_nets.KIMI,
    delta_nets.OLMO,
    ernie.FAMILY,
    gemma.FAMILY,
    transposed.GPT_OSS,
    granite.FAMILY,
    transposed.LLAMA_4,
    mamba.FAMILY,
    *qwen.FAMILIES,
)
_BY_TYPE = {name: family for family in _FAMILIES for name in family.types}


def family_of(config: Mapping[str, Any]) -> Family:
    """What is known of the family of a config.json, or of the text part of one that describes several models."""
    kinds = (text_config(config).get("model_type"), config.get("model_type"))
    return next((_BY_TYPE[str(kind)] for kind in kinds if str(kind) in _BY_TYPE), DEFAULT)
