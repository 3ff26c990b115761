"""The base that the preview serves: built as for training, without an adapter, in the stored
formats, from the cache.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ft_service.bases.cache_folder import Cache
from ft_service.bases.description import ImageFacts
from ft_service.errors import SpecError
from ft_service.host.hardware import available_memory
from ft_service.spec import PrecisionOptions
from ft_service.wording import bytes_text
from workers.base.load import load
from workers.images.placing import take_images
from workers.images.tower import Tower, positions_of
from workers.layers.segment_attention import NAME as SEGMENTS
from workers.layers.segments import CURRENT as ROW
from workers.layers.segments import ImageInputs, chunk_in
from workers.model.attention import chooses_keys, mixes_otherwise, own_attention
from workers.model.build import base_on_meta, decoder_layers, restore_buffers
from workers.model.multimodal import text_decoder
from workers.model.precision import choose_products, formats_of_base, precision_map, swap
from workers.model.special_types import NOT_PREVIEWED
from workers.patches.forward import replace_forward
from workers.patches.sample_positions import BY_LENGTH, rotate_by_length
from workers.ranks.runtime import COMPUTE_DTYPE
from workers.serving.batched_adapters import Adapter, Adapters, AdapterSpan
from workers.serving.cached_attention import CURRENT, NAME, KeyValueCache, Span
from workers.serving.pictures import PromptImages, PromptPictures, joined
from workers.serving.room import Room

_TRIALS = 3
_STATE_BOUND = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Relative difference of logits: rounding, in the dtype of the arithmetic."""


@dataclass(frozen=True)
class TokenSpan:
    """The next tokens of one sequence."""

    ids: Sequence[int]
    span: Span
    """Its place in the row."""
    first: int
    """Position of the first of them in the sequence."""
    adapter: Adapter | None
    rows: int = 1
    """Tokens at its end whose logits are wanted."""
    length: int = 0
    """Tokens of the sequence that are known, which some rotary embeddings go by; 0: up to these."""
    images: PromptImages | None = None
    """Those of its prompt; None: there are none."""

    @property
    def positions(self) -> Tensor:
        """int64 [axes, tokens]."""
        if self.images is not None:
            return self.images.positions_of(self.first, len(self.ids))
        return torch.arange(self.first, self.first + len(self.ids))[None]

    @property
    def pictured(self) -> list[ImageInputs]:
        """The features that stand among these tokens, at their places in the row."""
        if self.images is None:
            return []
        return [self.images.within(self.first, self.first + len(self.ids), self.span.start)]


class ServedModel:
    """A base on one device. `adapters` are put on and taken off by the row."""

    def __init__(
        self, path: str, precision: PrecisionOptions, device: torch.device, cache: Cache | None
    ) -> None:
        self.device = device
        compute = COMPUTE_DTYPE[precision.compute]
        self._path, self._compute = path, compute
        self._tower: Tower | None = None
        """None: no picture was shown yet."""
        model = base_on_meta(path)
        decoder = text_decoder(model)
        own_kind = decoder.config._attn_implementation != SEGMENTS or bool(chunk_in(decoder.config))
        self.by_state = own_kind or mixes_otherwise(type(decoder)) or chooses_keys(type(decoder))
        """Whether layers keep more than keys and values (of convolutions, recurrences, indexers),
        or attention is of its own kind: the architecture then keeps what it knows of a sequence
        itself. A forward has one sequence, its prompt whole.
        """
        if decoder.config.model_type in NOT_PREVIEWED:
            raise _answers_otherwise(decoder.config.model_type)
        restore_buffers(model, device, compute)
        layers = decoder_layers(model)
        kinds = _rotations(decoder.config)
        self.mixes = not self.by_state and not any(
            kind.get("rope_type") in BY_LENGTH for kind in kinds
        )
        """Whether several sequences may share a row."""
        self._turns = [
            int(kind["original_max_position_embeddings"])
            for kind in kinds
            if kind.get("rope_type") == "longrope"
        ]
        formats = precision_map(model, layers, precision, formats_of_base(model, layers, path))
        swap(model, layers, formats)
        choose_products(model, precision, compute, device)
        decoder.set_attn_implementation(own_attention(decoder) if self.by_state else NAME)
        model.requires_grad_(False)
        self.loaded = load(model, path, seed=0, compute_dtype=compute, device=device, cache=cache)
        self._model: PreTrainedModel = model.eval()
        self._length = 0
        rotate_by_length(model, lambda: self._length)
        self.adapters = Adapters(model, compute, device)
        self._last: Tensor | None = None
        head: Any = model.get_output_embeddings()
        read: Any = model.get_input_embeddings()
        head.register_forward_pre_hook(self._only_last)
        self.words: int = head.weight.shape[0]
        self.vocabulary: int = min(self.words, len(read.weight))
        """Ids below are tokens that can be read and written."""
        self._hidden: Any = None
        """What the layers have made of a prompt whose logits are made in parts."""
        self._in_parts = False
        if self.by_state:
            whole = next(
                child
                for child in model.children()
                if any(module is layers[0] for module in child.modules())
            )
            replace_forward(whole, partial(self._once, whole.forward))
            self._require_kept_state(decoder.config.model_type, compute)
        self.room: Room | None = self._measured_room() if device.type == "cpu" else None
        """For what is known of all sequences; None: the device itself refuses what it has no room
        for.
        """
        self.context: int = getattr(decoder.config, "max_position_embeddings", None) or 4096

    def rotation(self, length: int) -> int:
        """The set of rotary frequencies that a sequence of this many tokens has: keys of another do
        not fit it.
        """
        return sum(length > turn for turn in self._turns)

    @torch.inference_mode()
    def forward(self, pieces: Sequence[TokenSpan]) -> Tensor:
        """The logits after the last `rows` tokens of each piece, fp32 [rows of all pieces, words].

        Pieces of one adapter should be neighbours.
        """
        wanted = [torch.arange(piece.span.end - piece.rows, piece.span.end) for piece in pieces]
        self._last = torch.cat(wanted).to(self.device)
        return self._row(pieces)

    @torch.inference_mode()
    def forward_in_parts(self, piece: TokenSpan, most: int) -> Generator[Tensor, None, None]:
        """As `forward` of one piece of a model `by_state`, at most so many rows at a time: the
        layers run once for all.
        """
        parts = torch.arange(piece.span.end - piece.rows, piece.span.end, device=self.device).split(
            most
        )
        self._in_parts = True
        try:
            self._last = parts[0]
            yield self._row([piece])
            for part in parts[1:]:
                self._last = part
                yield (
                    self._model(input_ids=torch.tensor([piece.ids[:1]], device=self.device))
                    .logits[0]
                    .float()
                )
        finally:
            self._in_parts = False
            self._hidden = None

    def _once(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of the forward of all layers together, before the head and what follows it."""
        if not self._in_parts:
            return own(*args, **kwargs)
        self._hidden = own(*args, **kwargs) if self._hidden is None else self._hidden
        return self._hidden

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int], adapter: Adapter | None) -> list[float]:
        """Log-probabilities of each token but the first, in nats, after those before it."""
        before = tokens[:-1]
        logits = self.forward(
            [TokenSpan(before, Span(KeyValueCache(), 0, len(before)), 0, adapter, rows=len(before))]
        )
        after = torch.tensor(tokens[1:], device=self.device)[:, None]
        return logits.log_softmax(dim=-1).gather(1, after)[:, 0].tolist()

    def look(self, prompt: PromptPictures, facts: ImageFacts) -> PromptImages | None:
        """Compute the features of one more picture of a prompt; those of all once it was the last.

        The towers are loaded for the first picture and stay, in fp32. Raises SpecError where a
        host has no memory for them, or the base's code refuses a picture.
        """
        if (picture := prompt.next()) is not None:
            features = self._looking(facts).features(picture.tokens, picture.inputs)
            prompt.features[picture.key] = features.stored_in(self._compute)
        if prompt.next() is not None:
            return None
        return prompt.placed(facts.token_id, positions_of(self._model))

    def _looking(self, facts: ImageFacts) -> Tower:
        """The towers, loaded."""
        if self._tower is None:
            if facts.two_way and self.by_state:
                raise _answers_otherwise(text_decoder(self._model).config.model_type)
            needed = facts.tower_bytes
            if self.device.type == "cpu" and needed > (most := available_memory() // 2):
                raise SpecError(
                    f"The base's towers for images take {bytes_text(needed)} of memory beside it, "
                    f"and half of what is free on the preview's host is {bytes_text(most)}. Leave "
                    "the images out, or serve the model with an inference server "
                    "(FT_INFERENCE_URL).",
                    param="messages",
                    code="out_of_memory",
                )
            self._tower = Tower.loaded(self._path, facts.token_id, self.device)
            take_images(self._model, facts)
        return self._tower

    def require_device(self) -> None:
        """Raise the error of a GPU that cannot compute any more: after some, every further
        operation fails.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _row(self, pieces: Sequence[TokenSpan]) -> Tensor:
        """The logits at the places of `_last`, fp32 [places, words]."""
        ids = torch.tensor([[token for piece in pieces for token in piece.ids]], device=self.device)
        axes = max(1 if piece.images is None else piece.images.axes for piece in pieces)
        positions = torch.cat([piece.positions.expand(axes, -1) for piece in pieces], dim=1)
        positions = positions if axes == 1 else positions[:, None]
        ROW.images = joined([own for piece in pieces for own in piece.pictured], self.device)
        CURRENT.spans = [piece.span for piece in pieces]
        self._length = max(max(piece.length, piece.first + len(piece.ids)) for piece in pieces)
        self.adapters.spans = _adapter_spans(pieces)
        given = {"input_ids": ids, "position_ids": positions.to(self.device)}
        if not self.by_state:
            return self._model(**given, use_cache=False).logits[0].float()
        (piece,) = pieces
        memory = piece.span.memory
        out: Any = self._model(**given, use_cache=True, past_key_values=memory.state)
        memory.state = out.past_key_values
        return out.logits[0].float()

    def _require_kept_state(self, kind: str, compute: torch.dtype) -> None:
        """Raises SpecError for an architecture that knows less of a sequence in parts than of the
        whole.
        """
        ids = [1 + place % (self.words - 1) for place in range(1, 13)]
        memory = KeyValueCache()
        whole = self.forward([TokenSpan(ids, Span(KeyValueCache(), 0, len(ids)), 0, None)])
        last = self.forward([TokenSpan(ids[:8], Span(memory, 0, 8), 0, None)])
        for place in range(8, len(ids)):
            last = self.forward(
                [TokenSpan(ids[place : place + 1], Span(memory, 0, 1), place, None)]
            )
        if float((last - whole).norm() / whole.norm()) > _STATE_BOUND[compute]:
            raise _answers_otherwise(kind)

    def _measured_room(self) -> Room:
        """Half of the memory that is free now, and what layers keep of a sequence, by two short
        ones.
        """
        known = []
        for length in (4, 8):
            memory = KeyValueCache()
            self.forward([TokenSpan([1] * length, Span(memory, 0, length), 0, None)])
            known.append((length, memory.nbytes))
        return Room.measured(available_memory() // 2, *known)

    def settle_threads(self, most: int) -> int:
        """Take as many threads as give the next token soonest, `most` or one: where others use the
        processors too, or the base is small, threads wait for each other longer than they compute.
        """
        took: dict[int, float] = {}
        for threads in (1, most):
            torch.set_num_threads(threads)
            times = []
            for _ in range(_TRIALS):
                begin = time.perf_counter()
                self.forward([TokenSpan([1], Span(KeyValueCache(), 0, 1), 0, None)])
                times.append(time.perf_counter() - begin)
            took[threads] = sorted(times)[_TRIALS // 2]
        best = min(took, key=lambda threads: took[threads])
        torch.set_num_threads(best)
        return best

    def _only_last(self, head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert self._last is not None
        return (inputs[0].index_select(1, self._last),)


def _answers_otherwise(kind: str) -> SpecError:
    return SpecError(
        f"The base is a {kind} model, whose answers token by token are not those that it gives at "
        "once, with the installed "
        "transformers: the preview does not serve it. Serve it with an inference server "
        "(FT_INFERENCE_URL).",
        param="model",
        code="model_not_served",
    )


def _adapter_spans(pieces: Sequence[TokenSpan]) -> list[AdapterSpan]:
    """Runs of neighbours with the same adapter."""
    spans: list[AdapterSpan] = []
    for piece in pieces:
        if piece.adapter is None:
            continue
        if spans and spans[-1].adapter is piece.adapter and spans[-1].end == piece.span.start:
            spans[-1] = AdapterSpan(spans[-1].adapter, spans[-1].start, piece.span.end)
        else:
            spans.append(AdapterSpan(piece.adapter, piece.span.start, piece.span.end))
    return spans


def _rotations(config: Any) -> list[Mapping[str, Any]]:
    """The parameters of a text decoder's rotary embeddings, which may be one for each kind of
    layer.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return (
        [kind for kind in (rope, *rope.values()) if isinstance(kind, Mapping)]
        if isinstance(rope, Mapping)
        else []
    )
