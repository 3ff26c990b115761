"""Mamba and its hybrids, in which kernels take the last projection's weight without calling the layer, and PEFT loads no
adapter on it.
"""

from ft_service.bases.families.family import Family

FAMILY = Family(
    types=("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"),
    not_adapted={"out_proj": "PEFT loads no adapter on out_proj in this family, whose kernels take its weight past the layer"},
)
