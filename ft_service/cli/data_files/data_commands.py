"""`ft data`: check, show and convert data files."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ft_service.cli.data_files.chats_command import from_chats
from ft_service.cli.data_files.data_arguments import (
    MAX_LENGTH,
    Column,
    DataFile,
    Learn,
    MaxLength,
    Model,
    Split,
    Template,
    base_folder,
    data_options,
    in_flags,
    local_data,
    token_options,
)
from ft_service.cli.data_files.new_files import refuse_existing, written
from ft_service.cli.data_files.stats_command import stats
from ft_service.cli.local.job_inputs import refuse_faults
from ft_service.cli.local_store import settings_with_models
from ft_service.cli.output import Json, print_json, print_note, print_text
from ft_service.data.chat_line import MAX_LINE_BYTES
from ft_service.data.data_file import DataReport, Findings, check_lines
from ft_service.data.examiner import Examiner
from ft_service.data.file_comparison import questions_of
from ft_service.data.formats.columns import AS_THEY_ARE, Columns
from ft_service.data.formats.reading import open_data
from ft_service.data.formats.writing import line_of
from ft_service.data.line_errors import Fault, LineError
from ft_service.data.record_comparison import RecordComparison, References, suite_texts
from ft_service.data.sample_kinds import Conversation
from ft_service.data.sample_request import MOST_LINES, RecordRange, Role, SamplePage, ShownSample
from ft_service.data.statistics import Measure
from ft_service.data.token_folder import folder_of
from ft_service.data.token_options import TokenOptions
from ft_service.errors import DataError, SpecError
from ft_service.host.home import create_home
from ft_service.spec import TrainingOptions
from ft_service.spec.evaluation import Prompt, read_prompts
from ft_service.spec_files.spec_file import LocalData
from ft_service.wording import counted

app = typer.Typer(
    help="Look at a data file before it is trained on: check, show, count and convert it.",
    no_args_is_help=True,
)


def register(typer_app: typer.Typer) -> None:
    typer_app.add_typer(app, name="data")


app.command()(stats)
app.command()(from_chats)


@app.command()
def check(
    file: DataFile,
    model: Model = "",
    chat_template: Template = "",
    train_on: Learn = "all_assistant",
    max_length: MaxLength = MAX_LENGTH,
    split: Split = "train",
    column: Column = [],  # noqa: B006 - typer makes a list of its own for each call
    sensitive: Annotated[
        bool,
        typer.Option(
            "--sensitive",
            help="Also name lines with keys, e-mail addresses, card and account numbers.",
        ),
    ] = False,
    validation: Annotated[
        Path | None,
        typer.Option("--validation", metavar="FILE", help="Name lines with words of this file."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="Or of the prompts of an evaluation."),
    ] = None,
    drop: Annotated[
        Path | None,
        typer.Option(
            "--drop", metavar="OUT", help="Write the file without copies and without such lines."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a file is, name every line that cannot be trained on, that nearly repeats an earlier
    one, or has words of what a model is measured by; with --model also by the base's tokenizer.
    """
    data = local_data(file, split)
    given = data_options(column)
    columns = Columns.of(given, None)
    if drop is not None:
        refuse_existing(drop, "drop")
    if chat_template and not model:
        raise SpecError(
            "--chat-template: a template is applied with a base's tokenizer. Give --model too.",
            param="chat_template",
        )
    comparison = RecordComparison(_references(validation, prompts, columns))
    look = partial(
        check_lines,
        data.path,
        files=data.files,
        columns=columns,
        sensitive=sensitive,
        comparison=comparison,
    )
    if model:
        options = token_options(given, chat_template, train_on)
        report = examined(data, model, options, max_length)
        if sensitive or validation or prompts or drop:
            of_lines = look()
            report = replace(report, sensitive=of_lines.sensitive, comparison=of_lines.comparison)
    else:
        report = refuse_faults(_faults_of(look(), data))
    messages = [
        (level, in_flags(message)) for level, message in report.messages(data.path.name, max_length)
    ]
    written_lines = None
    if drop is not None:
        with written(drop) as lines:
            written_lines = write_lines(data, lines, columns, without=comparison.left_out)
    if as_json:
        print_json(
            {
                **asdict(report),
                "warnings": [message for level, message in messages if level == "warn"],
                **({} if drop is None else {"lines": written_lines, "path": str(drop)}),
            }
        )
        return
    print_text(report.fine_text(data.path.name))
    for level, message in messages:
        if not report.shape or report.shape not in message:
            print_text(message if level == "info" else f"Warning: {message}")
    if written_lines is not None:
        left_out = counted(len(comparison.left_out), "record")
        print_text(f"{counted(written_lines, 'line')} in {drop}, without {left_out}")


def _references(validation: Path | None, prompts: Path | None, columns: Columns) -> References:
    """What the records of a file are compared with. Raises SpecError."""
    texts: dict[str, Iterable[str]] = dict(suite_texts())
    if validation is not None:
        held_out = local_data(validation, "validation", "validation")
        texts[validation.name] = questions_of(held_out.path, held_out.files, columns)
    if prompts is not None:
        try:
            rows = read_prompts(prompts.read_text(encoding="utf-8"), prompts.name)
        except (OSError, ValueError) as error:
            raise SpecError(f"--prompts = {str(prompts)!r}: {error}.", param="prompts") from None
        texts[prompts.name] = [Prompt.model_validate(row).text for row in rows]
    return References.of(texts)


@app.command()
def show(
    file: DataFile,
    model: Model,
    chat_template: Template = "",
    train_on: Learn = "all_assistant",
    max_length: MaxLength = MAX_LENGTH,
    after: Annotated[
        int,
        typer.Option(
            "--after", min=0, max=MOST_LINES, metavar="LINE", help="Begin after this record."
        ),
    ] = 0,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=1000, help="How many records.")
    ] = 3,
    ids: Annotated[bool, typer.Option("--ids", help="Show the id of every token.")] = False,
    split: Split = "train",
    column: Column = [],  # noqa: B006 - typer makes a list of its own for each call
    as_json: Json = False,
) -> None:
    """Show samples as the model sees them, every token in the colour of its role: learned, words
    that are read, the template's, or cut.
    """
    data = local_data(file, split)
    options = token_options(data_options(column), chat_template, train_on)
    with Examiner() as examiner:
        request = examiner.request(data.ref(), data.path, base_folder(model), max_length, options)
        page = examiner.show(replace(request, show=RecordRange(after, limit)))
    if as_json:
        print_json(asdict(page))
    else:
        show_page(Console(highlight=False, emoji=False), page, ids=ids)


@app.command()
def convert(
    file: DataFile,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="A new file; compressed if its name ends in .gz. - is the output."
        ),
    ],
    as_chat: Annotated[
        bool, typer.Option("--chat", help="Make conversations of prompts with completions.")
    ] = False,
    each_answer: Annotated[
        bool,
        typer.Option(
            "--each-answer",
            help="Write a line for each learned answer of a conversation, which ends with it.",
        ),
    ] = False,
    split: Split = "train",
    column: Column = [],  # noqa: B006 - typer makes a list of its own for each call
    as_json: Json = False,
) -> None:
    """Write a file as OpenAI's JSON lines: chats, preference pairs, or bare text as it was.

    Images that it names by paths, absolute or below its folder, are written into the lines.
    Nothing is written if a line is at fault.
    """
    data = local_data(file, split)
    write = partial(
        write_lines,
        data,
        columns=Columns.of(data_options(column), None),
        as_chat=as_chat,
        each_answer=each_answer,
        reads_paths=True,
    )
    if str(out) == "-":
        with tempfile.TemporaryFile("w+", encoding="utf-8") as lines:
            write(lines)
            lines.seek(0)
            shutil.copyfileobj(lines, sys.stdout)
        return
    refuse_existing(out)
    with written(out) as lines:
        count = write(lines)
    if as_json:
        print_json({"lines": count, "path": str(out)})
    else:
        print_text(f"{counted(count, 'line')} in {out}")


def examined(data: LocalData, model: str, options: TokenOptions, max_length: int) -> DataReport:
    """Return the report of a file with a base's tokenizer, with the copies and empty answers among
    its samples. Raises DataError for invalid lines, SpecError, ExaminerLost.
    """
    home = settings_with_models().home
    create_home(home)
    with Examiner(tokens=folder_of(os.environ, home)) as examiner:
        reader = open_data(data.path, data.files, options.columns)
        reader.look()
        pairs = reader.shape.format is not None and reader.shape.format.is_pairs
        options = replace(options, columns=replace(options.columns, labels=reader.shape.labelled))
        file = data.ref()
        request = examiner.request(
            file, data.path, base_folder(model), max_length, options, pairs=pairs
        )
        report = examiner.examine(
            request, lambda progress: print_note(progress.message("training_file"))
        )
        report = refuse_faults(_faults_of(report, data))
        measure = Measure(file, None, TrainingOptions(max_length=max_length))
        try:
            found = examiner.measure(replace(request, measure=measure))
        except DataError as error:  # the tokens could not be kept, which the report does not need
            print_note(error.message)
            return report
    training = found.training
    return replace(
        report,
        duplicates=training.duplicates,
        near_empty=training.near_empty,
        comparison=found.comparison,
    )


def write_lines(
    data: LocalData,
    out: IO[str],
    columns: Columns = AS_THEY_ARE,
    *,
    as_chat: bool = False,
    each_answer: bool = False,
    reads_paths: bool = False,
    without: Collection[int] = (),
) -> int:
    """Write every record as a line of JSON, or with `each_answer` each learned answer of a
    conversation, and return the number of lines. `reads_paths`: as of DataReader. `without`:
    numbers of records that are left out. Raises DataError for invalid records.
    """
    findings = Findings()
    written = 0
    with open_data(data.path, data.files, columns, reads_paths=reads_paths) as reader:
        for number, record in reader:
            if number in without:
                continue
            lines = [_line(number, part, as_chat) for part in _parts(record, each_answer)]
            if (
                fault := next((line for line in lines if isinstance(line, Fault)), None)
            ) is not None:
                findings.fault(fault)
                continue
            findings.examples += 1
            written += len(lines)
            out.writelines(f"{line}\n" for line in lines)
    refuse_faults(_faults_of(findings.report(reader.shape), data))
    return written


def _parts(record: Any, each_answer: bool) -> Iterable[Any]:
    return record.by_answers() if each_answer and isinstance(record, Conversation) else (record,)


@contextmanager
def uploadable(data: LocalData) -> Iterator[Path]:
    """Yield a file to send to a server: the file itself, or a folder's records as JSON lines, in a
    temporary file.
    """
    with ExitStack() as stack:
        path = data.path
        if data.files:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ft-")))
            path = folder / f"{data.path.name}.jsonl.gz"
            with written(path) as lines:
                write_lines(data, lines, Columns(labels=None))
        yield path


def _line(number: int, record: Any, as_chat: bool) -> str | Fault:
    if isinstance(record, Fault):
        return record
    try:
        line = json.dumps(line_of(record, as_chat=as_chat), ensure_ascii=False)
    except LineError as error:
        return Fault(number, error.field, error.reason)
    if (length := len(line.encode())) > MAX_LINE_BYTES:
        reason = f"becomes a line of {length:,} bytes, and one may have {MAX_LINE_BYTES:,}"
        return Fault(number, "", f"{reason}: shorten it, or make its images smaller")
    return line


def _faults_of(report: DataReport, data: LocalData) -> Any:
    error = report.error("training_file", data.path.name)
    return (
        report if error is None else error.model_copy(update={"message": in_flags(error.message)})
    )


STYLES: Mapping[Role, str] = {
    "learned": "bold green",
    "words": "",
    "template": "dim cyan",
    "cut": "red strike",
}
_MARKS: Mapping[Role, tuple[str, str]] = {"learned": ("⟦", "⟧"), "cut": ("⟪", "⟫")}
"""Marks around learned and cut tokens on a terminal without colours."""


def show_page(console: Console, page: SamplePage, *, ids: bool) -> None:
    """Print samples, each under a line with its counts. `ids`: with the id of every token."""
    if not page.samples:
        console.print("There are no samples here: the file has none, or none after --after.")
        return
    legend = Text.assemble(*((f" {role} ", style) for role, style in STYLES.items()))
    console.print(legend if console.color_system else "⟦learned⟧ read and template ⟪cut⟫")
    for sample in page.samples:
        console.print()
        console.print(_title(sample, page.word), style="bold", highlight=False, markup=False)
        console.print(_body(sample, colours=bool(console.color_system), ids=ids), soft_wrap=True)
    if page.has_more and page.samples:
        console.print(f"\nMore: --after {page.samples[-1].line}", highlight=False)


def _title(sample: ShownSample, word: str) -> str:
    place = f"{word} {sample.line}" if sample.line else "the file"
    answer = f", the {sample.answer} answer" if sample.answer else ""
    if sample.error is not None:
        return f"{place}{answer}: {sample.error}"
    cut = f", cut at {sample.cut_at}" if sample.cut_at is not None else ""
    return f"{place}{answer}: {sample.learned:,} of {sample.total:,} tokens learned{cut}"


def _body(sample: ShownSample, *, colours: bool, ids: bool) -> Text:
    body = Text()
    before: Role | None = None
    for token in sample.tokens:
        if not colours and before != token.role:
            body.append(_MARKS[before][1] if before is not None and before in _MARKS else "")
            body.append(_MARKS[token.role][0] if token.role in _MARKS else "")
        body.append(_visible(token.text) if ids else token.text, STYLES[token.role])
        if ids:
            body.append(f"·{token.id} ", "dim")
        before = token.role
    if not colours and before is not None and before in _MARKS:
        body.append(_MARKS[before][1])
    return body


def _visible(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥")
