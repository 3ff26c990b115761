"""What a data file holds: tokens, what is cut, what the chat template refuses, in bounded
memory.
"""

from __future__ import annotations

import copy
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ft_service.data.data_file import SHOWN_FAULTS, Counts, DataReport, ExamineRequest, ReadProgress
from ft_service.data.examiner import Examiner
from ft_service.data.formats.columns import Columns
from ft_service.data.statistics import Lines
from ft_service.data.token_folder import entries_of
from ft_service.data.token_options import DEFAULT, TokenOptions
from ft_service.data.tokens.examine import Examination, ProgressReporter
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.token_set_files import open_token_set
from ft_service.data.tokens.tokenize import CHUNK_SAMPLES, file_samples, load_dataset, trainable
from ft_service.errors import SpecError
from ft_service.rundir.directory import sha256_of
from ft_service.spec import DataFileRef
from ft_service.spec.options import DataOptions
from tests.support.training.models import save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def chat(question: str, answer: str) -> str:
    return (
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
            }
        )
        + "\n"
    )


def tell_nothing(progress: ReadProgress) -> None:
    pytest.fail(f"told of {progress}")


def found_in(
    tokenizer: Any,
    path: Path,
    max_length: int = 512,
    *,
    pairs: bool = False,
    options: TokenOptions = DEFAULT,
) -> DataReport:
    request = ExamineRequest(
        str(path), sha256_of(path), "", "", max_length, pairs=pairs, options=options
    )
    return Examination(tokenizer, request, ProgressReporter(3600.0, tell_nothing)).report()


def test_counts_are_those_of_what_is_trained_on(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text((chat("a", "b") + chat("a", "b" * 100) + chat("a" * 100, "b")) * CHUNK_SAMPLES)
    samples = load_dataset(
        tokenizer, DataFileRef(name="f", path=str(path), sha256=sha256_of(path)), 40
    )
    counts = found_in(tokenizer, path, 40).counts
    whole = found_in(tokenizer, path).counts
    assert counts is not None
    assert whole is not None
    assert (counts.samples, counts.cut, counts.dropped) == (
        len(samples),
        2 * CHUNK_SAMPLES,
        CHUNK_SAMPLES,
    )
    assert counts.tokens == sum(len(sample.ids) for sample in samples)
    assert counts.targets == sum(sample.target_count for sample in samples)
    assert (whole.samples, whole.cut, whole.dropped, whole.lost_tokens) == (
        3 * CHUNK_SAMPLES,
        0,
        0,
        0,
    )
    assert whole.longest == counts.longest
    assert counts.lost_tokens == 2 * CHUNK_SAMPLES * (whole.longest - 40)


def test_what_is_told_of_them() -> None:
    counts = Counts(
        samples=1200, tokens=88815, targets=30132, longest=600, cut=3, lost_tokens=900, dropped=1
    )
    told = list(DataReport(1201, [], 0, counts).messages("a.jsonl", 512))
    assert [level for level, _ in told] == ["info", "warn", "warn"]
    assert [message for _, message in told] == [
        "a.jsonl: 1,200 samples of 88,815 tokens, 30,132 of them the assistant's to learn; the "
        "longest sample has 600 tokens.",
        "a.jsonl: 3 samples are cut to training.max_length = 512 tokens; 900 tokens are lost. A "
        "larger max_length keeps them.",
        "a.jsonl: 1 sample is left out: no assistant token within 512 tokens.",
    ]


def test_faults_of_lines_and_of_the_template_are_named_in_the_order_of_the_file(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    strict = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer)
    strict.chat_template = "{{ raise_exception('no sevens') if '7' in messages[0].content }}" + str(
        tokenizer.chat_template
    )
    path = tmp_path / "train.jsonl"
    path.write_text(
        "".join("{}\n" if number == 9 else chat(str(number), "b") for number in range(1, 200))
    )
    report = found_in(strict, path)
    assert report.counts is None
    assert [fault.line for fault in report.faults][:4] == [7, 9, 17, 27]
    assert len(report.faults) == SHOWN_FAULTS
    assert (report.faults_total, report.examples) == (39, 160)
    error = report.error("training_file", "train.jsonl")
    assert error is not None
    assert error.message == (
        "train.jsonl: 39 of 199 lines cannot be trained on.\n"
        "38 lines (7, 17, 27, 37, 47, …): the base's chat template refuses this conversation: no "
        "sevens\n"
        "line 9: messages is required"
    )


def test_a_file_that_leaves_nothing_to_learn_is_at_fault(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(chat("a" * 100, "b"))
    error = found_in(tokenizer, path, 8).error("training_file", "a.jsonl")
    assert error is not None
    assert (
        error.message
        == "a.jsonl: no sample has an assistant token within training.max_length = 8 tokens."
    )


def test_other_bytes_than_those_submitted_are_at_fault(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(chat("a", "b"))
    request = ExamineRequest(str(path), "another", "", "", 8)
    report = Examination(tokenizer, request, ProgressReporter(0.0, tell_nothing)).report()
    error = report.error("validation_file", "a.jsonl")
    assert error is not None
    assert error.message == "a.jsonl: the file has changed since it was uploaded."


def test_how_far_it_is_is_told_only_where_it_takes_long(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Without an interval, progress is reported at every line; `found_in` fails on a report within
    an hour.
    """
    path = tmp_path / "train.jsonl"
    path.write_text("{}\n" + chat("a", "b") * 3 * CHUNK_SAMPLES)
    told: list[ReadProgress] = []
    request = ExamineRequest(str(path), sha256_of(path), "", "", 512)
    report = Examination(tokenizer, request, ProgressReporter(0.0, told.append)).report()
    assert report == found_in(tokenizer, path)
    assert [progress.lines for progress in told] == list(range(1, 3 * CHUNK_SAMPLES + 2))
    assert told[0].share < 1.0 == told[-1].share
    assert sorted(told, key=lambda progress: progress.share) == told


def test_what_is_told_of_how_far_it_is() -> None:
    assert (
        ReadProgress(412_000, 0.389).message("training_file")
        == "Validating training file: 412,000 lines (38 %)."
    )
    assert (
        ReadProgress(7, 1.0).message("validation_file")
        == "Validating validation file: 7 lines (100 %)."
    )


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """The largest memory of the process after a small file, and after one of 20 times its size:
    less
    than 130 bytes a line more, which any object of Python for each would take."""
    save_tokenizer(tmp_path / "base")
    peaks: list[int] = []
    with Examiner() as examiner:
        for lines in (4_000, 80_000):
            path = tmp_path / f"{lines}.jsonl"
            path.write_text(
                "".join(
                    chat(f"say {number}" * 10, f"it is {number}" * 10) for number in range(lines)
                )
            )
            asked = ExamineRequest(
                str(path),
                sha256_of(path),
                str(tmp_path / "base"),
                "t",
                512,
                tokens=str(tmp_path / "tokens"),
            )
            assert examiner.examine(asked).examples == lines
            (entry,) = entries_of(tmp_path / "tokens", asked.sha256)
            samples = open_token_set(entry)
            assert samples is not None
            assert len(samples) == lines
            status = Path(f"/proc/{examiner.pid}/status").read_text()
            peaks.append(int(status.split("VmHWM:")[1].split()[0]))
        assert (tmp_path / "80000.jsonl").stat().st_size > 20_000_000
    assert peaks[1] - peaks[0] < 10_000, f"{peaks} kB"


def in_file(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def warned(report: DataReport, max_length: int = 512) -> list[str]:
    assert not report.faults
    return [message for level, message in report.messages("a.jsonl", max_length) if level == "warn"]


def test_names_that_the_template_does_not_write_are_told_with_their_lines(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    user = {"role": "user", "content": "a"}
    answer = {"role": "assistant", "content": "b"}
    ann = user | {"name": "Ann"}
    bot = answer | {"name": "Bot"}
    path = in_file(
        tmp_path / "a.jsonl",
        *({"messages": both} for both in ([ann, answer], [user, answer], [ann, bot])),
    )
    expected = [
        f"a.jsonl: {lines} with a name in messages of the role {role}. The base's chat template "
        "does not write it, so it has "
        "no effect: write it into the content, or leave it out."
        for role, lines in {
            "assistant": "1 sample (line 3)",
            "user": "2 samples (lines 1, 3)",
        }.items()
    ]
    assert warned(found_in(tokenizer, path)) == expected
    pairs = in_file(
        tmp_path / "p.jsonl",
        *({"prompt": [who], "chosen": [bot], "rejected": "c"} for who in (ann, user, ann)),
    )
    assert warned(found_in(tokenizer, pairs, pairs=True))[1] == expected[1]
    naming = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer)
    naming.chat_template = str(tokenizer.chat_template).replace("m.role", "m.name or m.role")
    assert naming.chat_template != tokenizer.chat_template
    path = in_file(path, {"messages": [ann, answer]})
    assert warned(found_in(naming, path)) == []


def test_names_without_effect_in_prompts_to_grade_are_told(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = in_file(
        tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "a", "name": "Ann"}]}
    )
    options = TokenOptions(columns=Columns(of_prompts=True))
    request = ExamineRequest(str(path), sha256_of(path), "", "", 512, options=options)
    (sentence,) = warned(
        Examination(tokenizer, request, ProgressReporter(3600.0, tell_nothing)).report()
    )
    assert "1 sample (line 1) with a name" in sentence


def test_prompts_of_a_student_stand_behind_its_teachers_context_too(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    asked = {"role": "user", "content": "a" * 20}
    system = {"role": "system", "content": "b"}
    path = in_file(tmp_path / "a.jsonl", {"messages": [asked]}, {"messages": [system, asked]})
    options = TokenOptions(columns=Columns(of_prompts=True), context="Be brief.")

    def report(longest: int) -> DataReport:
        request = ExamineRequest(
            str(path), sha256_of(path), "", "", longest, options=options, pairs=True
        )
        return Examination(tokenizer, request, ProgressReporter(3600.0, tell_nothing)).report()

    counts = report(512).counts
    assert counts is not None
    assert (counts.pairs, counts.samples, counts.cut) == (2, 4, 0)
    [*_, (level, sentence)] = report(512).messages("a.jsonl", 512)
    assert level == "info"
    assert "2 prompts, each also behind the teacher's context, of" in sentence
    found = file_samples(
        tokenizer,
        DataFileRef(name="a.jsonl", path=str(path), sha256=sha256_of(path)),
        options,
        pairs=True,
    )
    own, behind, system_own, system_behind = (str(tokenizer.decode(one.ids)) for one in found)
    assert "Be brief." not in own + system_own
    assert behind.index("Be brief.") < behind.index("a" * 20)
    assert "Be brief.\n\nb" in system_behind
    error = report(counts.longest - 1).error("training_file", "a.jsonl")
    assert error is not None
    assert "1 of its prompts, as student and teacher read them, have more than" in error.message


def pair(question: str, preferred: str, other: str) -> str:
    return json.dumps({"prompt": question, "chosen": preferred, "rejected": other}) + "\n"


def test_pairs_are_counted_and_kept_together(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        pair("a", "b", "c") * CHUNK_SAMPLES + pair("a" * 40, "b", "c") + pair("a", "b", "c" * 100)
    )
    counts = found_in(tokenizer, path, 40, pairs=True).counts
    assert counts is not None
    assert (counts.pairs, counts.samples) == (CHUNK_SAMPLES + 1, 2 * CHUNK_SAMPLES + 2), (
        "one has no answer within 40 tokens"
    )
    assert (counts.dropped, counts.cut) == (1, 3)
    file = DataFileRef(name="f", path=str(path), sha256=sha256_of(path))
    with closing(file_samples(tokenizer, file, pairs=True)) as found:
        kept = trainable(TokenSet.of(found), file, 40, pairs=True)
    assert (len(kept), int(kept.lengths.sum()), int(kept.target_counts.sum())) == (
        counts.samples,
        counts.tokens,
        counts.targets,
    )
    told = [message for _, message in DataReport(3, [], 0, counts).messages("p.jsonl", 40)]
    assert told[0].startswith(f"p.jsonl: {CHUNK_SAMPLES + 1:,} pairs of answers of ")
    assert told[2].startswith("p.jsonl: 1 pair is left out")


def test_pairs_whose_answers_are_alike_after_the_cut_are_left_out(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Their loss is ln 2 whatever is learned, and has no gradient."""
    path = tmp_path / "pairs.jsonl"
    late = pair("a", "b" * 100 + "c", "b" * 100 + "d")
    other = pair("a", "b", "c")
    path.write_text(other + late + pair("a" * 100, "b", "c") + late)
    report = found_in(tokenizer, path, 60, pairs=True)
    assert report.counts is not None
    assert (report.counts.pairs, report.counts.dropped, report.counts.alike) == (
        1,
        1,
        Lines(2, (2, 4)),
    )
    alone = tmp_path / "alone.jsonl"
    alone.write_text(other)
    of_one = found_in(tokenizer, alone, 60, pairs=True).counts
    assert of_one is not None
    assert (report.counts.samples, report.counts.tokens, report.counts.targets) == (
        2,
        of_one.tokens,
        of_one.targets,
    )
    assert warned(report, 60)[1] == (
        "a.jsonl: 2 pairs (lines 2, 4) whose two answers are the same within training.max_length "
        "= 60 tokens, left out, "
        "since nothing is learned from them. Raise it if the answers differ after that."
    )
    whole = found_in(tokenizer, path, 200, pairs=True).counts
    assert whole is not None
    assert whole.alike == Lines()
    path.write_text(late * 3)
    error = found_in(tokenizer, path, 60, pairs=True).error("training_file", "a.jsonl")
    assert error is not None
    assert error.message == (
        "a.jsonl: no pair has two answers within training.max_length = 60 tokens that differ and "
        "have an assistant token each, "
        "so there is nothing to learn. Raise it if the answers differ after that, and else give "
        "others."
    )


@pytest.mark.parametrize("applied", [False, True, "auto"])
@pytest.mark.parametrize("has_template", [True, False])
def test_prompts_with_completions_are_conversations_where_that_is_asked(
    applied: Any, has_template: bool, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    base = copy.deepcopy(tokenizer)
    base.chat_template = tokenizer.chat_template if has_template else None
    bare, chats, empty = (tmp_path / name for name in ("bare.jsonl", "chats.jsonl", "empty.jsonl"))
    bare.write_text(json.dumps({"prompt": "Why?", "completion": "So."}) + "\n")
    chats.write_text(chat("Why?", "So."))
    empty.write_text(json.dumps({"prompt": "", "completion": "So."}) + "\n")
    options = TokenOptions(columns=Columns.of(DataOptions(apply_chat_template=applied)))
    if applied is True and not has_template:
        with pytest.raises(SpecError, match="has no chat template"):
            found_in(base, bare, options=options)
        return
    report = found_in(base, bare, options=options)
    joined = found_in(base, bare)
    is_chat = has_template and applied is not False
    assert report.counts == (found_in(base, chats) if is_chat else joined).counts
    levels = [
        level
        for level, message in report.messages("a.jsonl", 512)
        if "prompt and completion are" in message
    ]
    assert levels == ([] if not has_template else ["info"] if is_chat else ["warn"])
    verbatim = found_in(base, empty, options=options)
    assert verbatim.counts == (None if applied is True else found_in(base, empty).counts)
    assert [fault.field for fault in verbatim.faults] == (["prompt"] if applied is True else [])


def test_a_pair_at_fault_is_one_line_at_fault(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        pair("a", "b", "c") + chat("a", "b") + pair("a", "b", "b") + pair("d", "e", "f")
    )
    report = found_in(tokenizer, path, 40, pairs=True)
    assert (report.examples, report.faults_total) == (2, 2)
    assert [fault.line for fault in report.faults] == [2, 3]
