"""A base whose files changed after its job was accepted: one attempt, which says what is wrong with
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.errors import SpecError
from ft_service.rundir.attempt_outcome import Evidence, decide_exit
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Outcome, Start
from tests.support.malformed import CHANGES, join, split
from tests.support.ranks import run_on_ranks
from tests.support.training.models import save_chat_base, save_chats, save_tiny_llama, spec_for
from workers.attempt.attempt import train
from workers.attempt.prepared_model import prepare_alone
from workers.base.base_tensors import Safetensors
from workers.base.quantized_base import base_digest
from workers.output.report import Reporter
from workers.ranks.runtime import report_failure, surroundings
from workers.training.context import StopRequest
from workers.training.guards import check_ids

Change = Callable[[Path], object]


def negative(base: Path) -> None:
    """A tensor's place begins before the file does."""
    header, data = split((base / "model.safetensors").read_bytes())
    header["model.norm.weight"]["data_offsets"] = [-128, 0]
    (base / "model.safetensors").write_bytes(join(header, data))


def another_tokenizer(base: Path) -> None:
    """`i` is what all samples hold, and its token is beyond the 259 rows now."""
    path = base / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["i"] = 300
    path.write_text(json.dumps(tokenizer))


def attempt_on_rank(rank: int, world: int, root: str) -> None:
    """As `workers.train` does it: an error goes to outcome.json."""
    run = RunDir(root)
    try:
        with Reporter(run, 1, active=True) as reporter:
            runtime = surroundings(run, 1, torch.device("cpu"))
            train(runtime, reporter, StopRequest(runtime), prepare_alone)
    except Exception as error:
        report_failure(run, 1, error)


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (negative, "model_unreadable", "tensor 'model.norm.weight' has the data_offsets [-128, 0]"),
        (
            another_tokenizer,
            "vocabulary_too_small",
            "makes token 300 of the data, and the base's embedding has 259 rows",
        ),
    ],
)
def test_what_can_never_work_is_tried_once(
    tmp_path: Path, change: Change, code: str, said: str
) -> None:
    base = save_chat_base(tmp_path / "base")
    run = RunDir(tmp_path / "run")
    run.write(
        "spec.json",
        spec_for(base, save_chats(tmp_path / "train.jsonl", 4), training={"max_steps": 1}),
    )
    run.write(
        "attempts/1/start.json",
        Start(job_id="ftjob-1", attempt=1, world_size=1, generation=1, checkpoint=None),
    )
    change(base)
    run_on_ranks(attempt_on_rank, 1, str(run.root))
    ended = decide_exit(
        Evidence(outcome=run.read("attempts/1/outcome.json", Outcome), result=None, returncode=1)
    )
    assert (ended.code, ended.reason) == (64, "permanent_error"), "which is not tried again"
    assert ended.error is not None
    assert (ended.error.code, ended.error.param) == (code, "model")
    assert said in ended.error.message


def test_token_ids_are_compared_with_the_rows() -> None:
    samples = [
        Tokens(np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=bool))
        for ids in ([1, 2], [7, 3], [])
    ]
    check_ids(TokenSet.of(samples), 8)
    check_ids(TokenSet.of([]), 0)
    check_ids(TokenSet.of(samples)[:1], 3)
    check_ids(TokenSet.of(samples[1:]).cut(1)[:0], 7)
    with pytest.raises(
        SpecError, match="token 7 of the data, and the base's embedding has 7 rows, for ids up to 6"
    ):
        check_ids(TokenSet.of(samples), 7)


@pytest.mark.parametrize("look", [base_digest, lambda folder: Safetensors(folder).names()])
@pytest.mark.parametrize(
    "change", ["length 18446744073709551615", "a hole", "bytes missing", "name twice", "deep lists"]
)
def test_every_reader_of_weights_refuses_a_damaged_file(
    tmp_path: Path, change: str, look: Callable[[Path], Any]
) -> None:
    path = save_tiny_llama(tmp_path) / "model.safetensors"
    path.write_bytes(CHANGES[change](*split(path.read_bytes())))
    with pytest.raises(SpecError, match=r"The base's model\.safetensors in "):
        look(tmp_path)


def test_a_file_that_changes_between_its_header_and_its_tensors_is_refused(tmp_path: Path) -> None:
    path = save_tiny_llama(tmp_path) / "model.safetensors"
    with Safetensors(tmp_path) as checkpoint:
        rows, _ = checkpoint.shape("lm_head.weight")
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(SpecError, match="it has changed since its header was read"):
            checkpoint.rows("lm_head.weight", 0, rows)
        path.write_bytes(whole)
        assert torch.equal(
            checkpoint.rows("lm_head.weight", 0, 2), checkpoint.rows("lm_head.weight", 0, 2)
        )
