"""Buffers that no file of a base holds: rotary frequencies, embedding scales and the like, by the
architecture's own rules.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ft_service.errors import SpecError
from workers.model.multimodal import text_decoder

STORAGE_DTYPE = torch.bfloat16
"""What frozen weights without a quantised format are stored in, and the face dtype of the quantised
ones.
"""


def restore_buffers(
    model: PreTrainedModel, device: torch.device, compute_dtype: torch.dtype
) -> None:
    """Compute the buffers that no file of the base holds (rotary frequencies, embedding scales) by
    the architecture's own rules.

    Parameters are still on meta, where initialising is free, so each module's initialiser can be
    called as it is. A buffer in the storage dtype gets the dtype that it would have in a model
    loaded for `compute_dtype`. Raises SpecError for one that no rule computes.
    """
    computed: dict[str, Tensor] = {}
    owners = list(with_owners(model, model))
    names = {id(module): name for name, module in model.named_modules()}
    for module, _ in owners:
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None:
                dtype = compute_dtype if buffer.dtype == STORAGE_DTYPE else buffer.dtype
                empty = torch.empty_like(buffer, dtype=dtype, device=device)
                module._buffers[name] = computed[f"{names[id(module)]}.{name}"] = poisoned(empty)
    # What lies around a decoder lacks what its initialiser fills.
    inside = set(text_decoder(model).modules())
    for module, owner in owners:
        # Some models fill the buffers of their layers.
        fills = isinstance(module, PreTrainedModel) and module in inside
        if module._non_persistent_buffers_set or fills:
            owner._init_weights(module)
    left = [name for name, buffer in computed.items() if is_poisoned(buffer)]
    if left:
        raise SpecError(
            f"The base is a {model.config.model_type} model, of which nothing says how {left[0]} "
            "is computed, a buffer that no "
            "file holds: not supported.",
            param="model",
        )


def poisoned(buffer: Tensor) -> Tensor:
    """A buffer filled with what no rule computes."""
    if buffer.is_floating_point() or buffer.is_complex():
        return buffer.fill_(float("nan"))
    return buffer if buffer.dtype == torch.bool else buffer.fill_(torch.iinfo(buffer.dtype).min)


def is_poisoned(buffer: Tensor) -> bool:
    """Whether something of a buffer is left as `poisoned` filled it."""
    if buffer.is_floating_point() or buffer.is_complex():
        return bool(buffer.isnan().any())
    return buffer.dtype != torch.bool and bool((buffer == torch.iinfo(buffer.dtype).min).any())


def with_owners(
    module: nn.Module, owner: PreTrainedModel
) -> Iterator[tuple[nn.Module, PreTrainedModel]]:
    """Every module, and the innermost model of transformers that it is part of, whose rules it is
    initialised by.
    """
    owner = module if isinstance(module, PreTrainedModel) else owner
    yield module, owner
    for child in module.children():
        yield from with_owners(child, owner)
