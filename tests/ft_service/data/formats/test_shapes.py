"""Small files of shapes found in public: each is what it is, or is told what it is.

None is silently something else.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.data.formats.columns import Columns
from ft_service.data.formats.reading import open_data
from ft_service.data.line_errors import Fault
from ft_service.data.sample_kinds import Conversation, Pair, PromptCompletion, Record, Text

SHAPES = Path(__file__).parents[3] / "fixtures/shapes"

LEARNED = {
    "alpaca-empty-input.jsonl": "uA",
    "alpaca-history.jsonl": "suAuA",
    "alpaca.jsonl": "uA",
    "anthropic-blocks.jsonl": "suA",
    "anthropic-system.jsonl": "suA",
    "array-pretty.json": "uA",
    "arrow-nulls.jsonl": "uAtA",
    "azure-vision.jsonl": "uA",
    "bedrock-converse.jsonl": "suA",
    "bom-quotes.csv": "uA",
    "chat.jsonl.gz": "uA",
    "fireworks-weight.jsonl": "suA",
    "gemini-contents.jsonl": "suA",
    "hermes-calls.jsonl": "suAtA",
    "hh-harmless-prompt.jsonl": "uA uA",
    "hh-rlhf.jsonl": "uauA uauA",
    "llama-factory-image-urls.jsonl": "uA",
    "llama-factory-tool-roles.jsonl": "uAtA",
    "llava-instruct-mix.jsonl": "uAuA",
    "messages-as-string.jsonl": "uA",
    "messages-role-human.jsonl": "uA",
    "mistral-weights.jsonl": "uauA",
    "no-pictures.jsonl": "uA",
    "openai-chat.jsonl": "suA",
    "openai-image-url.jsonl": "uA",
    "openai-preference.jsonl": "uA uA",
    "openai-tools.jsonl": "uAtA",
    "openai-weights.jsonl": "uauA",
    "pairs-system.jsonl": "suA suA",
    "predibase-split.csv": "BARE",
    "prompt-completion-messages.jsonl": "uA",
    "semicolons.csv": "uA",
    "sharegpt-roles.jsonl": "uA",
    "sharegpt-system.jsonl": "suA",
    "sharegpt-tools.jsonl": "uAtA",
    "sharegpt.jsonl": "uA",
    "tabs.tsv": "uA",
    "text.jsonl": "TEXT",
    "together-instruction.jsonl": "BARE",
    "transformers-image.jsonl": "suA",
    "trl-implicit.jsonl": "uA uA",
    "trl-pairs.jsonl": "uA uA",
    "trl-vision.jsonl": "uA",
    "trl-vision-pairs.jsonl": "uA uA",
    "ultrafeedback.jsonl": "uA uA",
    "unanswered.jsonl": "uAu",
}
"""File → the roles of its first record's messages by their first letters, capitals where they are
learned.
"""
TOLD = {
    "anthropic-batch.jsonl": (1, "", "'custom_id', 'params'"),
    "argilla.jsonl": (1, "", "'fields', 'responses'"),
    "chatgpt-export.json": (1, "", "ChatGPT's export"),
    "cohere.jsonl": (1, "messages.0.role", "'System'"),
    "comments.ndjson": (1, "", "a comment"),
    "cut.jsonl": (2, "", "is it cut off?"),
    "dolly.jsonl": (1, "", "data: {instruction: instruction, input: context, output: response}"),
    "duplicate-key.jsonl": (1, "", "twice"),
    "empty-line.jsonl": (2, "", "blank"),
    "excel.csv": (0, "", "UTF-16"),
    "gemini-picture.jsonl": (1, "contents.0.parts.0", "fileData"),
    "gemini-tools.jsonl": (1, "tools", "OpenAI"),
    "glaive.jsonl": (1, "", "'system', 'chat'"),
    "gsm8k.jsonl": (1, "", "data: {instruction: question, output: answer}"),
    "kto-messages.jsonl": (2, "label", "method: {type: kto}"),
    "kto.jsonl": (2, "label", "method: {type: kto}"),
    "label-studio.json": (1, "", "'annotations'"),
    "lfs-pointer.jsonl": (0, "", "git lfs pull"),
    "llama-factory-images.jsonl": (1, "images.0", "is the path 'a.jpg'"),
    "llama-factory-video.jsonl": (1, "videos", "a film"),
    "llava-words-only.jsonl": (1, "conversations.0.value", "<image>"),
    "llava.json": (1, "image", "`ft data convert FILE OUT.jsonl`"),
    "math.jsonl": (1, "", "data: {instruction: problem, output: solution}"),
    "messages-capitals.jsonl": (1, "", "data: {messages: Messages}"),
    "mistral-prefix.jsonl": (1, "messages.1.prefix", "not a known key"),
    "mixed.jsonl": (2, "", "is Alpaca"),
    "nan-column.jsonl": (1, "input", "not a number"),
    "nan.jsonl": (1, "messages", "not a number"),
    "nectar.jsonl": (1, "", "'prompt', 'answers'"),
    "no-header.csv": (0, "", "its first row is data"),
    "notes.md": (0, "", "plain text"),
    "notes.txt": (0, "", "plain text"),
    "numina-math.jsonl": (1, "", "data: {instruction: problem, output: solution}"),
    "oasst-flat.jsonl": (1, "text", "a message of a conversation"),
    "oasst-tree.jsonl": (1, "", "'message_tree_id'"),
    "openai-batch-reply.jsonl": (1, "", "Batch API"),
    "openai-batch-request.jsonl": (1, "", "Batch API"),
    "openai-reinforcement.jsonl": (1, "messages", "no assistant message"),
    "orca-pairs.jsonl": (1, "prompt", "data: {prompt: question}"),
    "own-names.csv": (1, "", "'Kundenfrage', 'Antwort des Supports'"),
    "page.html": (0, "", "a web page"),
    "pairs-without-prompt.jsonl": (1, "prompt", "give there what both answer"),
    "paper.pdf": (0, "", "a PDF"),
    "pretty.json": (0, "", "jq -c . FILE"),
    "python.jsonl": (1, "", "single quote"),
    "question-answer.jsonl": (1, "", "data: {instruction: question, output: answer}"),
    "qwen-audio.jsonl": (1, "audios", "sound"),
    "records.pkl": (0, "", "a pickle"),
    "shp.jsonl": (1, "", "'human_ref_A'"),
    "slack-export.json": (1, "text", "a message of a conversation"),
    "step-dpo.jsonl": (1, "initial_reason_steps", "{chosen: full_chosen, rejected: full_rejected}"),
    "system-twice.jsonl": (1, "system", "keep one"),
    "toolbench.jsonl": (1, "conversations.3.from", "'function'"),
    "utf-16-no-mark.csv": (0, "", "UTF-16"),
    "workbook.csv": (0, "", "an Excel workbook"),
    "wrapped-pretty.json": (0, "", "jq -c '.data[]' FILE"),
    "wrapped.json": (0, "", "jq -c '.data[]' FILE"),
    "written-alpaca.jsonl": (1, "text", "Below is an instruction"),
    "written-chatml.jsonl": (1, "text", "<|im_start|>"),
    "written-gemma.jsonl": (1, "text", "<start_of_turn>"),
    "written-guanaco.jsonl": (1, "text", "### Human:"),
    "written-llama.jsonl": (1, "text", "<|start_header_id|>"),
    "written-mistral.jsonl": (1, "prompt", "[INST]"),
    "xlam.jsonl": (1, "", "data: {instruction: query"),
}
"""File → the line, the field and a part of the reason of its first fault."""


def read(name: str) -> list[tuple[int, Record | Fault]]:
    with open_data(SHAPES / name) as reader:
        return list(reader)


def outline(record: Record | Fault) -> str:
    match record:
        case Conversation():
            letters = (
                (message["role"][0], weight)
                for message, weight in zip(record.messages, record.weights, strict=True)
            )
            return "".join(letter.upper() if weight else letter for letter, weight in letters)
        case Pair():
            return f"{outline(record.preferred)} {outline(record.rejected)}"
        case Text():
            return "TEXT"
        case PromptCompletion():
            return "BARE"
        case _:
            return repr(record)


def test_every_shape_has_one_verdict() -> None:
    assert sorted([*LEARNED, *TOLD]) == sorted(path.name for path in SHAPES.iterdir())


@pytest.mark.parametrize("name", LEARNED)
def test_a_shape_is_learned_as_it_stands(name: str) -> None:
    assert [outline(record) for _, record in read(name)] == [LEARNED[name]]


@pytest.mark.parametrize("name", TOLD)
def test_a_shape_is_told_by_line_and_place(name: str) -> None:
    line, field, part = TOLD[name]
    fault = next(record for _, record in read(name) if isinstance(record, Fault))
    assert (fault.line, fault.field) == (line, field)
    assert part in fault.reason


def test_the_way_out_of_pairs_that_begin_in_another_column_is_one() -> None:
    columns = Columns((("chosen", "full_chosen"), ("rejected", "full_rejected")))
    with open_data(SHAPES / "step-dpo.jsonl", columns=columns) as reader:
        ((_, pair),) = list(reader)
    assert isinstance(pair, Pair)
    assert [own.messages[-1]["content"] for own in (pair.preferred, pair.rejected)] == [
        "Down.",
        "Up.",
    ]


@pytest.mark.parametrize(
    "named", [(), (("messages", "messages"), ("role", "role"), ("content", "content"))]
)
def test_calls_of_llama_factory_are_calls_under_any_names(
    named: tuple[tuple[str, str], ...],
) -> None:
    with open_data(SHAPES / "llama-factory-tool-roles.jsonl", columns=Columns(named)) as reader:
        ((_, chat),) = list(reader)
    assert isinstance(chat, Conversation)
    (call,) = chat.messages[1]["tool_calls"]
    assert call["function"] == {"name": "route", "arguments": {}}
    assert chat.messages[2] == {"role": "tool", "name": "tool", "content": "left"}


def test_system_prompts_and_texts_arrive_whole() -> None:
    for name in (
        "anthropic-blocks.jsonl",
        "bedrock-converse.jsonl",
        "gemini-contents.jsonl",
        "sharegpt-system.jsonl",
    ):
        (_, chat), *_ = read(name)
        assert isinstance(chat, Conversation)
        texts = [message["content"] for message in chat.messages]
        assert texts == [
            "You guide visitors.",
            "Which way to the harbour?",
            "Down the hill, then left.",
        ], name
    (_, pair), *_ = read("hh-rlhf.jsonl")
    assert isinstance(pair, Pair)
    assert [message["content"] for message in pair.rejected.messages][2:] == [
        "Which way to the harbour?",
        "Up the hill.",
    ]
