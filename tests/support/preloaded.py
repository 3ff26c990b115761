"""What the process has imported from which ranks are forked (see `ranks`): a rank then begins where
its work begins.
"""

from __future__ import annotations

import gc

import peft  # noqa: F401
import pytest  # noqa: F401
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import tests.support.training.attempts
import tests.support.training.loading
import tests.support.training.parity  # noqa: F401
from ft_service.host.quick_imports import end_imports

# Thousands of patterns, which PEFT has transformers compile for the first model of a process.
get_checkpoint_conversion_mapping("llama")
# A rank's garbage collector would go through all of the above and so copy the pages on which it
# lies: half of a rank's start.
gc.collect()
end_imports()
