"""Loads bitsandbytes, whose operators (`torch.ops.bitsandbytes.*`) quantise and dequantise NF4 on CPU and CUDA."""

from __future__ import annotations

import bitsandbytes

VERSION: str = bitsandbytes.__version__
