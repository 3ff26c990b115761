"""What the process has imported from which those of the sections are forked.

What is missing here, a section names.
"""

from __future__ import annotations

import gc

import peft  # noqa: F401
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import workers.train  # noqa: F401
from ft_service.host.quick_imports import end_imports

# or that of a section would go through all of the above, and copy the pages on which it lies
gc.collect()
end_imports()
