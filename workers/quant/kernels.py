"""Loads bitsandbytes, whose operators (`torch.ops.bitsandbytes.*`) quantise and dequantise NF4 on CPU and CUDA."""

from __future__ import annotations

import logging

# At import bitsandbytes reports an optional CPU inference kernel that it did not find; training never uses it.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

import bitsandbytes  # noqa: E402

VERSION: str = bitsandbytes.__version__
