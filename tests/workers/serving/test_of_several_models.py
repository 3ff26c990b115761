"""The preview of a base of several models: its text part answers as the published class does, in
fp32.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ft_service.errors import SpecError
from ft_service.spec import PrecisionOptions
from tests.support.training.checks import published_model
from tests.support.training.composites import save_composite
from workers.serving.cached_attention import KeyValueCache, Span
from workers.serving.model import ServedModel, TokenSpan

FP32 = PrecisionOptions(compute="fp32")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["mllama", "phi4_multimodal", "qwen2_5_omni", "git"])
def test_the_text_part_answers_token_by_token_as_the_published_class(
    kind: str, tmp_path: Path
) -> None:
    """Layers for images that are not asked, parts inside the decoder, a model in a model, attention
    of its own.
    """
    assert save_composite(kind, tmp_path)
    served = ServedModel(str(tmp_path), FP32, torch.device("cpu"), None)
    ids = list(range(5, 17))
    memory = KeyValueCache()
    with torch.no_grad():
        expected = (
            published_model(tmp_path)
            .eval()(input_ids=torch.tensor([ids]), use_cache=False)
            .logits[0, 7:]
        )
    answers = [served.forward([TokenSpan(ids[:8], Span(memory, 0, 8), 0, None)])]
    answers += [
        served.forward([TokenSpan(ids[n : n + 1], Span(memory, 0, 1), n, None)])
        for n in range(8, 12)
    ]
    torch.testing.assert_close(torch.cat(answers), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_would_answer_otherwise_is_refused_by_name(tmp_path: Path) -> None:
    assert save_composite("nemotron_h_omni", tmp_path)
    with pytest.raises(SpecError, match="nemotron_h model, whose answers token by token are not"):
        ServedModel(str(tmp_path), FP32, torch.device("cpu"), None)
