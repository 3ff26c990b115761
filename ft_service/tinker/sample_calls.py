"""Calls of `sample`: what a client sends, checked; the order for the preview's process; and what
the client gets back. Pure.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import Discriminator, Field, Tag

from ft_service.bases.description import ImageFacts
from ft_service.data.image_limits import most_images
from ft_service.data.image_part import as_json, refuse_large, refuse_other_types
from ft_service.data.line_errors import OF_FILES, LineError
from ft_service.data.sample_kinds import Picture
from ft_service.errors import SpecError
from ft_service.tinker import tinker_messages_pb2 as pb
from ft_service.tinker.bodies import Body
from ft_service.wording import shown_value

MOST_SAMPLES = 128
"""Limit of answers of one request."""
MOST_TOP = 20
"""Limit of the likeliest tokens that are reported of a place."""
MOST_STOPS = 64
NO_LOGPROB = -99999.0
"""Value of the `tinker` package (its module topk_logprobs in 0.38)."""
_IMAGES = ("image", "image_asset_pointer")
_NOT_HERE = {
    "target_prompt_logprobs": "log-probabilities of other tokens at the prompt's places are not "
    "computed here",
    "prompt_alt_tokens_k": "alternatives to the prompt's tokens are not drawn here",
    "record_stability_info": "stability information is not recorded here",
}


class TextChunk(Body):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] = Field(default_factory=list[int])


class ImageChunk(Body):
    """A picture, in base64."""

    type: str = "image"
    data: str
    format: str = ""
    """Not read: its first bytes say what it is."""
    expected_tokens: int | None = Field(default=None, ge=0)


class ImageAssetPointerChunk(Body):
    """A picture on the web."""

    type: str = "image_asset_pointer"
    location: str
    format: str = ""
    expected_tokens: int | None = Field(default=None, ge=0)


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return kind if kind in _IMAGES else "encoded_text"


Chunk = Annotated[
    Annotated[TextChunk, Tag("encoded_text")]
    | Annotated[ImageChunk, Tag("image")]
    | Annotated[ImageAssetPointerChunk, Tag("image_asset_pointer")],
    Discriminator(_kind),
]


class ModelInput(Body):
    """A prompt."""

    chunks: list[Chunk] = Field(max_length=4096)


class SamplingParams(Body):
    """How an answer is drawn."""

    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[int] | list[str] | None = None
    """None: the base's own ends; []: only max_tokens ends an answer."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)


class SampleRequest(Body):
    """The body of `asample`."""

    num_samples: int = Field(default=1, ge=1, le=MOST_SAMPLES)
    prompt: ModelInput
    sampling_params: SamplingParams = SamplingParams()
    sampling_session_id: str | None = None
    seq_id: int | None = Field(default=None, ge=0, le=10**12 - 1)
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=MOST_TOP)
    topk_sample_logprobs: int = Field(default=0, ge=0, le=MOST_TOP)
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    type: str = "sample"

    @property
    def tokens(self) -> list[int]:
        """Those of the text."""
        texts = (chunk for chunk in self.prompt.chunks if isinstance(chunk, TextChunk))
        return [token for chunk in texts for token in chunk.tokens]

    @property
    def pictures(self) -> list[tuple[int, int, ImageChunk | ImageAssetPointerChunk]]:
        """The number of each picture's chunk, and of the tokens of text before it, and the
        chunk.
        """
        found: list[tuple[int, int, ImageChunk | ImageAssetPointerChunk]] = []
        before = 0
        for number, chunk in enumerate(self.prompt.chunks):
            if isinstance(chunk, TextChunk):
                before += len(chunk.tokens)
            else:
                found.append((number, before, chunk))
        return found

    @property
    def length(self) -> int:
        """Tokens of the prompt, with as many for each picture as the client expects."""
        return len(self.tokens) + sum(chunk.expected_tokens or 0 for _, _, chunk in self.pictures)

    @property
    def scored(self) -> int:
        """Tokens at the prompt's end whose log-probabilities are asked for."""
        if not (self.prompt_logprobs or self.topk_prompt_logprobs):
            return 0
        most = self.length - 1
        return most if self.prompt_logprobs_last_n is None else self.prompt_logprobs_last_n

    def order(self, adapter: str | None, images: ImageFacts | None = None) -> dict[str, Any]:
        """The order for the preview's process (TokenRequest of workers/serving/requests.py).

        `adapter`: a PEFT folder; None: the base alone. `images`: facts of the base's towers, which
        a request with pictures needs.
        """
        given = self.sampling_params
        stop = self.sampling_params.stop
        texts = (
            [stop] if isinstance(stop, str) else [one for one in stop or [] if isinstance(one, str)]
        )
        return {
            "op": "sample",
            "prompt": self.tokens,
            "adapter": adapter,
            "n": self.num_samples,
            "max_tokens": given.max_tokens,
            "temperature": given.temperature,
            "top_p": given.top_p,
            "top_k": max(0, given.top_k),
            "seed": None if given.seed is None else given.seed % 2**63,
            "stop_texts": [text for text in texts if text],
            "stop_tokens": [one for one in stop if isinstance(one, int)]
            if isinstance(stop, list)
            else [],
            "ends": stop is None,
            "top_logprobs": self.topk_sample_logprobs,
            "scored": self.scored,
            "top_prompt_logprobs": self.topk_prompt_logprobs,
            **({} if images is None else {"images": self._ordered(images)}),
        }

    def _ordered(self, facts: ImageFacts) -> dict[str, Any]:
        """Pictures of an order, as workers/serving/pictures.py reads them."""
        pictures = [
            {
                **as_json(_picture(chunk, number)),
                "place": f"prompt.chunks.{number}",
                "before": before,
                "expected": chunk.expected_tokens,
            }
            for number, before, chunk in self.pictures
        ]
        return {"facts": asdict(facts), "pictures": pictures}


def parse_sample_request(body: object) -> SampleRequest:
    """Raises SpecError naming the field, its value and the limit."""
    request = SampleRequest.parse(body, _NOT_HERE)
    for number, chunk in enumerate(request.prompt.chunks):
        if isinstance(chunk, TextChunk) and chunk.type != "encoded_text":
            raise SpecError(
                f"prompt.chunks.{number}: {chunk.type[:40]}: this service samples from tokens and "
                "images only.",
                param="prompt",
            )
    _check_pictures(request)
    count = request.length
    if not request.prompt.chunks or not (count or request.pictures):
        raise SpecError("prompt: it has no tokens; at least one is needed.", param="prompt")
    if request.scored and not 1 <= request.scored < count:
        most = (
            f"prompt_logprobs_last_n = {request.prompt_logprobs_last_n}"
            if request.prompt_logprobs_last_n
            else "prompt_logprobs"
        )
        raise SpecError(
            f"{most}: the prompt has {count} tokens, and log-probabilities all but the first.",
            param="prompt_logprobs_last_n",
        )
    stop = request.sampling_params.stop
    if isinstance(stop, list) and len(stop) > MOST_STOPS:
        raise SpecError(
            f"sampling_params.stop: {len(stop)} of them; at most {MOST_STOPS} are possible.",
            param="sampling_params",
        )
    return request


def _check_pictures(request: SampleRequest) -> None:
    """Raises SpecError."""
    shown = request.pictures
    if len(shown) > (most := most_images()):
        raise SpecError(
            f"prompt: it has {len(shown)} images; at most {most} are possible.",
            param="prompt",
        )
    for number, _, chunk in shown:
        _picture(chunk, number)
    unknown = next((at for at, _, chunk in shown if chunk.expected_tokens is None), None)
    if unknown is not None and (request.prompt_logprobs or request.topk_prompt_logprobs):
        raise SpecError(
            f"prompt.chunks.{unknown}.expected_tokens: log-probabilities of a prompt need it, to "
            "say which token each is of.",
            param="prompt",
        )


def _picture(chunk: ImageChunk | ImageAssetPointerChunk, number: int) -> Picture:
    """The picture of a prompt's chunk of this number. Raises SpecError."""
    place = f"prompt.chunks.{number}"
    if isinstance(chunk, ImageAssetPointerChunk):
        if not chunk.location.startswith(("https://", "http://")):
            raise SpecError(
                f"{place}.location = {shown_value(chunk.location)}: images are fetched from https: "
                "addresses. Send its bytes, as an ImageChunk.",
                param="prompt",
            )
        return Picture.on_web(chunk.location)
    try:
        data = base64.b64decode(chunk.data.encode(), validate=True)
        refuse_large(len(data), "")
        refuse_other_types(data, "")
    except LineError as error:
        reason = error.reason.removesuffix(OF_FILES)
        raise SpecError(f"{place}.data: {reason}.", param="prompt") from None
    except ValueError as error:
        raise SpecError(f"{place}.data: is no base64: {error}.", param="prompt") from None
    return Picture.of(data)


@dataclass
class Sampled:
    """The parts of the preview's answer, as they come."""

    request: SampleRequest
    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    top: list[list[Any]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Texts of the answers, with special tokens but without the token that ends them, if they were
    asked for.
    """
    prompt: dict[int, tuple[float, Sequence[Any]]] = field(default_factory=dict)
    """Place in the prompt → log-probability and likeliest tokens."""
    done: bool = False

    def __post_init__(self) -> None:
        count = self.request.num_samples
        self.tokens, self.logprobs, self.top = ([[] for _ in range(count)] for _ in range(3))
        self.reasons = ["length"] * count
        self.texts = [""] * count

    def take(self, part: Mapping[str, Any]) -> None:
        """Take the next part."""
        match part["kind"]:
            case "tokens":
                self.tokens[part["index"]] += part["tokens"]
                self.logprobs[part["index"]] += part["logprobs"]
                self.top[part["index"]] += part.get("top", [])
            case "scores":
                top = part.get("top") or [()] * len(part["logprobs"])
                for offset, (logprob, likeliest) in enumerate(
                    zip(part["logprobs"], top, strict=True)
                ):
                    self.prompt[part["place"] + offset] = logprob, likeliest
            case "end":
                self.reasons[part["index"]] = part["reason"]
                self.texts[part["index"]] = part.get("text", "")
            case "done":
                self.done = True
            case _:
                pass

    def message(self) -> bytes:
        """The answer: `SampleResponse`."""
        message = pb.SampleResponse()
        for tokens, logprobs, top, reason in zip(
            self.tokens, self.logprobs, self.top, self.reasons, strict=True
        ):
            stopped = pb.STOP_REASON_STOP if reason == "stop" else pb.STOP_REASON_LENGTH
            sequence = message.sequences.add(
                stop_reason=stopped, tokens=np.asarray(tokens, "<i4").tobytes()
            )
            sequence.logprobs = np.asarray(logprobs, "<f4").tobytes()
            if self.request.topk_sample_logprobs:
                _fill(sequence.topk_sampled_logprobs, top, self.request.topk_sample_logprobs)
        places = range(self.request.length)
        if self.request.prompt_logprobs:
            values = [self.prompt.get(place, (math.nan, ()))[0] for place in places]
            message.prompt_logprobs = np.asarray(values, "<f4").tobytes()
        if self.request.topk_prompt_logprobs:
            likeliest = [self.prompt.get(place, (math.nan, ()))[1] for place in places]
            _fill(message.topk_prompt_logprobs, likeliest, self.request.topk_prompt_logprobs)
        return message.SerializeToString()


def _fill(message: pb.TopkLogprobs, rows: Sequence[Sequence[tuple[int, float]]], k: int) -> None:
    """The likeliest tokens of each place; where there are none, token 0 with the log-probability
    that the client's package takes for none.
    """
    ids = np.zeros((len(rows), k), "<i4")
    logprobs = np.full((len(rows), k), NO_LOGPROB, "<f4")
    for row, pairs in enumerate(rows):
        for column, (token, logprob) in enumerate(list(pairs)[:k]):
            ids[row, column], logprobs[row, column] = token, logprob
    message.k, message.length = k, len(rows)
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()
