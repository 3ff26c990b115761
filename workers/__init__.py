"""What trains: torchrun starts `python -m workers.train RUN_DIR ATTEMPT` on every rank."""

import logging

# At import bitsandbytes reports an optional CPU inference kernel that it did not find; training never uses it.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

from workers.patches import bitsandbytes_import as bitsandbytes_import  # noqa: E402 - first of all: PEFT would import it otherwise
