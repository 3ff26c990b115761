"""A probe of what is served with a picture: a sample as a conversation that a client could send,
with the trainer's log-probabilities of the tokens behind its picture.

A sample's tokens do not say of which messages they were made. They are reconstructed, and kept only
if the chat template makes exactly these tokens of them again.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ft_service.data.image_part import content_of
from ft_service.data.sample_kinds import IMAGE, Picture
from ft_service.data.template_process import TemplateProcess
from ft_service.data.token_options import TokenOptions
from ft_service.data.tokens.image_processor import ImageProcessor, decoded
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.template_parser import turns_of
from ft_service.data.tokens.tokenize import load_tokenizer, with_pictures, with_uses
from ft_service.errors import FtError
from ft_service.host.helper_process import HelperFailed
from ft_service.rundir.evaluations import MOST_TOKENS, Probe
from ft_service.spec import JobSpec
from workers.base.rank_objects import by_first
from workers.data.batches import make_batch
from workers.output.served_probes import finite, without_adapter
from workers.ranks.sharding import reshard
from workers.training.context import TrainingContext
from workers.training.evaluation_prompts import last_stretch, rendering, without_end
from workers.training.step import logits_of

MOST_TRIED = 16
"""Samples among which one with small pictures is chosen."""
MOST_BYTES = 4 * 2**20
"""Of a conversation's pictures: probes are read whole by the service."""

_AROUND = ("qbeforeq", "qbehindq")
"""Texts that templates do not change."""


def pictured_probe(context: TrainingContext, samples: Sequence[Tokens]) -> list[Probe]:
    """A probe on one of the first samples that show pictures, by the model as it is; none where
    no conversation is known that gives its tokens.

    Called by all ranks together, who get the same. Their features must be there
    (workers/images/computing.py).
    """
    model, runtime = context.model, context.runtime
    asked = by_first(lambda: asked_with_pictures(runtime.spec, samples[:MOST_TRIED]))
    if asked is None:
        return []
    model.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        batch = make_batch([asked.whole], runtime.device, packed=False)
        tuned = _behind(logits_of(model, batch), asked)
        with without_adapter(model):
            base = _behind(logits_of(model, batch), asked)
    reshard(model)
    return finite([Probe(tokens=asked.behind, tuned=tuned, base=base, chat=asked.chat)])


@dataclass(frozen=True)
class AskedChat:
    """A sample as a conversation."""

    chat: list[dict[str, Any]]
    """As `Probe.chat`."""
    whole: Tokens
    """All that the template writes of it."""

    @property
    def behind(self) -> list[int]:
        """The last tokens, MOST_TOKENS of them at most, and none of a picture."""
        first = max(self.whole.images[-1].end, len(self.whole.ids) - MOST_TOKENS)
        return self.whole.ids[first:].tolist()


def asked_with_pictures(spec: JobSpec, samples: Sequence[Tokens]) -> AskedChat | None:
    """One of these samples as a conversation with pictures: of those that can be one, that with
    the smallest pictures. None: none can.

    Jobs with a chat template or bounds of pixels of their own have none, because a server reads
    other tokens by those of the base.
    """
    options = TokenOptions.of(spec)
    pictured = [sample for sample in samples if sample.images]
    if options.chat_template or options.pixels or not pictured:
        return None
    pictured.sort(key=lambda own: sum(len(use.picture.data) for use in own.images))
    tokenizer: Any = load_tokenizer(spec.model.path, options.chat_template)
    try:
        processor = ImageProcessor.of(spec.model.path)
        with rendering(tokenizer) as process:
            if process is None:
                return None
            for sample in pictured:
                asked = _Reconstruction(sample, tokenizer, processor, process, options).asked()
                if asked is not None:
                    return asked
    except (FtError, HelperFailed):  # a template or a picture that is refused proves nothing
        pass
    return None


@dataclass
class _Reconstruction:
    """A sample, and what makes tokens of conversations."""

    sample: Tokens
    tokenizer: Any
    processor: ImageProcessor
    process: TemplateProcess
    options: TokenOptions

    def asked(self) -> AskedChat | None:
        """The sample as a conversation whose tokens begin with it; None: not known."""
        begin, end = last_stretch(self.sample.targets)
        if self.sample.images[-1].end > begin:
            return None
        before = self.sample.ids[:begin].tolist()
        messages = turns_of(before, self.tokenizer, partial(self._text, prompt=True))
        if messages is None:
            return None
        learned, _ = without_end(self.sample.ids[begin:end].tolist(), self.tokenizer)
        answer = self.tokenizer.decode(
            learned, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        for said in dict.fromkeys((answer, answer.strip())):  # some templates add a space
            asked = self._of([*messages, {"role": "assistant", "content": said}])
            if asked is not None:
                return asked
        return None

    def _of(self, turns: Sequence[dict[str, Any]]) -> AskedChat | None:
        """These messages, if their tokens begin with the sample; None: they do not, or their
        pictures are too large.
        """
        whole = self._tokens(turns)
        if not np.array_equal(whole.ids[: len(self.sample.ids)], self.sample.ids):
            return None
        sent = [_sent(use.picture) for use in self.sample.images]
        if sum(len(own.data) for own in sent) > MOST_BYTES:
            return None
        return AskedChat(_as_client_sends(self._signed(turns), sent), whole)

    @cached_property
    def _marks(self) -> str:
        """What the chat template writes for a picture, with what may stand around the sign."""
        content = IMAGE.join(_AROUND)
        turns = [{"role": "user", "content": content}]
        text = self.process.write(turns, None, self.options.day, images=True)
        return text.partition(_AROUND[0])[2].partition(_AROUND[1])[0]

    def _signed(self, turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages with IMAGE in place of what is written for the sample's pictures."""
        sign = self.processor.image_token
        written = [
            self._marks.replace(sign, self.processor.replacement(use.picture))
            for use in self.sample.images
        ]
        made: list[dict[str, Any]] = []
        for turn in turns:
            content = turn["content"]
            while written and turn["role"] == "user" and written[0] in content:
                content = content.replace(written.pop(0), IMAGE, 1)
            made.append({**turn, "content": content})
        return made

    def _rendered(self, turns: Sequence[dict[str, Any]], *, prompt: bool) -> tuple[str, Any]:
        """The text of messages, with what stands for pictures, and where that is."""
        signed = self._signed(turns)
        count = sum(turn["content"].count(IMAGE) for turn in signed)
        text = self.process.write(signed, None, self.options.day, prompt=prompt, images=True)
        shown = [use.picture for use in self.sample.images[:count]]
        written = [(own, self.processor.replacement(own)) for own in shown]
        return with_pictures(text, self.processor.image_token, written, count)

    def _text(self, turns: Sequence[dict[str, Any]], *, prompt: bool) -> str:
        return self._rendered(turns, prompt=prompt)[0]

    def _tokens(self, turns: Sequence[dict[str, Any]]) -> Tokens:
        text, places = self._rendered(turns, prompt=False)
        encoding = self.tokenizer([text], add_special_tokens=False).encodings[0]
        ids = np.asarray(encoding.ids, dtype=np.int32)
        bare = Tokens(ids, np.zeros(len(ids), np.bool_))
        return with_uses(places, encoding, bare, self.processor.token_id)


def _as_client_sends(
    turns: Sequence[dict[str, Any]], pictures: Sequence[Picture]
) -> list[dict[str, Any]]:
    """Messages in OpenAI's form. `turns`: with IMAGE in the places of the pictures."""
    made: list[dict[str, Any]] = []
    for turn in turns:
        count = turn["content"].count(IMAGE)
        own, pictures = pictures[:count], pictures[count:]
        made.append({**turn, "content": content_of(turn["content"], own)} if count else turn)
    return made


def _sent(picture: Picture) -> Picture:
    """A picture as training has seen it: its file, if everybody decodes that alike, else a PNG of
    its pixels, turned, without transparency, and at most as large as `detail` allows.
    """
    seen = decoded(picture)
    with Image.open(io.BytesIO(picture.data)) as plain:
        alike = plain.mode in ("RGB", "L") and np.array_equal(
            np.asarray(plain.convert("RGB")), np.asarray(seen)
        )
    if alike:
        return Picture.of(picture.data)
    file = io.BytesIO()
    seen.save(file, "PNG")
    return Picture.of(file.getvalue())


def _behind(logits: Tensor, asked: AskedChat) -> list[float]:
    """Log-probabilities of all of `behind` but the first. `logits`: [1, length, words]."""
    behind = torch.tensor(asked.behind, device=logits.device)
    logs = logits[0, -len(behind) : -1].float().log_softmax(dim=-1)
    return [round(value, 5) for value in logs.gather(1, behind[1:, None])[:, 0].tolist()]
