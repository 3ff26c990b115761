"""Noise on embeddings: the same wherever a sample stands, as large as NEFTune's paper has it, and
none outside training.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from ft_service.data.tokens.sample import Tokens
from workers.data.batches import Batch, collate, pack
from workers.layers.noise import add_noise, use_noise

CPU = torch.device("cpu")
WIDTH = 64
ALPHA = 5.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        nn.init.zeros_(self.embedding.weight)
        add_noise(self, ALPHA)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def of(self, batch: Batch) -> torch.Tensor:
        use_noise(self, batch.keys, batch.lengths)
        return self.embedding(batch.ids).detach()


def sample(length: int) -> Tokens:
    return Tokens(np.full(length, 3, dtype=np.int32), np.ones(length, dtype=bool))


SAMPLES = [sample(40), sample(7), sample(25)]
KEYS = [11, 22, 33]


def test_noise_follows_from_the_sample_wherever_it_stands() -> None:
    model = Model()
    packed = model.of(pack(SAMPLES, CPU, KEYS))[0].split([40, 7, 25])
    padded = model.of(collate(SAMPLES, CPU, KEYS))
    alone = model.of(pack(SAMPLES[1:2], CPU, KEYS[1:2]))[0]
    for row, noise, own in zip(padded, packed, SAMPLES, strict=True):
        assert torch.equal(row[: len(own.ids)], noise)
    assert torch.equal(alone, packed[1])
    assert not torch.equal(model.of(pack(SAMPLES[1:2], CPU, [44]))[0], alone), (
        "another step, another key"
    )


def test_noise_is_even_and_smaller_on_longer_samples() -> None:
    noise = Model().of(pack(SAMPLES, CPU, KEYS))[0].split([40, 7, 25])
    for own, length in zip(noise, (40, 7, 25), strict=True):
        most = ALPHA / (length * WIDTH) ** 0.5
        assert 0.98 * most < own.abs().max() <= most
        assert abs(own.mean()) < 0.1 * most
        assert abs(own.std() / most - 3**-0.5) < 0.05


def test_there_is_none_outside_of_training() -> None:
    model = Model()
    assert not model.of(pack(SAMPLES, CPU)).any(), "nor without keys, as in a validation"
    model.eval()
    assert not model.of(pack(SAMPLES, CPU, KEYS)).any()
