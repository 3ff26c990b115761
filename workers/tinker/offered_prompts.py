"""The prompts of reinforcement learning, which the ranks tokenise and the service samples from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from ft_service.data.answer_format import closing_of
from ft_service.data.formats.reading import open_data
from ft_service.data.sample_kinds import GradedPrompt
from ft_service.data.template_process import TemplateProcess
from ft_service.data.token_options import TokenOptions
from ft_service.data.tokens.answer_ends import answer_ends, answer_format
from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.tokenize import load_tokenizer
from ft_service.errors import DataError
from ft_service.reinforcement.prompt_file import PROMPTS, PromptHeader, PromptTokens, write_prompts
from ft_service.rundir.directory import RunDir
from ft_service.spec import DataFileRef, JobSpec


def offer_prompts(run: RunDir, spec: JobSpec, training: TokenSet, validation: TokenSet) -> None:
    """Write the prompts with their items unless they are written.

    `training`, `validation`: the tokens of the files' records, in their order, each followed by
    what its teacher reads where that is something else. Raises DataError, OSError.
    """
    if run.has(PROMPTS):
        return
    tokenizer = load_tokenizer(spec.model.path, spec.chat_template)
    template = ChatTemplate.of(tokenizer)
    assert template is not None, "prompts were rendered with it"
    options = TokenOptions.of(spec)
    with closing(TemplateProcess(template.sources, template.special_tokens)) as process:

        def write(
            messages: list[dict[str, Any]], tools: list[Any] | None = None, *, prompt: bool = False
        ) -> str:
            return process.write(messages, tools, options.day, prompt=prompt)

        ends = answer_ends(write, tokenizer, Path(spec.model.path))
        answers = answer_format(write, tokenizer)
    together = 2 if spec.in_pairs else 1
    counts = len(training) // together, len(validation) // together
    header = PromptHeader(sorted(ends), *counts, answers)
    write_prompts(run, header, _prompts(spec, options, tokenizer, training, validation))


def _prompts(
    spec: JobSpec, options: TokenOptions, tokenizer: Any, training: TokenSet, validation: TokenSet
) -> Iterator[PromptTokens]:
    asks_agents = spec.reinforcement is not None and spec.reinforcement.environment is not None
    for file, samples in ((spec.training_data, training), (spec.validation_data, validation)):
        if file is None:
            continue
        together = 2 if spec.in_pairs else 1
        for number, record in enumerate(_records(file, options)):
            ids = samples[together * number].ids.tolist()
            closing = closing_of(tokenizer.decode(ids))
            own = PromptTokens(ids, record.item, _last_message(record), bool(record.tools), closing)
            if spec.in_pairs:
                own = replace(own, teacher_ids=samples[together * number + 1].ids.tolist())
            yield _for_agents(own, record) if asks_agents else own


def _for_agents(prompt: PromptTokens, record: GradedPrompt) -> PromptTokens:
    return replace(prompt, messages=record.messages, offered=record.tools)


def _records(file: DataFileRef, options: TokenOptions) -> Iterator[GradedPrompt]:
    """The prompts of a file that was checked, in its order."""
    with open_data(Path(file.path), file.files, options.columns) as reader:
        for _, record in reader:
            if not isinstance(record, GradedPrompt):
                raise DataError(
                    f"{file.name}: the file has changed since the job was submitted.",
                    code="file_changed",
                )
            yield record


def _last_message(record: GradedPrompt) -> str:
    content = record.messages[-1].get("content")
    return content if isinstance(content, str) else ""
