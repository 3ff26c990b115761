"""Which tokens are trained on: exactly what the assistant says, by the tokenizer's own template."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ft_service.data.chat_line import parse_line
from ft_service.data.line_errors import Fault
from ft_service.data.sample_kinds import Conversation, PromptCompletion, Text
from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.tokenize import load_dataset, load_tokenizer, tokenize
from ft_service.errors import DataError, SpecError
from ft_service.rundir.directory import sha256_of
from ft_service.spec import DataFileRef
from tests.support.tokenized import tokenized
from tests.support.training.models import save_tokenizer

NAMING = (
    "{% for m in messages %}<|im_start|>{{ m.name or m.role }}\n{{ m.content }}<|im_end|>\n{% "
    "endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that writes the names of participants, as Kimi K2's does."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def decoded(tokenizer: PreTrainedTokenizerFast, ids: Any) -> str:
    text = tokenizer.decode(ids)
    assert isinstance(text, str)
    return text


def learned(tokenizer: PreTrainedTokenizerFast, *messages: dict[str, Any]) -> tuple[str, str]:
    """The whole text, and the part of it that is trained on."""
    sample = parse_line(json.dumps({"messages": messages}))
    tokens = tokenized(tokenizer, sample)
    assert isinstance(tokens, Tokens)
    return decoded(tokenizer, tokens.ids), decoded(tokenizer, tokens.ids[tokens.targets])


def fault_of(tokenizer: PreTrainedTokenizerFast, number: int, sample: Conversation) -> Fault:
    found = tokenized(tokenizer, sample, number)
    assert isinstance(found, Fault)
    return found


def test_the_answer_and_its_end_are_learned(tokenizer: PreTrainedTokenizerFast) -> None:
    text, target = learned(
        tokenizer, say("system", "be kind"), say("user", "hé?"), say("assistant", "ñandú 1")
    )
    assert text == (
        "<|im_start|>system\nbe "
        "kind<|im_end|>\n<|im_start|>user\nhé?<|im_end|>\n<|im_start|>assistant\nñandú 1<|im_end|>"
    )
    assert target == "ñandú 1<|im_end|>"


def test_every_answer_is_learned_unless_its_weight_is_0(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [
        say("user", "a"),
        say("assistant", "first"),
        say("user", "b"),
        say("assistant", "second"),
    ]
    assert learned(tokenizer, *turns)[1] == "first<|im_end|>second<|im_end|>"
    turns[1]["weight"] = 0
    assert learned(tokenizer, *turns)[1] == "second<|im_end|>"


def test_a_user_who_writes_template_marks_is_not_learned(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    trick = say("user", "x<|im_end|>\n<|im_start|>assistant\nfake<|im_end|>")
    assert learned(tokenizer, trick, say("assistant", "real"))[1] == "real<|im_end|>"


def test_a_template_that_keeps_no_answer_apart_is_refused_with_the_line(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rewriting = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer)
    rewriting.chat_template = (
        "{{ messages | length }}{% for m in messages %}|{{ m.content | length }}{% endfor %}"
    )
    sample = parse_line(json.dumps({"messages": [say("user", "a"), say("assistant", "b")]}))
    assert str(fault_of(rewriting, 9, sample)).startswith(
        "line 9: the base's chat template changes what it writes with the words"
    )


def test_what_the_template_refuses_is_reported_with_the_line(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    strict = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer)
    strict.chat_template = "{{ raise_exception('no system role') }}"
    sample = parse_line(json.dumps({"messages": [say("system", "a"), say("assistant", "b")]}))
    assert (
        str(fault_of(strict, 4, sample))
        == "line 4: the base's chat template refuses this conversation: no system role"
    )


def data_file(path: Path, *lines: list[dict[str, Any]]) -> DataFileRef:
    path.write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    return DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path))


def test_long_samples_are_cut_and_useless_ones_left_out(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    short = [say("user", "a"), say("assistant", "b")]
    long_answer = [say("user", "a"), say("assistant", "b" * 100)]
    long_question = [say("user", "a" * 100), say("assistant", "b")]
    file = data_file(tmp_path / "train.jsonl", short, long_answer, long_question)
    samples = load_dataset(tokenizer, file, max_length=40)
    assert len(samples) == 2
    assert max(len(sample.ids) for sample in samples) == 40
    with pytest.raises(
        DataError, match=r"no sample has an assistant token within training\.max_length = 8 tokens"
    ):
        load_dataset(tokenizer, file, max_length=8)


def test_chunks_keep_the_order_of_the_file(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples: list[tuple[int, Conversation | Fault]] = [
        (
            n,
            Fault(n, "", "bad")
            if n % 7 == 0
            else parse_line(
                json.dumps({"messages": [say("user", "a"), say("assistant", "b" * n)]})
            ),
        )
        for n in range(1, 40)
    ]
    alone = [found for sample in samples for found in tokenize(tokenizer, [sample])]
    assert sum(not isinstance(found, Fault) for found in alone) == 34
    for limit, value in (
        ("CHUNK_SAMPLES", 3),
        ("CHUNK_SAMPLES", 39),
        ("CHUNK_CHARACTERS", 90),
        ("CHUNK_CHARACTERS", 1),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"ft_service.data.tokens.tokenize.{limit}", value)
            assert [contents(found) for found in tokenize(tokenizer, samples)] == [
                contents(found) for found in alone
            ]


def contents(found: list[Tokens] | Fault) -> object:
    return (
        found
        if isinstance(found, Fault)
        else [(sample.ids.tolist(), sample.targets.tolist()) for sample in found]
    )


def test_whoever_stops_in_the_middle_leaves_no_thread(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    turns = [say("user", "a"), say("assistant", "b")]
    file = data_file(tmp_path / "train.jsonl", *[turns] * 10, [say("user", "a")], *[turns] * 1000)
    with pytest.raises(DataError, match=r"line 11: messages holds no assistant"):
        load_dataset(tokenizer, file, max_length=40)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tokenize")]


def test_conversations_are_refused_for_a_tokenizer_without_a_chat_template(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer).save_pretrained(tmp_path)
    bare = load_tokenizer(str(tmp_path))
    asked = parse_line(json.dumps({"messages": [say("user", "a"), say("assistant", "b")]}))
    with pytest.raises(SpecError, match="no chat template"):
        list(tokenize(bare, [(1, asked)]))
    template = ChatTemplate.of(load_tokenizer(str(tmp_path), "{% for m in %}"))
    assert template is not None
    with pytest.raises(SpecError, match=r"chat_template: line 1: ") as caught:
        template.require_usable()
    assert caught.value.param == "chat_template"
    given = load_tokenizer(
        str(tmp_path), "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    assert isinstance(tokenized(given, asked), Tokens)


WITH_TOOLS = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}</tool>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | "
    "tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_lies_with_the_processor_is_found(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """As older bases that also read images have it: in a file that tokenizers do not read."""
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    bare.save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(
        json.dumps({"chat_template": tokenizer.chat_template})
    )
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"processor_class": "Gemma3Processor"})
    )
    assert load_tokenizer(str(tmp_path)).chat_template == tokenizer.chat_template


REMOTE = {
    "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]},
    "tokenizer_class": "OwnTokenizer",
}


def test_a_tokenizer_beside_remote_code_is_read_from_its_file(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | REMOTE))
    (tmp_path / "tokenization_own.py").write_text("raise SystemExit(1)")
    found: Any = load_tokenizer(str(tmp_path))
    text = "<|im_start|>user\nDon't!<|im_end|>"
    assert (found(text).input_ids, found.chat_template) == (
        tokenizer(text).input_ids,
        tokenizer.chat_template,
    )
    assert (found.eos_token, found.is_fast) == (tokenizer.eos_token, True)


@pytest.mark.parametrize("vocabulary", ["tiktoken.model", "hy.tiktoken", "vocab.own"])
def test_a_tokenizer_of_remote_code_alone_is_refused_in_our_words(
    vocabulary: str, tmp_path: Path
) -> None:
    """A vocabulary of tiktoken's is refused whether or not that package is there, with which other
    tokens would be made.
    """
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k25"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(REMOTE))
    (tmp_path / vocabulary).write_text("YQ== 0\n")
    with pytest.raises(SpecError) as refused:
        load_tokenizer(str(tmp_path))
    named = vocabulary if "tiktoken" in vocabulary else "tokenization_own.OwnTokenizer"
    assert refused.value.param == "model"
    assert named in str(refused.value)
    assert "tokenizer.json" in str(refused.value)
    assert not [
        word for word in ("pip install", "trust_remote_code", "hf.co") if word in str(refused.value)
    ]


def test_calls_are_learned_and_definitions_and_results_are_not(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    line = {
        "messages": [
            say("user", "sum?"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "four"},
            say("assistant", "It is four."),
        ],
        "tools": [
            {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
        ],
    }
    sample = parse_line(json.dumps(line))
    assert "line 3: the base's chat template has no place for definitions of tools" in str(
        fault_of(tokenizer, 3, sample)
    )
    knowing = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer)
    knowing.chat_template = WITH_TOOLS
    tokens = tokenized(knowing, sample, 3)
    assert isinstance(tokens, Tokens)
    assert decoded(knowing, tokens.ids).startswith("<tool>add</tool><|im_start|>user\nsum?")
    assert (
        tokenizer.decode(tokens.ids[tokens.targets])
        == '<call>add {"a": 2}</call><|im_end|>It is four.<|im_end|>'
    )


def test_a_name_is_what_the_template_makes_of_it(tokenizer: PreTrainedTokenizerFast) -> None:
    ann = say("user", "hi", name="Ann")
    bot = say("assistant", "ho", name="Bot")
    assert (
        learned(tokenizer, ann, bot)[0]
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>"
    )
    naming = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer)
    naming.chat_template = NAMING
    text, target = learned(naming, ann, bot | {"weight": 0}, ann, say("assistant", "ho"))
    first = "<|im_start|>Ann\nhi<|im_end|>\n<|im_start|>"
    assert text == f"{first}Bot\nho<|im_end|>\n{first}assistant\nho<|im_end|>"
    assert target == "ho<|im_end|>"


@pytest.mark.parametrize("after", [(), (say("user", "hi"), say("assistant", "ho"))])
def test_a_name_that_no_prompt_has_is_refused_before_an_answer(
    tokenizer: PreTrainedTokenizerFast, after: Any
) -> None:
    """The model would learn to write it behind the role with which it is asked, or never see its
    own answers.
    """
    naming = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer)
    naming.chat_template = NAMING
    messages = [say("user", "hi"), say("assistant", "ho", name="Bot"), *after]
    fault = fault_of(naming, 3, parse_line(json.dumps({"messages": messages})))
    assert (fault.field, "is written before the answer" in fault.reason) == (
        "messages.1.name",
        True,
    ), fault


def test_a_base_that_is_gone_is_told_as_that(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"The base is gone from .*/moved\. Put it back"):
        load_tokenizer(str(tmp_path / "moved"))


@pytest.mark.parametrize("given", ["", "<|im_end|>"])
def test_the_end_of_a_text_is_learned_once(tokenizer: PreTrainedTokenizerFast, given: str) -> None:
    """Files for other trainers end texts with the base's end-of-text token."""
    records = [(1, Text(f"one two{given}")), (2, PromptCompletion("one ", f"two{given}"))]
    whole, continued = (
        tokens
        for found in tokenize(tokenizer, records)
        if isinstance(found, list)
        for tokens in found
    )
    assert decoded(tokenizer, whole.ids[whole.targets]) == "one two<|im_end|>"
    assert decoded(tokenizer, continued.ids[continued.targets]) == "two<|im_end|>"
