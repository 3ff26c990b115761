"""The pictures of a prompt while it is answered: what the base's tower has made of them, and where
their tokens are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ft_service.bases.description import ImageFacts
from ft_service.data.image_part import of_json
from ft_service.data.image_process import SeenPictures
from ft_service.data.sample_kinds import Picture
from ft_service.data.tokens.sample import ImageUse, Tokens
from ft_service.tinker.loss_calls import refuse_unexpected
from workers.images.features import Features, Positions, SampleImages, by_key
from workers.layers.segments import ImageInputs


@dataclass(frozen=True)
class ChatPictures:
    """The pictures of a request as it arrives, and the facts of its base's towers."""

    facts: ImageFacts
    pictures: Sequence[Picture]
    places: Sequence[str]
    """Of each picture in the request, for errors."""

    @classmethod
    def of(cls, given: dict[str, Any]) -> ChatPictures:
        """Those of an order (api/wire/chat_request.py)."""
        pictures = [of_json(own) for own in given["pictures"]]
        return cls(
            ImageFacts(**given["facts"]), pictures, [own["place"] for own in given["pictures"]]
        )


@dataclass(frozen=True)
class TokenPictures(ChatPictures):
    """Those of a prompt of tokens."""

    before: Sequence[int] = ()
    """Tokens of text before each."""
    expected: Sequence[int | None] = ()
    """Tokens that the client expects for each; None: it does not say."""

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        """Those of an order (ft_service/tinker/sample_calls.py)."""
        chat = ChatPictures.of(given)
        told = given["pictures"]
        before, expected = ([own[name] for own in told] for name in ("before", "expected"))
        return cls(chat.facts, chat.pictures, chat.places, before, expected)

    def prompt(self, tokens: Sequence[int], seen: SeenPictures, tokenizer: Any) -> PromptPictures:
        """The prompt, with the tokens that stand for each picture in their places.

        `tokens`: of the text. Raises SpecError for a picture of another number of them than is
        expected.
        """
        ids: list[int] = []
        uses: list[ImageUse] = []
        end = 0
        for number, own in enumerate(seen.pictures):
            ids += tokens[end : self.before[number]]
            end = self.before[number]
            stands = tokenizer(own.text, add_special_tokens=False)["input_ids"]
            refuse_unexpected(self.expected[number], len(stands), self.places[number])
            uses.append(ImageUse(len(ids), len(ids) + len(stands), Picture(own.key, b"")))
            ids += stands
        ids += tokens[end:]
        whole = np.asarray(ids, np.int32)
        return PromptPictures(
            Tokens(whole, np.zeros(len(whole), np.bool_), images=tuple(uses)), seen
        )


@dataclass(frozen=True)
class RenderedChat:
    """A prompt as text."""

    text: str
    seen: SeenPictures | None = None
    """None: it has no pictures."""


@dataclass(frozen=True)
class UnseenPicture:
    """A picture without features."""

    key: str
    tokens: list[int]
    """Those that stand for it."""
    inputs: Mapping[str, np.ndarray]
    """What the tower takes."""


@dataclass
class PromptPictures:
    """The pictures of a prompt, whose features are computed one after the other."""

    sample: Tokens
    """The prompt's tokens, with the places of its pictures."""
    seen: SeenPictures
    features: dict[str, Features] = field(default_factory=dict)
    """By the pictures' keys."""

    def next(self) -> UnseenPicture | None:
        """The next picture; None: all have features."""
        for use, own in zip(self.sample.images, self.seen.pictures, strict=True):
            if own.key not in self.features:
                tokens = self.sample.ids[use.begin : use.end].tolist()
                return UnseenPicture(own.key, tokens, own.inputs)
        return None

    def placed(self, token_id: int, positions: Positions | None) -> PromptImages:
        """Their features at their places. `token_id`: of placeholders."""
        images = SampleImages(by_key(self.features), token_id, positions)
        inputs = images.inputs([self.sample], [0], torch.device("cpu"))
        assert inputs is not None
        numbered = images.positions([self.sample])
        return PromptImages(inputs, None if numbered is None else numbered[:, 0])


@dataclass(frozen=True)
class PromptImages:
    """What a prompt's pictures give the decoder."""

    inputs: ImageInputs
    """With places in the prompt, in their order, and on the CPU."""
    positions: Tensor | None
    """int64 [axes, length] of the prompt's tokens; None: they are numbered one by one."""

    @property
    def axes(self) -> int:
        return 1 if self.positions is None else len(self.positions)

    def within(self, first: int, end: int, start: int) -> ImageInputs:
        """The features of the prompt's tokens [first, end), with places from `start` on."""
        places = self.inputs.places
        begin, behind = torch.searchsorted(places, torch.tensor([first, end])).tolist()
        own = slice(begin, behind)
        spans = self.inputs.spans
        return ImageInputs(
            places[own] - first + start,
            self.inputs.features[own],
            self.inputs.early[:, own],
            spans[(spans[:, 0] >= first) & (spans[:, 1] <= end)] - first + start,
        )

    def whole_to(self, end: int) -> int:
        """Where a part of the prompt ends that would end at `end`, and cuts no picture."""
        spans = self.inputs.spans
        return max([end, *spans[(spans[:, 0] < end) & (spans[:, 1] > end), 1].tolist()])

    def positions_of(self, first: int, count: int) -> Tensor:
        """int64 [axes, count]: positions of tokens of the prompt and of its answer, which goes on
        behind the largest.
        """
        if self.positions is None:
            return torch.arange(first, first + count)[None]
        length = self.positions.shape[1]
        answer = torch.arange(first, first + count) - length + 1 + self.positions.max()
        known = self.positions[:, first : first + count]
        return torch.cat([known, answer[known.shape[1] :].expand(len(known), -1)], dim=1)


def joined(parts: Sequence[ImageInputs], device: torch.device) -> ImageInputs | None:
    """The features of a row, on a device; None: it has none."""
    held = [own for own in parts if len(own.places)]
    if not held:
        return None
    return ImageInputs(
        torch.cat([own.places for own in held]).to(device),
        torch.cat([own.features for own in held]).to(device),
        torch.cat([own.early for own in held], dim=1).to(device),
        torch.cat([own.spans for own in held]),
    )
