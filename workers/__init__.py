"""Training: torchrun starts `python -m workers.train RUN_DIR ATTEMPT` on every rank."""

import logging
import sys

from ft_service.host.lifetime import die_with_parent

if sys.argv[:1] == ["-m"] and {"workers.train", "workers.engine"} & set(sys.orig_argv):
    # Python imports this package first: a rank must not outlive torchrun, not even while torch is
    # imported
    die_with_parent()

# At import bitsandbytes reports an optional CPU inference kernel that it did not find; training
# never uses it.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

from ft_service.host.quick_imports import quick_imports  # noqa: E402

with quick_imports():
    # First of all: PEFT would import it otherwise.
    from workers.patches import (
        bitsandbytes_import as bitsandbytes_import,
    )
