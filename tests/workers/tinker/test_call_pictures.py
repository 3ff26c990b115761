"""Images in a client's training loop: losses and log-probabilities are those of the published class
with pixels, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ft_service.data.sample_kinds import Picture
from ft_service.data.tokens.image_processor import ImageProcessor
from ft_service.data.tokens.tokenize import load_tokenizer
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import OutcomeKind
from ft_service.tinker import tinker_messages_pb2 as pb
from tests.support.image_bases import drawn, encoded
from tests.support.training.attempts import adapter, run_attempt
from tests.support.training.checks import published_model
from tests.support.training.commands import Script, loop_spec
from tests.support.training.models import save_chat_base
from tests.support.training.pictures import alike, save_whole_base
from workers.images.computing import FOLDER
from workers.images.tower import asked

PICTURES = [encoded(drawn(70, 50)), encoded(drawn(40, 90, seed=3), "JPEG")]
CUT = encoded(drawn(200, 200), "JPEG")[:600]
Chunks = Sequence[list[int] | bytes]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whole_base("qwen 3 vl", tmp_path_factory.mktemp("base"))


def standing(base: Path, data: bytes) -> list[int]:
    text = ImageProcessor.of(str(base)).replacement(Picture.of(data))
    tokenizer: Any = load_tokenizer(str(base))
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def ids_of(base: Path, chunks: Chunks) -> list[int]:
    return [
        token
        for own in chunks
        for token in (standing(base, own) if isinstance(own, bytes) else own)
    ]


def add_datum(message: pb.ForwardBackwardRequest, base: Path, chunks: Chunks) -> None:
    """Only the last five tokens count."""
    datum = message.data.add()
    for own in chunks:
        chunk = datum.model_input.add()
        if isinstance(own, bytes):
            chunk.image.data = own
            chunk.image.format = "png"
            chunk.image.expected_tokens = len(standing(base, own))
        else:
            chunk.encoded_text.tokens = np.asarray(own, "<i4").tobytes()
    ids = np.asarray(ids_of(base, chunks))
    targets = np.append(ids[1:], 9)
    weights = (np.arange(len(ids)) >= len(ids) - 5).astype("<f4")
    for name, array, kind in (
        ("target_tokens", targets.astype("<i8"), pb.DTYPE_INT64),
        ("weights", weights, pb.DTYPE_FLOAT32),
    ):
        tensor = datum.loss_fn_inputs[name]
        tensor.dense = array.tobytes()
        tensor.dtype = kind
        tensor.shape.extend(array.shape)


DATA: list[Chunks] = [
    [[5, 6, 7], PICTURES[0], [8, 9, 10, 11, 12, 13]],
    [[5, 9, 7, 8, 12, 11, 10]],
    [PICTURES[0], [6, 7], PICTURES[1], [9, 10, 11, 12, 7, 6]],
]


def call(seq: int, base: Path, *, forward_only: bool) -> bytes:
    message = pb.ForwardBackwardRequest(
        model_id="model", seq_id=seq, loss_fn="cross_entropy", forward_only=forward_only
    )
    for chunks in DATA:
        add_datum(message, base, chunks)
    return message.SerializeToString()


def trained(folder: Path, base: Path, ranks: int) -> tuple[RunDir, Script, list[int]]:
    run = RunDir(folder)
    options: dict[str, Any] = {
        "lora": {"r": 4},
        "precision": {"default": "bf16", "compute": "fp32"},
    }
    run.write("spec.json", loop_spec(base, ranks=ranks, **options))
    script = Script(run)
    first = script.add("forward_backward", body=call(1, base, forward_only=False))
    script.step()
    script.add("save_weights_for_sampler", {"name": "own", "path": "p"})
    message = pb.ForwardBackwardRequest(model_id="model", seq_id=4, loss_fn="cross_entropy")
    add_datum(message, base, DATA[0])
    message.data[0].model_input[1].image.expected_tokens += 1
    add_datum(message, base, DATA[0])
    wrong = script.add("forward_backward", body=message.SerializeToString())
    del message.data[0]
    message.data[0].model_input[1].image.data = CUT
    damaged = script.add("forward_backward", body=message.SerializeToString())
    second = script.add("forward_backward", body=call(6, base, forward_only=True))
    script.add("finish")
    assert run_attempt(run, 1, ranks).kind is OutcomeKind.SUCCEEDED
    return run, script, [first, wrong, damaged, second]


def by_published(base: Path, chunks: Chunks) -> np.ndarray:
    """Log-probabilities of the next tokens, with pixels."""
    model: Any = published_model(base, torch.float32).eval()
    processor = ImageProcessor.of(str(base))
    seen = [processor.inputs(Picture.of(own)) for own in chunks if isinstance(own, bytes)]
    pixels = {
        name: torch.from_numpy(np.concatenate(alike([own[name] for own in seen])))
        for name in (seen[0] if seen else ())
    }
    ids = torch.tensor([ids_of(base, chunks)])
    with torch.no_grad():
        told = asked(model, ids, ids == processor.token_id)
        logs = model(input_ids=ids, use_cache=False, **told, **pixels).logits[0].log_softmax(-1)
    targets = torch.tensor([*ids[0, 1:].tolist(), 9])
    return logs.gather(1, targets[:, None])[:, 0].numpy()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loop_shows_images(ranks: int, base: Path, tmp_path: Path) -> None:
    run, script, [first, wrong, damaged, second] = trained(tmp_path / "run", base, ranks)
    loss, logprobs = script.output(first)
    expected = [by_published(base, chunks) for chunks in DATA]
    for found, theirs in zip(logprobs, expected, strict=True):
        assert found == pytest.approx(theirs, abs=2e-5)
    assert loss == pytest.approx(-sum(float(own[-5:].sum()) for own in expected), rel=1e-5)
    after, _ = script.output(second)
    assert after < loss, "the step has learned"
    assert adapter(run)
    assert not run.path(FOLDER).exists(), "features are removed at the end"
    count = len(standing(base, PICTURES[0]))
    for seq, text in (
        (wrong, f"data.0.model_input.1: expected_tokens = {count + 1}, and the base's"),
        (damaged, "data.0.model_input.1: the image cannot be decoded"),
    ):
        result = script.log.result(seq)
        assert result is not None
        assert text in result.document["error"]


def test_a_base_that_sees_none_says_so(tmp_path: Path) -> None:
    base = save_chat_base(tmp_path / "base")
    run = RunDir(tmp_path / "run")
    run.write("spec.json", loop_spec(base, lora={"r": 4}, precision={"compute": "fp32"}))
    script = Script(run)
    message = pb.ForwardBackwardRequest(model_id="model", seq_id=1, loss_fn="cross_entropy")
    message.data.add().model_input.add().image.data = PICTURES[0]
    shown = script.add("forward_backward", body=message.SerializeToString())
    script.add("finish")
    assert run_attempt(run, 1, 1).kind is OutcomeKind.SUCCEEDED
    result = script.log.result(shown)
    assert result is not None
    assert "The base does not learn from images here" in result.document["error"]
