"""The frozen towers of a base: what its published class makes of a picture before its decoder.

The published class's own forward is run, with something that notes its input in place of the
decoder. So features, projections and positions are those that the class gives, whatever it calls
them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workers.base.load import load
from workers.images.features import Features, Positions
from workers.model.buffers import restore_buffers
from workers.model.build import towers_on_meta
from workers.model.multimodal import causal_model

_EARLY = "deepstack_visual_embeds"
"""What classes call the features for the first layers where they call the decoder."""
_TYPES = ("mm_token_type_ids", "token_type_ids")
"""What they call the kinds of tokens, 1 for placeholders of images."""
MOST_LAYOUT = 64
"""Integers of an image processor's answer that are kept as a picture's layout."""


class Tower:
    """The towers of a base."""

    def __init__(self, model: PreTrainedModel, decoder: NotingDecoder, token_id: int) -> None:
        """`model`: as `towers_on_meta` makes it with `decoder`. `token_id`: of placeholders."""
        self.model = model
        self.decoder = decoder
        self.token_id = token_id

    @classmethod
    def on_meta(cls, path: str, token_id: int) -> Tower:
        """Without weights. Raises SpecError as `towers_on_meta`."""
        noted: list[NotingDecoder] = []

        def make(decoder: Any) -> nn.Module:
            noted.append(NotingDecoder(decoder))
            return noted[0]

        return cls(towers_on_meta(path, make).eval(), noted[0], token_id)

    @classmethod
    def loaded(cls, path: str, token_id: int, device: torch.device) -> Tower:
        """With the base's weights, in fp32. Raises SpecError as `load`, OSError."""
        tower = cls.on_meta(path, token_id)
        restore_buffers(tower.model, device, torch.float32)
        load(tower.model, path, seed=0, compute_dtype=torch.float32, device=device)
        tower.decoder.to(device)
        tower.model.requires_grad_(False)
        return tower

    @torch.no_grad()
    def features(self, ids: Sequence[int], inputs: Mapping[str, np.ndarray]) -> Features:
        """Those of one picture, on the CPU.

        `ids`: the tokens that stand for it, with the base's marks. `inputs`: what the image
        processor makes of it. Raises what the architecture's own code raises.
        """
        rows, early = self.answer(ids, inputs)
        return Features(rows.cpu(), early.cpu(), layout_of(inputs))

    def answer(self, ids: Sequence[int], inputs: Mapping[str, np.ndarray]) -> tuple[Tensor, Tensor]:
        """Rows and early features of one picture, fp32 where the tower is (`Features`), and with
        gradients if it has trained adapters. Arguments and errors as `features`.
        """
        device = next(self.model.parameters()).device
        row = torch.tensor([list(ids)], dtype=torch.int64, device=device)
        held = row == self.token_id
        given = {name: torch.from_numpy(np.asarray(own)).to(device) for name, own in inputs.items()}
        self.decoder.noted = None
        with suppress(_NotedError):
            self.model(input_ids=row, **asked(self.model, row, held), **given)
        noted: dict[str, Any] = self.decoder.noted or {}
        self.decoder.noted = None
        rows = noted["inputs_embeds"][held].float()
        early = [own.float() for own in noted.get(_EARLY) or ()]
        return rows, torch.stack(early) if early else rows.new_empty(0, *rows.shape)


def layout_of(inputs: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """What of an image processor's answer positions follow from (`Features.layout`)."""
    return {
        name: torch.from_numpy(np.asarray(own)).long()
        for name, own in inputs.items()
        if np.issubdtype(own.dtype, np.integer) and own.size <= MOST_LAYOUT
    }


def asked(model: nn.Module, ids: Tensor, held: Tensor) -> dict[str, Tensor]:
    """What a published class is told of tokens, as far as its forward takes it: [rows, length].

    `held`: bool, which are placeholders of images.
    """
    known = inspect.signature(type(model).forward).parameters
    kinds = {name: held.int() for name in _TYPES if name in known}
    return {"attention_mask": torch.ones_like(ids), **kinds}


def positions_of(model: nn.Module) -> Positions | None:
    """How a base numbers the tokens of a sample with pictures; None: one by one.

    `model`: of the published class, with or without towers.
    """
    causal: Any = causal_model(model)
    numbering = next((m for m in causal.modules() if hasattr(m, "get_rope_index")), None)
    if numbering is None:
        return None
    known = inspect.signature(numbering.get_rope_index).parameters

    def positions(ids: Tensor, held: Tensor, layouts: Sequence[dict[str, Tensor]]) -> Tensor:
        names = {name for layout in layouts for name in layout if name in known}
        joined = {name: torch.cat([layout[name] for layout in layouts]) for name in names}
        row = ids[None]
        numbered = numbering.get_rope_index(
            row, mm_token_type_ids=held[None].int(), attention_mask=torch.ones_like(row), **joined
        )
        return numbered[0][:, 0].long().cpu()

    return positions


class _NotedError(Exception):
    """Ends a forward at the decoder."""


class NotingDecoder(nn.Module):
    """Stands in place of a decoder: embeds every token as zero, and notes what it is called
    with.
    """

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.config = decoder.config
        self.embed_tokens = _Zeros(decoder.get_input_embeddings().embedding_dim)
        self.noted: dict[str, Any] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(self, *_: Any, **given: Any) -> Any:
        self.noted = given
        raise _NotedError


class _Zeros(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.embedding_dim = width

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, self.width, device=ids.device)
