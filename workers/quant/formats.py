"""The storage formats by the names that users write."""

from __future__ import annotations

from ft_service.spec import WeightFormat
from workers.quant.nf4_weight import NF4Weight
from workers.quant.rowwise import RowQuantized

QUANTIZED: dict[WeightFormat, type[RowQuantized]] = {"nf4": NF4Weight}
"""Format name → the weight class that stores it. "bf16" is not here: it is stored as a plain tensor."""
