"""Gemma 3n: several streams of hidden states, made and joined by layers beside those of the decoder."""

from ft_service.bases.families.family import Family

FAMILY = Family(types=("gemma3n", "gemma3n_text"), beside_layers=("altup_projections", "altup_unembed_projections"))
