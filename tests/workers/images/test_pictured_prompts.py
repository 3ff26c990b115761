"""Answers of a job to prompts with images: those of the published class with pixels."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ft_service.data.tokens.image_processor import ImageProcessor
from ft_service.data.tokens.tokenize import load_dataset, load_tokenizer
from ft_service.errors import DataError
from ft_service.rundir.directory import RunDir
from ft_service.rundir.evaluations import evaluated_steps, read_evaluation
from ft_service.spec import JobSpec
from ft_service.spec.evaluation import EvaluationOptions, read_prompts
from tests.support.image_bases import drawn, encoded, image_part, text_part
from tests.support.training.attempts import messages, trained
from tests.support.training.checks import published_model
from tests.support.training.models import spec_for
from tests.support.training.pictures import save_pictured_chats, save_whole_base
from workers.images.tower import asked
from workers.training.evaluation_prompts import asked_of, pictured_prompts

NEW = 5
PICTURES = [encoded(drawn(70, 50)), encoded(drawn(40, 90, seed=3))]


def asking(*content: Any, reference: str = "7") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}], "reference": reference}


PROMPTS = [
    asking(text_part("Read "), *map(image_part, PICTURES), text_part(" say")),
    {"messages": [{"role": "user", "content": "none"}], "reference": "8"},
    asking(image_part(PICTURES[0], detail="low")),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whole_base("qwen 3 vl", tmp_path_factory.mktemp("base"))


def job(base: Path, folder: Path, prompts: Any, **options: Any) -> JobSpec:
    data = save_pictured_chats(folder / "chats.jsonl", 8)
    return spec_for(
        base,
        data,
        precision={"default": "bf16", "compute": "fp32"},
        training={"max_steps": 1, "batch_size": 4, "learning_rate": 1e-4},
        lora={"r": 2},
        evaluation={"prompts": prompts, "max_new_tokens": NEW},
        **options,
    )


def by_published(base: Path, spec: JobSpec, prompts: Any) -> list[str]:
    """What the published class answers, greedily and without a cache."""
    tokenizer: Any = load_tokenizer(str(base))
    model: Any = published_model(base, torch.float32).eval()
    processor = ImageProcessor.of(str(base))
    said = []
    questions = asked_of(spec, prompts, tokenizer)
    for question in questions.questions:
        pixels = [processor.inputs(use.picture) for use in question.images]
        joined = {
            name: torch.cat([torch.from_numpy(own[name]) for own in pixels])
            for name in (pixels[0] if pixels else ())
        }
        ids = torch.from_numpy(question.ids.astype("int64"))[None]
        begin = ids.shape[1]
        with torch.no_grad():
            while ids.shape[1] < begin + NEW:
                told = asked(model, ids, ids == processor.token_id)
                logits = model(input_ids=ids, use_cache=False, **told, **joined).logits
                token = logits[0, -1].argmax()
                if int(token) in questions.ends:
                    break
                ids = torch.cat([ids, token.reshape(1, 1)], dim=1)
        answer = question.read(ids[0, begin:].tolist(), tokenizer, questions.answers)
        said.append(answer.whole)
    return said


def evaluation(run: RunDir) -> Any:
    found = read_evaluation(run, evaluated_steps(run)[0])
    assert found is not None
    return found


def test_own_prompts_show_their_images(base: Path, tmp_path: Path) -> None:
    spec = job(base, tmp_path, PROMPTS)
    run = trained(spec, tmp_path / "run", 1)
    found = evaluation(run)
    assert [own.base for own in found.samples] == by_published(base, spec, [])
    assert found.samples[0].messages == [
        {"role": "user", "content": "Read [image][image] say"},
    ]
    assert "[image]" in found.samples[2].prompt
    looked = [text for text in messages(run) if "looked at" in text]
    # 8 of the chats, of which a prompt has one; another one, and that in little detail
    assert [text.split(" in ")[0] for text in looked] == [
        "The base's tower has looked at 10 images"
    ]
    assert any(
        "Compared with the base alone" in text or "forgets" in text for text in messages(run)
    )


@pytest.mark.slow  # own prompts are asked in the same way
def test_samples_are_asked_with_their_images(base: Path, tmp_path: Path) -> None:
    spec = job(base, tmp_path, 4)
    run = trained(spec, tmp_path / "run", 2)
    assert spec.training_data is not None
    samples = load_dataset(load_tokenizer(str(base)), spec.training_data, 1000)
    found = evaluation(run)
    assert [own.base for own in found.samples] == by_published(base, spec, list(samples[:4]))
    assert [own.prompt.count("[image]") for own in found.samples] == [2, 1, 1, 0]
    assert found.samples[0].reference == "it is 0"


def test_a_damaged_image_of_a_prompt_is_told(base: Path, tmp_path: Path) -> None:
    cut = image_part(encoded(drawn(200, 200), "JPEG")[:600])
    with pytest.raises(
        DataError, match=r"prompt 2: messages.0.content.0.image_url: cannot be deco"
    ):
        pictured_prompts(job(base, tmp_path, [PROMPTS[0], asking(cut)]))
    assert not len(pictured_prompts(job(base, tmp_path, PROMPTS[1:2])))


@pytest.mark.parametrize(
    ("message", "place", "reason"),
    [
        (
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}],
            },
            "content",
            "is a data: URL",
        ),
        ({"role": "system", "content": [image_part(PICTURES[0])]}, "messages", "role user"),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            "content",
            "input_audio",
        ),
    ],
)
def test_other_parts_are_refused_by_name(message: dict[str, Any], place: str, reason: str) -> None:
    line = json.dumps({"messages": [message]})
    with pytest.raises(ValueError, match=reason) as refusal:
        read_prompts(line, "prompts.jsonl")
    assert "prompts.jsonl, line 1" in str(refusal.value)
    assert place in str(refusal.value)


def test_images_beyond_what_a_spec_holds_are_refused() -> None:
    url = "data:image/png;base64," + base64.b64encode(b"x" * 200_000).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(ValueError, match="samples of the data files"):
        EvaluationOptions.model_validate({"prompts": [asking(part)]})
