"""What trains: torchrun starts `python -m workers.train RUN_DIR ATTEMPT` on every rank."""

import logging

# At import bitsandbytes reports an optional CPU inference kernel that it did not find; training never uses it.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

from workers.quant import kernels as kernels  # noqa: E402 - first of all: PEFT would load bitsandbytes otherwise, compiler and all
