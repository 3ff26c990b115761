"""Ranks read one set of tokens: the service's, or one that a rank makes while the others wait."""

from __future__ import annotations

import json
import os
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ft_service.data import examiner, token_folder, token_options
from ft_service.data.examiner import Examiner
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.tokenize import load_dataset, load_tokenizer
from ft_service.errors import DataError, FtError
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.rundir.manifest import ORIGINS, BaseOrigin, DataFile, Origins
from ft_service.spec import DataFileRef, JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.kept_tokens import give_tokens
from tests.support.training.models import save_chats, save_pairs, save_tokenizer, spec_for
from workers.base import rank_objects
from workers.data import token_sets
from workers.data.token_sets import job_samples, remove_own
from workers.job.origins import compare_tokens

MAX_LENGTH = 60
TEMPLATES = Path(__file__).parents[2] / "support/chat_templates_by_family"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    save_tokenizer(tmp_path / "base")
    run = RunDir(tmp_path / "run")
    train = save_chats(tmp_path / "train.jsonl", 300)
    valid = save_chats(tmp_path / "valid.jsonl", 5)
    run.write(
        "spec.json",
        spec_for(tmp_path / "base", train, valid=valid, training={"max_length": MAX_LENGTH}),
    )
    return run


def spec_of(run: RunDir) -> JobSpec:
    spec = run.read("spec.json", JobSpec)
    assert spec is not None
    return spec


Content = tuple[list[list[int]], list[list[bool]], str]


def content(samples: TokenSet) -> Content:
    return [s.ids.tolist() for s in samples], [s.targets.tolist() for s in samples], samples.digest


def samples_on_rank(
    rank: int, world: int, root: str, broken: list[int], beat: float
) -> tuple[Any, list[bool]]:
    """The samples, or the error's code and message; and the beats at which this rank was working.

    `broken`: ranks that must not tokenise.
    """
    run = RunDir(root)
    worked = []
    gathered = rank_objects.from_all

    def noted(value: Any) -> list[Any]:
        worked.append(value)
        return gathered(value)

    def refuse(*given: Any) -> None:
        raise AssertionError(f"rank {rank} must tokenise nothing")

    with (
        patch.object(token_sets, "tokenise", refuse if rank in broken else token_sets.tokenise),
        patch.object(token_sets, "BEAT_SECONDS", beat),
        patch.object(token_sets, "from_all", noted),
        patch.object(rank_objects, "from_all", noted),
    ):
        try:
            train, valid = job_samples(run, spec_of(run))
        except FtError as error:
            return (error.code, error.message), worked
    return (content(train), content(valid)), worked


def expected(run: RunDir) -> tuple[Content, Content]:
    spec = spec_of(run)
    tokenizer = load_tokenizer(spec.model.path)
    files = spec.data_files
    train, valid = (content(load_dataset(tokenizer, file, MAX_LENGTH)) for file in files)
    return train, valid


def test_one_rank_makes_them_while_the_others_wait_and_next_time_none_does(run: RunDir) -> None:
    of_ranks = run_on_ranks(samples_on_rank, 2, str(run.root), [1], 0.05)
    assert [found for found, _ in of_ranks] == [expected(run)] * 2
    assert len(of_ranks[0][1]) > 12, "they hear of it now and then"
    of_ranks = run_on_ranks(samples_on_rank, 2, str(run.root), [0, 1], 0.0)
    assert [found for found, _ in of_ranks] == [expected(run)] * 2
    assert [len(worked) for _, worked in of_ranks] == [14, 14], (
        "three times a file, and while the first rank reads it"
    )
    remove_own(run)
    assert not run.path(token_folder.IN_RUN).exists()


def test_a_damaged_set_is_made_anew(run: RunDir) -> None:
    give_tokens(run, spec_of(run))
    damaged = sorted(run.root.glob("tokens/*/offsets.bin"))
    for path in damaged:
        path.write_bytes(b"")
    train, valid = job_samples(run, spec_of(run))
    assert (content(train), content(valid)) == expected(run)
    assert len(damaged) == 2
    assert all(path.stat().st_size for path in damaged)


def flip(path: Path, place: int) -> None:
    """One bit, which changes neither size nor time."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("name", ["ids.bin", "targets.bin", "target_counts.bin", "offsets.bin"])
def test_a_flipped_bit_is_not_trained_on(run: RunDir, tmp_path: Path, name: str) -> None:
    """In the service's set: the damage is reported, the set is removed, and the ranks make their
    own.
    """
    give_tokens(run, spec_of(run))
    stored = run.path(token_folder.IN_RUN).rename(tmp_path / "of-service")
    for path in stored.glob(f"*/{name}"):
        flip(path, 16)
    said: list[str] = []
    made: list[str] = []

    def make(spec: JobSpec, file: DataFileRef, examiner: Examiner) -> None:
        made.append(file.name)
        give_tokens(run, spec.model_copy(update={"training_data": file, "validation_data": None}))

    with (
        patch.dict(os.environ, {token_folder.FOLDER: str(stored)}),
        patch.object(token_sets, "tokenise", make),
    ):
        train, valid = job_samples(run, spec_of(run), said.append)
    assert (content(train), content(valid)) == expected(run)
    assert (
        sorted(text.split(":")[0] for text in said)
        == sorted(made)
        == ["train.jsonl", "valid.jsonl"]
    )
    assert all(
        "than when they were written. They are not used, and made again." in text for text in said
    )
    assert list(stored.glob("*/index.json")) == []


def test_a_flipped_bit_is_found_by_the_first_rank_for_all(run: RunDir) -> None:
    give_tokens(run, spec_of(run))
    for path in run.root.glob("tokens/*/ids.bin"):
        flip(path, 4)
    of_ranks = run_on_ranks(samples_on_rank, 2, str(run.root), [], 1.0)
    assert [found for found, _ in of_ranks] == [expected(run)] * 2


def test_what_one_rank_finds_wrong_all_report(run: RunDir) -> None:
    spec = spec_of(run)
    Path(spec.data_files[0].path).write_text("{}\n")
    of_ranks = run_on_ranks(samples_on_rank, 2, str(run.root), [], 1.0)
    message = "train.jsonl: the file has changed since the job was submitted."
    assert [found for found, _ in of_ranks] == [("file_changed", message)] * 2
    assert list(run.root.glob("tokens/*")) == [], "nothing half is left"


def test_a_template_that_hangs_on_one_line_ends_with_an_error(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the service has kept no tokens, a rank makes them: under the service's limits."""
    monkeypatch.setattr(examiner, "RENDER_SECONDS", 0.2)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    own = (
        f"{{% if '7' in messages[0].content %}}{loops}{{% endif "
        f"%}}{load_tokenizer(spec_of(run).model.path).chat_template}"
    )
    with pytest.raises(
        DataError,
        match=r"train\.jsonl: .*\n.*the base's chat template took longer than 0\.2 seconds",
    ):
        job_samples(run, spec_of(run).model_copy(update={"chat_template": own}))


def test_the_services_set_is_read_where_there_is_one(run: RunDir, tmp_path: Path) -> None:
    give_tokens(run, spec_of(run))
    made = job_samples(run, spec_of(run))
    run.path(token_folder.IN_RUN).rename(tmp_path / "of-service")
    data = Path(spec_of(run).data_files[0].path)
    data.unlink()
    with (
        patch.dict(os.environ, {token_folder.FOLDER: str(tmp_path / "of-service")}),
        patch.object(token_sets, "tokenise", side_effect=AssertionError("it is not needed")),
    ):
        found = job_samples(run, spec_of(run))
    assert [content(samples) for samples in found] == [content(samples) for samples in made]
    assert not run.path(token_folder.IN_RUN).exists()


def test_samples_are_set_aside_of_what_is_trained_on(run: RunDir) -> None:
    """Of the same kept tokens, and the same ones each time: by whichever rank, at whichever
    start.
    """
    whole, _ = job_samples(run, spec_of(run))
    spec = spec_of(run).model_copy(
        update={"validation_data": None, "validation_split": 0.25, "seed": 5}
    )
    train, valid = job_samples(run, spec)
    assert len(valid) == len(whole) // 4
    texts = [[bytes(sample.ids) for sample in samples] for samples in (train, valid, whole)]
    assert sorted(texts[0] + texts[1]) == sorted(texts[2])
    assert not set(texts[0]) & set(texts[1])
    again = job_samples(run, spec)
    assert [content(samples) for samples in again] == [content(train), content(valid)]


def test_a_job_does_not_go_on_with_other_tokens(run: RunDir) -> None:
    samples = load_dataset(
        load_tokenizer(spec_of(run).model.path), spec_of(run).data_files[0], MAX_LENGTH
    )

    def file(digest: str) -> DataFile:
        return DataFile(
            role="training",
            name="train.jsonl",
            sha256="0",
            samples=1,
            tokens=2,
            targets=1,
            token_digest=digest,
        )

    now = [file(samples.digest)]
    for before in ([], now):
        compare_tokens(before, now, [samples])
    with pytest.raises(
        DataError, match=r"train\.jsonl has become other tokens since the job began"
    ) as refused:
        compare_tokens([file("another")], now, [samples])
    assert refused.value.code == "tokens_changed"
    compare_tokens([file("another")], now, [TokenSet.of(samples, dated=True)])


def began_with(train: int, valid: int) -> Origins:
    given = {"sha256": "0", "tokens": 2, "targets": 1, "token_digest": "0"}
    data = [
        DataFile(role="training", name="a", samples=train, **given),
        DataFile(role="validation", name="b", samples=valid, **given),
    ]
    return Origins(
        base=BaseOrigin(name="tiny", path="base", digest="0", files={}),
        data=data,
        frozen_modules=[],
        quantiser={},
    )


def test_pairs_alike_after_the_cut_are_in_no_batch_but_of_jobs_that_began_with_them(
    run: RunDir, tmp_path: Path
) -> None:
    train = save_pairs(tmp_path / "train.jsonl", 6)
    valid = save_pairs(tmp_path / "valid.jsonl", 6)
    for file, alike in ((train, 2), (valid, 1)):
        answers = {"preferred_output": "b" * 100 + "c", "non_preferred_output": "b" * 100 + "d"}
        late = {name: [{"role": "assistant", "content": words}] for name, words in answers.items()}
        line = (
            json.dumps({"input": {"messages": [{"role": "user", "content": "say"}]}, **late}) + "\n"
        )
        Path(file.path).write_text(line * alike + Path(file.path).read_text())
    train, valid = (
        file.model_copy(update={"sha256": sha256_of(Path(file.path))}) for file in (train, valid)
    )
    options: dict[str, Any] = {"training": {"max_length": MAX_LENGTH}, "method": {"type": "dpo"}}
    spec = spec_for(tmp_path / "base", train, valid=valid, **options)

    def counts() -> list[int]:
        return [len(samples) for samples in job_samples(run, spec)]

    assert counts() == [12, 12]
    for begun, goes_on in (
        ((16, 14), [16, 14]),
        ((12, 12), [12, 12]),
        ((16, 12), [16, 12]),
        ((11, 11), [12, 12]),
    ):
        run.write(ORIGINS, began_with(*begun))
        assert counts() == goes_on


class AnotherDay(date):
    @classmethod
    def today(cls) -> date:
        return date(2031, 4, 5)


def test_a_job_goes_on_on_another_day_with_the_date_that_it_began_with(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        (TEMPLATES / "llama 3.2.jinja")
        .read_text()
        .replace("bos_token + ", "")
        .replace("<|eot_id|>", "<|im_end|>")
    )
    longer = spec_of(run).training.model_copy(update={"max_length": 500})
    began = spec_of(run).model_copy(
        update={"chat_template": template, "date": "2026-03-02", "training": longer}
    )
    first = [content(samples) for samples in job_samples(run, began)]
    text = load_tokenizer(began.model.path).decode(first[0][0][0])
    assert "Today Date: 02 Mar 2026" in text
    remove_own(run)
    monkeypatch.setattr(token_options, "date", AnotherDay)
    assert [content(samples) for samples in job_samples(run, began)] == first
    # Of a version that pinned none: it continues, and the set says why it may.
    earlier = began.model_copy(update={"date": ""})
    (samples, _) = job_samples(run, earlier)
    assert f"Today Date: {date.today():%d %b %Y}" in load_tokenizer(began.model.path).decode(
        samples[0].ids
    )
    assert samples.dated
