"""Convolutions of width one (GPT-2) as the linear layers that they are: of the same names, with their weights turned round."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

_TURNED = "_ft_turned"


def turn_convolutions(model: PreTrainedModel) -> None:
    """Put linear layers on meta in place of a model's convolutions of width one."""
    turned = [name for name, module in model.named_modules() if isinstance(module, Conv1D)]
    for name in turned:
        parent, _, last = name.rpartition(".")
        stock = model.get_submodule(name)
        assert isinstance(stock, Conv1D)
        linear = nn.Linear(stock.nx, stock.nf, device="meta", dtype=stock.weight.dtype)
        setattr(model.get_submodule(parent), last, linear)
    object.__setattr__(model, _TURNED, frozenset(f"{name}.weight" for name in turned))


def turned_weights(model: nn.Module) -> frozenset[str]:
    """Weights [out, in] of linear layers that the base's files, and its class, hold as [in, out]."""
    return getattr(model, _TURNED, frozenset())
