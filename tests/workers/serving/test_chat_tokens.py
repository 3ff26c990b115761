"""Chat templates of bases and of jobs, as the preview uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from ft_service.data.tokens.tokenize import load_tokenizer
from ft_service.errors import SpecError
from ft_service.host import processes
from ft_service.spec.templates import TEMPLATES
from tests.support.bases import SAMPLE
from workers.serving import chat_tokens as chat_module
from workers.serving.chat_tokens import Chats, ChatTokenizer, PlainTokenizer


@pytest.fixture(scope="module")
def chats() -> Chats:
    return Chats(str(SAMPLE))


@pytest.fixture(scope="module")
def chat(chats: Chats) -> ChatTokenizer:
    return chats.of(None)


def test_ends_are_what_the_template_writes_behind_an_answer(chat: ChatTokenizer) -> None:
    assert chat.ends == {chat.tokenizer.eos_token_id}


def test_a_tuned_model_is_talked_to_by_the_template_of_its_job(tmp_path: Path) -> None:
    """Which the base need not have: a prompt that was never seen in training is answered by no
    training.
    """
    base = tmp_path / "base"
    adapter = tmp_path / "adapter"
    plain = tmp_path / "plain"
    for folder in (base, adapter, plain):
        folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).write_bytes((SAMPLE / name).read_bytes())
    (adapter / "chat_template.jinja").write_text(TEMPLATES["zephyr"])
    chats = Chats(str(base))
    asked = [{"role": "user", "content": "2+2?"}]
    tuned = chats.of(str(adapter))
    assert (
        tuned.prompt(asked, []).result().text
        == f"<|user|>\n2+2?{tuned.tokenizer.eos_token}\n<|assistant|>\n"
    )
    assert chats.of(str(adapter)) is tuned, "compiled once"
    pid = tuned._process.pid
    assert pid is not None
    process = processes.of(pid)
    for number in range(chat_module._TEMPLATES):
        other = tmp_path / f"other {number}"
        other.mkdir()
        (other / "chat_template.jinja").write_text(f"{{{{ messages[0].content }}}} {number}")
        chats.of(str(other))
    del tuned
    assert not processes.is_alive(process), "only those that were used last are kept"
    for without in (None, str(plain)):
        with pytest.raises(SpecError, match="has no chat template"):
            chats.of(without)


def test_a_text_goes_on_with_what_was_drawn_behind_the_token_that_begins_texts() -> None:
    tokenizer: Any = load_tokenizer(str(SAMPLE))
    begin = tokenizer.eos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.eos_token} $A", special_tokens=[(tokenizer.eos_token, begin)]
    )
    plain = PlainTokenizer(tokenizer, frozenset())
    # "4" and "2" are other tokens than "42" would be, and the text begins with the former.
    drawn = [own for piece in ("4", "2") for own in tokenizer.encode(piece)[1:]]
    seen = [*plain.tokens("6 * 7 = "), *drawn]
    assert seen[0] == begin
    text = "6 * 7 = 42, and"
    assert plain.tokens(text, [seen]) == [*seen, *tokenizer.encode(", and")[1:]]
    written = tokenizer.decode(seen) + ", and"
    assert written == f"{tokenizer.eos_token}{text}"
    assert plain.tokens(written, [seen], special=False) == plain.tokens(text, [seen])
    assert plain.tokens(text, [[*seen[1:]]]) == tokenizer.encode(text), "it begins otherwise"
