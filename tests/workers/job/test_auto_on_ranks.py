"""What ranks choose, who each measure their own processor: the same on all, and nothing that
results depend on.
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.host.processor import Products, processor_kind
from ft_service.plan.auto_options import is_settled
from ft_service.spec import JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.models import save_tiny, spec_for
from workers.describe import describe
from workers.job import auto_on_ranks
from workers.job.auto_on_ranks import settle_on_ranks


def settled(rank: int, _world: int, spec: JobSpec) -> JobSpec:
    slow = Products(processor_kind(), 1e11, 2e10 + 1e9 * rank, by_onednn=True)
    data = TokenSet.of([Tokens(np.arange(12, dtype=np.int32), np.ones(12, dtype=bool))] * 8)
    with patch.object(auto_on_ranks, "products", lambda: slow):
        return settle_on_ranks(spec, torch.device("cpu"), data, describe).spec


def test_ranks_on_a_processor_that_is_slow_in_bf16_train_in_it_where_the_job_was_created_so(
    tmp_path: Path,
) -> None:
    distributed = {"activation_checkpointing": "auto", "compile": "auto"}
    spec = spec_for(save_tiny("llama", tmp_path), ranks=2, distributed=distributed)
    spec = spec.model_copy(update={"precision": type(spec.precision)()})
    assert "compute" not in spec.precision.model_fields_set
    first, second = run_on_ranks(settled, 2, spec)
    assert first == second
    assert first.precision.compute == "bf16"
    assert is_settled(first)
