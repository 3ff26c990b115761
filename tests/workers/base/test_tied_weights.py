"""Weights that config.json ties, and files hold twice or under either name, load as transformers
loads them or are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ft_service.bases.cache_folder import Cache
from ft_service.errors import SpecError
from ft_service.spec import JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.loading import CPU, Outcome, load_on_rank, whole
from tests.support.training.models import save_tiny_llama, spec_for
from workers.base import frozen_weights
from workers.base.base_tensors import Safetensors
from workers.base.load import load
from workers.describe import describe
from workers.model.build import build

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def save_tied(
    folder: Path, head: Callable[[Tensor], Tensor], *, without_embedding: bool = False
) -> tuple[Path, Tensor]:
    """A tied Llama whose files hold a head made of its embedding; and its embedding."""
    base = save_tiny_llama(folder / "base", tie_word_embeddings=True)
    held = load_file(base / "model.safetensors")
    assert HEAD not in held
    embedding = held[EMBEDDING]
    held[HEAD] = head(embedding).contiguous()
    if without_embedding:
        del held[EMBEDDING]
    save_file(held, base / "model.safetensors", metadata={"format": "pt"})
    return base, embedding


def change_last_row(weight: Tensor) -> Tensor:
    changed = weight.clone()
    changed[-1, -1] += 1.0
    return changed


def outcome_or_refusal(
    rank: int, world: int, spec: JobSpec, cache: Cache | None = None
) -> Outcome | str:
    try:
        return load_on_rank(rank, world, spec, cache)
    except SpecError as error:
        return error.message


@pytest.mark.parametrize(
    ("head", "without_embedding"),
    [
        pytest.param(torch.clone, False, id="equal copies"),
        pytest.param(Tensor.float, False, id="equal in what they are stored in"),
        pytest.param(torch.clone, True, id="the head alone"),
    ],
)
def test_files_may_hold_a_tied_weight_twice_or_under_either_name(
    head: Callable[[Tensor], Tensor], without_embedding: bool, tmp_path: Path
) -> None:
    base, embedding = save_tied(tmp_path, head, without_embedding=without_embedding)
    stock: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    assert stock.lm_head.weight is stock.model.embed_tokens.weight
    assert torch.equal(stock.lm_head.weight, embedding)
    for world in (1, 2):
        outcomes = run_on_ranks(load_on_rank, world, spec_for(base, ranks=world))
        assert HEAD not in outcomes[0].values, "one parameter"
        assert torch.equal(whole(outcomes, EMBEDDING), embedding.float())
    (described,) = [weight for weight in describe(str(base)).weights if weight.kind == "embedding"]
    assert described.name == EMBEDDING
    assert described.files == (HEAD if without_embedding else EMBEDDING)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_tied_weights_that_differ_are_refused_on_all_ranks(world: int, tmp_path: Path) -> None:
    """They differ in a row of the last rank. transformers does not tie them."""
    base, embedding = save_tied(tmp_path, change_last_row)
    stock: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    assert not torch.equal(stock.lm_head.weight, stock.model.embed_tokens.weight)
    cache = Cache(tmp_path / "cache")
    spec = spec_for(base, ranks=world, precision={"default": "nf4"})
    refused = (
        "The base's config.json ties lm_head.weight to model.embed_tokens.weight, but its files "
        "hold two different ones: set "
        "tie_word_embeddings to false in config.json."
    )
    assert run_on_ranks(outcome_or_refusal, world, spec, cache) == [refused] * world
    assert run_on_ranks(outcome_or_refusal, world, spec, cache) == [refused] * world, (
        "the cache does not hold it"
    )
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    outcomes = run_on_ranks(load_on_rank, world, spec, cache)
    assert torch.equal(whole(outcomes, EMBEDDING), embedding.float())
    assert torch.equal(whole(outcomes, HEAD), stock.lm_head.weight.float())


def test_the_rows_of_tied_weights_are_compared_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A difference in the last chunk is found, and no more than a chunk is read at once."""
    monkeypatch.setitem(frozen_weights.CHUNK_ELEMENTS, "cpu", 100 * 64)
    read: list[tuple[str, int, int]] = []
    rows_of_files = Safetensors.rows

    def recording(
        self: Safetensors, name: str, start: int, end: int, *rest: Any, **options: Any
    ) -> Tensor:
        read.append((name, start, end))
        return rows_of_files(self, name, start, end, *rest, **options)

    monkeypatch.setattr(Safetensors, "rows", recording)
    base, _ = save_tied(tmp_path, change_last_row)
    model = build(spec_for(base), CPU).peft_model
    with pytest.raises(SpecError, match="two different ones"):
        load(model, base, seed=0, compute_dtype=torch.bfloat16, device=CPU)
    assert [span for name, *span in read if name == HEAD] == [[0, 100], [100, 200], [200, 256]]
    assert {name for name, *_ in read} == {EMBEDDING, HEAD}
