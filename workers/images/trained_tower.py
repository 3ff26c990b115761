"""The towers of a base with adapters that a job trains: whole on every rank, outside of FSDP2.

They look at the pictures of each micro-batch in its forward, with gradients, which the ranks
average once a step. A rank whose micro-batches have no pictures adds zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from ft_service.bases.description import Description, facts_of_images
from ft_service.data.token_options import NO_BOUNDS, PixelBounds
from ft_service.data.tokens.image_processor import ImageProcessor
from ft_service.data.tokens.sample import ImageUse, Tokens
from ft_service.spec import LoraOptions
from workers.base.frozen_weights import initial_adapter
from workers.base.load import adapters, plain_name
from workers.images.features import Features
from workers.images.tower import Tower, layout_of

_PROCESSED = 64
"""Pictures whose pixels are kept: those of the newest micro-batches."""


class TrainedTower:
    """The towers of a base, on this rank, with fp32 adapters on some of their linear layers."""

    def __init__(
        self,
        path: str,
        described: Description,
        targets: Sequence[str],
        lora: LoraOptions,
        seed: int,
        device: torch.device,
        bounds: PixelBounds = NO_BOUNDS,
    ) -> None:
        """`targets`: full names of the layers. `bounds`: of the job's pictures. Raises SpecError as
        `Tower.loaded`, OSError.
        """
        self._processor = ImageProcessor.of(path, bounds)
        self._tower = Tower.loaded(path, facts_of_images(described).token_id, device)
        config = LoraConfig(
            r=lora.r,
            lora_alpha=lora.lora_alpha,  # pyright: ignore[reportArgumentType]
            target_modules=list(targets),
            use_rslora=lora.use_rslora,
        )
        self.model: nn.Module = get_peft_model(self._tower.model, config)
        self.model.eval()
        self.parameters = dict(adapters(self.model))
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(initial_adapter(plain_name(name), tuple(parameter.shape), seed))
        self._inputs = lru_cache(_PROCESSED)(self._processor.inputs)

    def layout(self, _: Tokens, use: ImageUse) -> Features:
        """The layout of a picture, without features (`FeaturesOf`)."""
        none = torch.empty(0)
        return Features(none, none, layout_of(self._inputs(use.picture)))

    def later(
        self, shown: Sequence[tuple[Tokens, ImageUse]]
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """Function that computes rows and early features of pictures in the samples that show them
        (`ImageInputs`), for the forward in which it is called.
        """
        asked = [
            (sample.ids[use.begin : use.end].tolist(), self._inputs(use.picture))
            for sample, use in shown
        ]
        return partial(self._answers, asked)

    def _answers(
        self, asked: Sequence[tuple[list[int], dict[str, np.ndarray]]]
    ) -> tuple[Tensor, Tensor]:
        answers = [self._tower.answer(ids, inputs) for ids, inputs in asked]
        rows, early = zip(*answers, strict=True)
        return torch.cat(rows), torch.cat(early, dim=1)
