from __future__ import annotations

from pathlib import Path

from ft_service.bases.description import Described, Refusal
from ft_service.control.bases.base_facts import base_facts
from tests.support.bases import save_base
from tests.support.describing import VERSIONS, small_document


def test_the_facts_are_those_of_the_description(tmp_path: Path) -> None:
    facts = base_facts(save_base(tmp_path), small_document(tmp_path))
    assert (facts.family, facts.parameters, facts.format, facts.context) == (
        "llama",
        1024 * 64 + 64 * 64,
        "bf16",
        128,
    )
    assert (facts.described, facts.trainable, facts.why_not, facts.chat_template) == (
        True,
        True,
        None,
        True,
    )


def test_a_base_that_is_not_described_yet_may_be_tuned_or_not(tmp_path: Path) -> None:
    facts = base_facts(save_base(tmp_path), None)
    assert (facts.described, facts.trainable, facts.why_not) == (False, None, None)
    assert facts.chat_template


def test_a_refused_base_says_why(tmp_path: Path) -> None:
    save_base(tmp_path)
    facts = base_facts(
        tmp_path, Described("", VERSIONS, refused=Refusal("It is no decoder.", model_type="bert"))
    )
    assert (facts.described, facts.trainable, facts.why_not, facts.family) == (
        True,
        False,
        "It is no decoder.",
        "bert",
    )


def test_the_tokenizer_of_another_base_is_seen_although_the_description_does_not_depend_on_it(
    tmp_path: Path,
) -> None:
    save_base(tmp_path)
    assert base_facts(tmp_path, small_document(tmp_path)).trainable
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 5000}}}')
    assert "token ids up to 5000" in str(base_facts(tmp_path, small_document(tmp_path)).why_not)


def test_a_base_whose_weights_are_pickled_says_why_it_cannot_be_tuned(tmp_path: Path) -> None:
    save_base(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    facts = base_facts(tmp_path, None)
    assert facts.trainable is False
    assert (
        facts.why_not
        == "It has no weights in safetensors, only pytorch_model.bin, which is pickled and never "
        "read."
    )
