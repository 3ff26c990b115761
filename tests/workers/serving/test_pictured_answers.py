"""Answers to chats with pictures are those of the published class with pixels, in fp32."""

from __future__ import annotations

import base64
import inspect
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from ft_service.bases.description import ImageFacts
from ft_service.data import image_process, template_process
from ft_service.data.chat_line import parse_conversation
from ft_service.data.image_part import as_json
from ft_service.data.image_process import SeenPicture, SeenPictures
from ft_service.data.sample_kinds import Picture
from ft_service.data.token_options import PixelBounds
from ft_service.data.tokens.base_tokenizer import load_tokenizer
from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.data.tokens.image_processor import ImageProcessor
from ft_service.errors import UnavailableError
from ft_service.host.helper_process import LATER_SECONDS, Failure, HelperFailed, Program
from ft_service.serving.preview_process import _error
from ft_service.spec import PrecisionOptions
from ft_service.tinker.sample_calls import SampleRequest, parse_sample_request
from tests.support.image_bases import drawn, encoded, image_part, text_part
from tests.support.training.checks import published_model
from tests.support.training.pictures import TWO_WAY, alike, save_whole_base
from workers.images.tower import asked
from workers.serving import engine as engine_module
from workers.serving import model as model_module
from workers.serving.chat_tokens import Chats
from workers.serving.engine import Engine
from workers.serving.model import ServedModel
from workers.serving.requests import ChatRequest, TokenRequest

FAMILIES = {
    "qwen 2.5 vl": 0,
    "qwen 3 vl": 2,
    "llava 1.5": 0,
    "mistral small 3.1": 0,
    "internvl 3": 0,
    "gemma 3": 0,
    "gemma 4": 0,
}
"""Family → decoder layers that get features of their own."""
MORE = ("llava 1.5", "internvl 3", "gemma 4")
"""Those of which `make test` knows enough by the others."""
LIMIT = 6
DAY = date(2026, 3, 2)
FP32 = PrecisionOptions(compute="fp32")
SIZES = [(70, 50), (40, 90)]


def look_here(
    self: image_process.ImageProcess,
    pictures: Sequence[Picture],
    places: Sequence[str],
    bounds: PixelBounds,
) -> SeenPictures:
    """`ImageProcess.look` without a process."""
    processor = ImageProcessor.of(self._begin["path"], bounds)
    seen = [(own.key, *processor.looked_at(own)) for own in pictures]
    return SeenPictures(
        processor.image_token, [SeenPicture(key, text, inputs) for key, inputs, text in seen]
    )


def chunk_of(given: list[int] | bytes | dict[str, Any]) -> dict[str, Any]:
    if isinstance(given, bytes):
        return {"type": "image", "data": base64.b64encode(given).decode(), "format": "png"}
    return {"type": "encoded_text", "tokens": given} if isinstance(given, list) else given


def write_here(self: template_process.TemplateProcess, *given: Any, **options: Any) -> str:
    """`TemplateProcess.write` without a process."""
    template = ChatTemplate(self._begin["sources"], self._begin["special_tokens"])
    return template.write(*given, **options)


class Asked:
    """A base that answers, and what it says."""

    def __init__(
        self, path: str, early: int, tower_weights: int = 0, two_way: tuple[str, ...] = ()
    ) -> None:
        self.facts = ImageFacts(ImageProcessor.of(path).token_id, early, tower_weights, two_way)
        self.parts: list[dict[str, Any]] = []
        self.served = ServedModel(path, FP32, torch.device("cpu"), None)
        self.engine = Engine(self.served, Chats(path), self.parts.append)

    def ask(self, name: str, content: Any, **options: Any) -> None:
        messages, _, images = parse_conversation([{"role": "user", "content": content}], [])
        shown = {
            "facts": asdict(self.facts),
            "pictures": [
                {**as_json(own), "place": place}
                for own, place in zip(images.pictures, images.places, strict=True)
            ],
        }
        more = {"images": shown} if images.pictures else {}
        options = {"temperature": 0.0, "max_tokens": LIMIT, "top_logprobs": 1, **options}
        self.engine.add(ChatRequest(name, messages, **more, **options))

    def ask_tokens(self, name: str, chunks: Sequence[Any], **options: Any) -> None:
        """A prompt of tokens with encoded pictures between."""
        request = SampleRequest.model_validate(
            {
                "prompt": {"chunks": [chunk_of(own) for own in chunks]},
                "sampling_params": {"max_tokens": LIMIT, "temperature": 0.0, "stop": []},
                **options,
            }
        )
        order = parse_sample_request(request.model_dump()).order(None, self.facts)
        del order["op"]
        self.engine.add_tokens(TokenRequest(name, **order))

    def run(self) -> None:
        while self.engine.busy:
            self.engine.step()

    def logprobs(self, name: str, index: int = 0) -> list[float]:
        return [
            entry["logprob"]
            for part in self.parts
            if part["id"] == name and part["kind"] == "text" and part["index"] == index
            for entry in part["logprobs"]
        ]

    def ends(self, name: str, index: int) -> bool:
        """Whether an answer has ended by itself."""
        return any(
            own["reason"] == "stop"
            for own in self.parts
            if own["id"] == name and own["kind"] == "end" and own["index"] == index
        )

    def one(self, name: str, kind: str) -> dict[str, Any]:
        (part,) = [own for own in self.parts if own["id"] == name and own["kind"] == kind]
        return part


def prompt_with_pixels(path: str, content: list[Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Tokens of a prompt, int64 [1, length], and what its pictures become, by the published
    processor.
    """
    tokenizer: Any = load_tokenizer(path)
    processor = ImageProcessor.of(path)
    messages, _, images = parse_conversation([{"role": "user", "content": content}], [])
    template = ChatTemplate.of(tokenizer)
    assert template is not None
    pieces = template.write(messages, None, DAY, prompt=True, images=True).split(
        processor.image_token
    )
    seen = [processor.looked_at(picture) for picture in images.pictures]
    text = pieces[0] + "".join(
        own + piece for (_, own), piece in zip(seen, pieces[1:], strict=True)
    )
    ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
    return ids, {
        name: torch.from_numpy(np.concatenate(alike([inputs[name] for inputs, _ in seen])))
        for name in seen[0][0]
    }


def generated(model: Any, path: str, content: list[Any]) -> tuple[list[float], int]:
    """Log-probabilities of a model's greedy answer, and tokens of the prompt."""
    ids, pixels = prompt_with_pixels(path, content)
    published = model.get_base_model() if isinstance(model, PeftModel) else model
    known = inspect.signature(type(published).forward).parameters
    out = model.generate(
        input_ids=ids,
        **asked(published, ids, ids == ImageProcessor.of(path).token_id),
        **{name: own for name, own in pixels.items() if name in known},
        max_new_tokens=LIMIT,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    logs = torch.stack(out.logits)[:, 0].float().log_softmax(dim=-1)
    return logs.max(dim=-1).values.tolist(), ids.shape[1]


def save_adapter(model: Any, folder: Path) -> Any:
    """A random adapter of the decoder's attention, in PEFT's layout, and the model with it."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=r".*language_model.*\.(q|v)_proj")
    tuned: Any = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in (own for own in tuned.parameters() if own.requires_grad):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    tuned.save_pretrained(folder)
    return tuned.eval()


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """No processes."""
    monkeypatch.setattr(image_process.ImageProcess, "look", look_here)
    monkeypatch.setattr(template_process.TemplateProcess, "write", write_here)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family",
    [pytest.param(own, marks=[pytest.mark.slow] if own in MORE else []) for own in FAMILIES],
)
def test_greedy_answers_are_those_of_generate_with_pixels_beside_text(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an adapter and without, in one row, of which parts end within a picture."""
    monkeypatch.setattr(engine_module, "PROMPT_TOKENS", 11)
    path = str(save_whole_base(family, tmp_path / "base"))
    model: Any = published_model(Path(path)).eval()
    pictures = [image_part(encoded(drawn(*size, seed=3))) for size in SIZES]
    content = [text_part("what"), pictures[0], text_part("and"), pictures[1], text_part("say")]
    expected, length = generated(model, path, content)
    tuned = save_adapter(model, tmp_path / "adapter")
    expected_tuned, _ = generated(tuned, path, content)
    assert expected_tuned != pytest.approx(expected, abs=1e-2)

    base = Asked(path, FAMILIES[family], two_way=TWO_WAY.get(family, ()))
    base.ask("alone", "hello there, who is it?")
    base.run()
    base.ask("text", "hello there, who is it?")
    base.ask("seen", content, n=2)
    base.ask("tuned", content, adapter=str(tmp_path / "adapter"))
    base.run()
    for name, theirs in (("seen", expected), ("tuned", expected_tuned)):
        for index in range(2 if name == "seen" else 1):
            told = base.logprobs(name, index)
            assert told == pytest.approx(theirs[: len(told)], abs=1e-4)
            assert base.ends(name, index) or len(told) == LIMIT
        assert base.one(name, "begun")["prompt_tokens"] == length
    assert base.logprobs("text") == pytest.approx(base.logprobs("alone"), abs=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_prompts_of_tokens_show_pictures_as_chats_do(tmp_path: Path) -> None:
    """As Tinker's clients send them, and with the log-probabilities of the prompt."""
    path = str(save_whole_base("qwen 3 vl", tmp_path / "base"))
    model: Any = published_model(Path(path)).eval()
    pictures = [encoded(drawn(*size, seed=3)) for size in SIZES]
    content = [text_part("what"), image_part(pictures[0]), image_part(pictures[1])]
    expected, length = generated(model, path, content)
    ids, pixels = prompt_with_pixels(path, content)
    token = ImageProcessor.of(path).token_id
    row, held = ids[0].tolist(), (ids[0] == token).tolist()
    starts = [at for at, own in enumerate(held) if own and not held[at - 1]]
    ends = [at + 1 for at, own in enumerate(held) if own and not held[at + 1]]
    counts = [end - start for start, end in zip(starts, ends, strict=True)]

    def told(data: bytes, count: int) -> dict[str, Any]:
        return {**chunk_of(data), "expected_tokens": count}

    first, second = pictures
    texts = [row[: starts[0]], row[ends[0] : starts[1]], row[ends[1] :]]
    known = [texts[0], told(first, counts[0]), texts[1], told(second, counts[1]), texts[2]]
    base = Asked(path, FAMILIES["qwen 3 vl"])
    base.ask_tokens("bare", [texts[0], first, texts[1], second, texts[2]])
    base.ask_tokens("scored", known, prompt_logprobs=True)
    base.ask_tokens("wrong", [texts[0], told(first, counts[0] + 1), texts[1]])
    base.ask("chat", content)
    base.run()
    for name in ("bare", "scored"):
        parts = [own for own in base.parts if own["id"] == name and own["kind"] == "tokens"]
        logprobs = [log for own in parts for log in own["logprobs"]]
        assert logprobs == pytest.approx(expected, abs=1e-4)
        assert base.one(name, "begun")["prompt_tokens"] == length
    with torch.no_grad():
        published = model(input_ids=ids, **asked(model, ids, ids == token), **pixels).logits
    logs = published[0, :-1].float().log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    scores = [own for own in base.parts if own["id"] == "scored" and own["kind"] == "scores"]
    found = {own["place"] + at: log for own in scores for at, log in enumerate(own["logprobs"])}
    assert [found[at] for at in range(1, length)] == pytest.approx(logs, abs=1e-4)
    error = base.one("wrong", "error")
    said = f"prompt.chunks.1: expected_tokens = {counts[0] + 1}, and the base's image processor"
    assert said in error["message"]
    assert f"makes {counts[0]}" in error["message"]


@pytest.mark.filterwarnings("ignore")
def test_a_request_that_goes_or_fails_leaves_the_others_theirs(tmp_path: Path) -> None:
    """One that is cancelled while its pictures wait, one with the base's sign in its words, one
    that is longer than the context, and one that goes on when its base is loaded again.
    """
    path = str(save_whole_base("llava 1.5", tmp_path / "base"))
    base = Asked(path, 0)
    picture = image_part(encoded(drawn(seed=4)))
    base.ask("whole", [picture, text_part("say")], project="a")
    base.run()
    base.ask("gone", [picture, text_part("say")], project="a")
    base.ask("waits", [picture, text_part("say")], project="a")
    base.ask("sign", [picture, text_part("is it <image>?")], project="b")
    base.ask("long", [picture, text_part("say" * 3000)], project="c")
    base.engine.drop("gone")
    base.engine.step()
    base.engine.park()
    base.engine.resume(base.served)
    base.run()
    assert base.logprobs("waits") == pytest.approx(base.logprobs("whole"), abs=1e-4)
    assert not base.logprobs("gone")
    assert "the base's own sign for an image" in base.one("sign", "error")["message"]
    assert base.one("long", "error")["code"] == "context_length_exceeded"
    assert base.one("sign", "error")["param"] == base.one("long", "error")["param"] == "messages"


def test_a_process_that_the_host_kills_is_later_and_not_the_pictures_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(command=("look",), limits_itself=True)
    killed = HelperFailed(program, Failure.KILLED, "was killed", exit_code=-9)
    monkeypatch.setattr(image_process.ImageProcess, "look", Mock(side_effect=killed))
    base = Asked(str(save_whole_base("llava 1.5", tmp_path / "base")), 0)
    base.ask("a", [image_part(encoded(drawn())), text_part("say")])
    base.run()
    error = _error(base.one("a", "error"))
    assert isinstance(error, UnavailableError)
    assert (error.code, error.retry_after) == ("helper_failed", LATER_SECONDS)


def test_towers_for_which_a_host_has_no_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(save_whole_base("llava 1.5", tmp_path / "base"))
    base = Asked(path, 0, tower_weights=10**9)
    monkeypatch.setattr(model_module, "available_memory", lambda: 7 * 10**9)
    base.ask("a", [image_part(encoded(drawn())), text_part("say")])
    base.run()
    error = base.one("a", "error")
    assert (error["code"], error["param"], error["wrong"]) == ("out_of_memory", "messages", True)
    assert "take 3.73 GiB" in error["message"]
