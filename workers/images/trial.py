"""Trial of a base on pictures: whether features put in place of placeholders give what the
published class gives.

The small copy of the base (workers/model/small_copy.py) is run twice on a sample with two pictures:
inside the published class with its towers and pixels, with transformers' own attention and masks;
and as training runs it, with features that were noted before. Towers have random weights, and their
layers share one set of them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedModel

from ft_service.bases.description import ImageFacts
from ft_service.data.line_errors import LineError
from ft_service.data.sample_kinds import Picture
from ft_service.data.tokens.base_tokenizer import load_tokenizer
from ft_service.data.tokens.image_processor import ImageProcessor
from ft_service.data.tokens.sample import ImageUse, Tokens
from ft_service.errors import SpecError
from workers.images.features import Features, SampleImages, by_key
from workers.images.placing import take_images
from workers.images.tower import Tower, asked, positions_of
from workers.layers.segments import CURRENT, kinds_in, tell_two_way
from workers.model.attention import own_attention, stay_within_segments
from workers.model.multimodal import MissingHead, put_in_place, text_decoder
from workers.model.packed_trial import SAME
from workers.model.small_copy import give_values, pass_by, small_copy

_SIZE = (96, 64)
"""Width and height of the pictures that are tried, in pixels."""
_EQUAL = 1e-4
"""Largest difference of a token's logits in fp32, as a share of their spread."""
_SEEN = 1e-2
"""Least difference that pictures make."""
_EVERY_LAYER = "hidden_size_per_layer_input"
"""What configs call the width of embeddings that every layer has."""


def try_images(base: PreTrainedModel, folder: str) -> ImageFacts | str:
    """What training needs to know of a base's towers; or why its pictures cannot be learned from,
    as the end of a sentence.

    `base`: as `base_on_meta` built it, which is left as it is. Takes seconds, and the memory of the
    towers' smallest copy.
    """
    try:
        processor = ImageProcessor.of(folder)
        tower = Tower.on_meta(folder, processor.token_id)
        return _facts_if_equal(base, folder, processor, tower)
    except (SpecError, LineError) as error:
        return str(error)
    except Exception as error:  # architectures run their own code
        if getattr(base.config.get_text_config(decoder=True), _EVERY_LAYER, None):
            return (
                f"its layers have embeddings of tokens of their own ({_EVERY_LAYER} in "
                "config.json), which its class looks up before the tower's features are there. "
                "Leave the lines with images out, or take a base of its family without them"
            )
        said = " ".join(str(error).split())[:200]
        return f"a small copy of its towers cannot be run ({type(error).__name__}: {said})"
    finally:
        CURRENT.use(None)


@torch.no_grad()
def _facts_if_equal(
    base: PreTrainedModel, folder: str, processor: ImageProcessor, tower: Tower
) -> ImageFacts | str:
    """What `try_images` returns."""
    weights = sum(own.numel() for own in tower.model.parameters())
    copy = small_copy(base).model
    stay_within_segments(copy)
    decoder = text_decoder(copy)
    stacks = [part for part in tower.model.modules() if isinstance(part, nn.ModuleList)]
    give_values(tower.model, [layer for stack in stacks for layer in pass_by(stack, _kind)])
    sample, pictures = _sample(base, folder, processor)
    given = [processor.inputs(own) for own in pictures]
    features = {
        use.picture.key: tower.features(sample.ids[use.begin : use.end].tolist(), own)
        for use, own in zip(sample.images, given, strict=True)
    }
    early = max(len(own.early) for own in features.values())
    images = SampleImages(by_key(features), processor.token_id, positions_of(copy))
    ids = torch.from_numpy(sample.ids.astype(np.int64))[None]
    blind = _logits(copy, [Tokens(sample.ids, sample.targets)], images, packed=False)[0]
    facts = ImageFacts(processor.token_id, early, weights)
    take_images(copy, facts)
    published = partial(_published, tower, copy, decoder, ids, ids == processor.token_id, given)
    ours = partial(_logits, copy, [sample], images, packed=False)
    two_way = _two_way(decoder, published(), lambda: ours()[0])
    if two_way is None:
        return "its class computes samples with pictures in another way"
    facts = replace(facts, two_way=two_way)
    narrowed = bool(two_way) and _narrow([decoder, tower.model], features)
    if narrowed and _difference(ours()[0], published()) > _EQUAL:
        return "its windows bound in another way what the tokens of a picture see of each other"
    whole = ours()[0]
    if _difference(whole, blind) < _SEEN:
        return "what it answers does not depend on the picture"
    text = replace(sample, images=(), ids=sample.ids[: sample.images[0].begin])
    packed = _logits(copy, [sample, text, sample], images, packed=True)
    if max(_difference(own, whole) for own in (packed[0], packed[2])) > SAME[torch.float32]:
        return "its packed samples with pictures are not computed as they are apart"
    return facts


def _two_way(decoder: Any, published: Tensor, ours: Callable[[], Tensor]) -> tuple[str, ...] | None:
    """The kinds of layers in which tokens of a picture must see each other in both directions to
    give the published class's logits. None: no choice does.
    """
    kinds = kinds_in(decoder.config)
    for tried in dict.fromkeys([(), tuple(kinds), *((kind,) for kind in kinds)]):
        tell_two_way(decoder, tried)
        if _difference(ours(), published) <= _EQUAL:
            return tried
    return None


def _narrow(models: Sequence[Any], features: Mapping[str, Features]) -> bool:
    """Let the windows of layers be shorter than a picture. Returns whether there are any."""
    window = max(2, min(len(own.rows) for own in features.values()) // 2)
    parts = [part for model in models for part in model.modules()]
    texts = [model.config.get_text_config(decoder=True) for model in models]
    having = [own for own in (*parts, *texts) if getattr(own, "sliding_window", None)]
    for own in having:
        own.sliding_window = window
    return bool(having)


def _published(
    tower: Tower,
    copy: PreTrainedModel,
    decoder: Any,
    ids: Tensor,
    held: Tensor,
    given: Sequence[dict[str, np.ndarray]],
) -> Tensor:
    """Logits of the published class with pixels, [length, words]."""
    model: Any = tower.model
    head: Any = copy.get_output_embeddings()
    others: dict[nn.Module, Any] = dict.fromkeys(_missing_heads(model), head)
    put_in_place(model, {tower.decoder: decoder, **others})
    attention = decoder.config._attn_implementation
    decoder.set_attn_implementation(own_attention(decoder))
    CURRENT.use(None)
    pixels = {
        name: torch.from_numpy(np.concatenate([own[name] for own in given])) for name in given[0]
    }
    logits = model(input_ids=ids, use_cache=False, **asked(model, ids, held), **pixels).logits[0]
    decoder.set_attn_implementation(attention)
    return logits


def _missing_heads(model: nn.Module) -> Iterator[nn.Module]:
    return (part for part in model.modules() if isinstance(part, MissingHead))


def _kind(layer: nn.Module) -> Hashable:
    """What two layers have in common that compute alike."""
    return tuple(
        (
            name,
            type(part).__name__,
            tuple((key, tuple(own.shape)) for key, own in part.named_parameters(recurse=False)),
        )
        for name, part in layer.named_modules()
    )


def _sample(
    base: PreTrainedModel, folder: str, processor: ImageProcessor
) -> tuple[Tokens, list[Picture]]:
    """A sample of words with two pictures, which ends with words."""
    tokenizer: Any = load_tokenizer(folder)
    pictures = [Picture.of(_drawn(seed)) for seed in range(2)]
    marks = [
        tokenizer(processor.replacement(own), add_special_tokens=False).input_ids
        for own in pictures
    ]
    embedding: Any = base.get_input_embeddings()
    rows = int(embedding.num_embeddings)
    plain = sorted(set(range(1, min(rows, 2000))) - set().union(*marks) - _special(base, rows))
    generator = np.random.default_rng(0)
    ids: list[int] = []
    uses: list[ImageUse] = []
    for words, mark, picture in zip((4, 3), marks, pictures, strict=True):
        ids += [*generator.choice(plain, words).tolist(), *_before(base), *mark]
        uses.append(ImageUse(len(ids) - len(mark), len(ids), picture))
    ids += generator.choice(plain, 6).tolist()
    targets = np.arange(len(ids)) > len(ids) - 4
    return Tokens(np.array(ids, dtype=np.int32), targets, images=tuple(uses)), pictures


def _before(base: PreTrainedModel) -> list[int]:
    """The token that templates of some bases write before a picture, and classes look for."""
    start = getattr(base.config, "vision_start_token_id", None)
    return [start] if isinstance(start, int) else []


def _special(base: PreTrainedModel, rows: int) -> set[int]:
    """The tokens that the base's config names."""
    named = base.config.to_dict().items()
    return {own for name, own in named if isinstance(own, int) and "token" in name and own < rows}


def _drawn(seed: int) -> bytes:
    """A picture of noise, as PNG."""
    pixels = np.random.default_rng(seed).integers(0, 256, (_SIZE[1], _SIZE[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _logits(
    model: Any, samples: Sequence[Tokens], images: SampleImages, *, packed: bool
) -> list[Tensor]:
    """Logits of each sample, [length, words], from a packed row or a padded one."""
    lengths = [len(own.ids) for own in samples]
    begins = [0, *accumulate(lengths)]
    ids = torch.from_numpy(np.concatenate([own.ids for own in samples]).astype(np.int64))[None]
    inputs = images.inputs(samples, begins[:-1], ids.device)
    positions = images.positions(samples)
    if positions is None:
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
    if packed:
        starts = torch.tensor(begins, dtype=torch.int32)
        CURRENT.use(starts, starts, max(lengths), images=inputs)
    else:
        CURRENT.use(None, lengths=tuple(lengths), images=inputs)
    logits = model(input_ids=ids, position_ids=positions).logits
    return list(logits[0].float().split(lengths))


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of a token's logits, as a share of their spread."""
    spread = (theirs - theirs.mean(dim=-1, keepdim=True)).norm(dim=-1)
    return float(((ours - theirs).norm(dim=-1) / spread.clamp(min=1e-30)).max())
