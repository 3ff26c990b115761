"""Sets of samples with images: in memory and from files they are the samples that they were made
of, with each picture kept once.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ft_service.bases.cache_folder import INDEX
from ft_service.data.data_file import DataReport, ExamineRequest, check_lines
from ft_service.data.examiner import Examiner
from ft_service.data.formats.reading import open_data
from ft_service.data.sample_kinds import Picture
from ft_service.data.sample_request import RecordRange
from ft_service.data.token_folder import entries_of
from ft_service.data.token_options import DEFAULT
from ft_service.data.tokens.examine import Examination, ProgressReporter, TokenDestination
from ft_service.data.tokens.sample import ImageUse, Tokens
from ft_service.data.tokens.sample_view import page_of
from ft_service.data.tokens.token_cache import tokens_key
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.token_set_files import TokenSetWriter, damage, open_token_set
from ft_service.data.tokens.tokenize import load_dataset, load_tokenizer
from ft_service.data.tokens.training_set.split import content_digests
from ft_service.data.tokens.training_set.token_statistics import RecordGroup
from ft_service.rundir.directory import sha256_of
from ft_service.spec import DataFileRef
from tests.support.image_bases import drawn, encoded, image_part, save_image_base, text_part
from tests.support.training.models import spec_for

SUN, MOON, LOW = Picture.of(b"sun" * 9), Picture.of(b"moon"), Picture.of(b"moon", "low")


def sample(length: int, *images: tuple[int, int, Picture], continues: bool = False) -> Tokens:
    """Every token behind the images is a target."""
    ids = np.arange(100, 100 + length, dtype=np.int32)
    targets = np.ones(length, np.bool_)
    targets[: max((end for _, end, _ in images), default=1)] = False
    uses = tuple(ImageUse(*image) for image in images)
    return Tokens(ids, targets, continues, uses)


SAMPLES = [
    sample(4),
    sample(9, (1, 3, SUN), (3, 6, MOON)),
    sample(7, (0, 5, MOON), continues=True),
    sample(1),
    sample(8, (2, 6, LOW)),
    sample(12, (1, 2, SUN), (4, 5, SUN), (7, 9, SUN)),
]


def same(found: Sequence[Tokens], expected: Sequence[Tokens]) -> bool:
    return len(found) == len(expected) and all(
        np.array_equal(a.ids, b.ids)
        and np.array_equal(a.targets, b.targets)
        and a.images == b.images
        for a, b in zip(found, expected, strict=True)
    )


def written(folder: Path, samples: Sequence[Tokens] = SAMPLES) -> Path:
    folder.mkdir()
    with TokenSetWriter(folder) as writer:
        for own in samples:
            writer.add(own)
        writer.finish(dated=False)
    return folder


@pytest.fixture(params=["in memory", "mapped"])
def samples(request: pytest.FixtureRequest, tmp_path: Path) -> TokenSet:
    if request.param == "in memory":
        return TokenSet.of(SAMPLES)
    found = open_token_set(written(tmp_path / "set"))
    assert found is not None
    return found


def test_a_set_is_its_samples_with_each_picture_once(samples: TokenSet) -> None:
    assert same(samples, SAMPLES)
    assert same(samples[1:5], SAMPLES[1:5])
    assert same(samples[::2], SAMPLES[::2])
    assert same(samples.some(np.arange(6) % 3 == 1), [SAMPLES[1], SAMPLES[4]])
    pictures = samples.pictures
    assert pictures is not None
    assert pictures.keys == (SUN.key, MOON.key, LOW.key)
    assert [pictures[key] for key in pictures.keys] == [SUN, MOON, LOW]
    assert len(pictures) == 3
    with pytest.raises(KeyError):
        pictures["0" * 64]
    assert samples.digest == TokenSet.of(SAMPLES).digest
    assert samples.records.tolist() == [0, 1, 1, 2, 3, 4]


@pytest.mark.parametrize("max_length", range(1, 14))
def test_no_cut_goes_through_an_image(max_length: int, samples: TokenSet) -> None:
    cuts = [own.cut(max_length) for own in SAMPLES]
    kept = [own for own in cuts if own.target_count]
    assert same(samples.cut(max_length), kept)
    assert samples.lengths_within(max_length).tolist() == [len(own.ids) for own in cuts]
    assert samples.targets_within(max_length).tolist() == [own.target_count for own in cuts]
    for own, whole in zip(cuts, SAMPLES, strict=True):
        end = len(own.ids)
        assert not any(use.begin < end < use.end for use in whole.images)
        assert own.images == tuple(use for use in whole.images if use.end <= end)
        crossed = [use.begin for use in whole.images if use.begin < max_length < use.end]
        assert end == min([max_length, len(whole.ids), *crossed])


def test_other_pictures_are_another_set() -> None:
    whole = TokenSet.of(SAMPLES)
    uses = SAMPLES[4].images
    for image in (replace(uses[0], picture=MOON), replace(uses[0], begin=1)):
        changed = [*SAMPLES[:4], replace(SAMPLES[4], images=(image,)), SAMPLES[5]]
        assert TokenSet.of(changed).digest != whole.digest
        digests, others = content_digests(whole), content_digests(TokenSet.of(changed))
        assert (digests != others).tolist() == [False, False, False, True, False]
    again = content_digests(TokenSet.of([SAMPLES[4], sample(3), SAMPLES[4]]))
    assert again[0] == again[2]


def test_answers_to_other_pictures_are_not_alike() -> None:
    one, other = sample(8, (2, 6, MOON)), sample(8, (2, 6, SUN))
    assert TokenSet.of([one, other, one, one]).alike(8).tolist() == [False, True]


def test_sets_without_images_are_written_as_before(tmp_path: Path) -> None:
    text = [own for own in SAMPLES if not own.images]
    folder = written(tmp_path / "set", text)
    assert sorted(path.name for path in folder.iterdir()) == [
        "ids.bin",
        INDEX,
        "offsets.bin",
        "records.bin",
        "target_counts.bin",
        "targets.bin",
    ]
    index = json.loads((folder / INDEX).read_text())
    assert index == {
        "format": 2,
        "samples": 2,
        "tokens": 5,
        "largest_id": 103,
        "digest": TokenSet.of(text).digest,
        "records": index["records"],
        "dated": False,
        "unread_names": {},
        "unanswered": {"count": 0, "first": []},
        "seal": index["seal"],
    }
    found = open_token_set(folder)
    assert found is not None
    assert (found.pictures, len(found.uses)) == (None, 0)


def told(folder: Path) -> str | None:
    steps = damage(folder)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize(
    "name", ["images.bin", "image_keys.bin", "image_details.bin", "image_uses.bin"]
)
def test_every_flipped_bit_is_found(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "set")
    assert told(folder) is None
    whole = (folder / name).read_bytes()
    for place in range(0, len(whole), 5):
        for bit in (0, 6):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            (folder / name).write_bytes(changed)
            assert told(folder) is not None or open_token_set(folder) is None, (place, bit)
    (folder / name).write_bytes(whole[:-1])
    assert open_token_set(folder) is None
    (folder / name).unlink()
    assert open_token_set(folder) is None
    assert "cannot be read" in (told(folder) or "")


def test_an_index_of_other_images_is_none(tmp_path: Path) -> None:
    folder = written(tmp_path / "set")
    index = json.loads((folder / INDEX).read_text())
    assert index["images"] == {"pictures": 3, "bytes": 27 + 4 + 4, "uses": 7}
    del index["images"]
    (folder / INDEX).write_text(json.dumps(index))
    assert open_token_set(folder) is None


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_base(tmp_path_factory.mktemp("base"), "qwen 2.5 vl")


def line(question: str, *images: dict[str, Any]) -> str:
    content = [text_part(question), *images]
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "A gauge."},
    ]
    return json.dumps({"messages": messages}) + "\n"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> DataFileRef:
    path = tmp_path_factory.mktemp("data") / "images.jsonl"
    small, wide = (
        image_part(encoded(drawn(width, 28))) for width in (28, 112)
    )  # 4 and 4 · 2 tokens, at least 4
    lines = [line("Read ", small), line("None"), line("Both ", small, wide), line("Low ", wide)]
    path.write_text("".join(lines))
    return DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path))


def examined(tokenizer: Any, file: DataFileRef, max_length: int, folder: Path) -> DataReport:
    request = ExamineRequest(file.path, file.sha256, "", "", max_length)
    examination = Examination(tokenizer, request, ProgressReporter(3600.0, print))
    return examination.report(TokenDestination(folder, "ab.cd"))


@pytest.mark.parametrize("max_length", [20, 62, 75, 200])
def test_reports_count_images_as_training_uses_them(
    max_length: int, base: Path, file: DataFileRef, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(base))
    report = examined(tokenizer, file, max_length, tmp_path)
    assert examined(None, file, max_length, tmp_path) == report, "of kept tokens"
    found = open_token_set(tmp_path / "ab.cd")
    assert found is not None
    made = load_dataset(tokenizer, file, 10_000)
    assert same(found, made)
    assert (found.digest, report.images) == (made.digest, 4)
    counts = report.counts
    if counts is None:
        assert "no sample has an assistant token" in report.faults[0].reason
        return
    cut = made.cut(max_length)
    assert (counts.samples, counts.tokens) == (len(cut), int(cut.lengths.sum()))
    assert counts.targets == int(cut.target_counts.sum())
    placeholders = np.count_nonzero(made.ids == tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    assert counts.image_tokens == placeholders
    measured = RecordGroup(made, "line", "f", pairs=False).measured(
        np.ones(4, np.bool_), max_length
    )
    assert (measured.tokens, measured.targets) == (counts.tokens, counts.targets)
    told = [sentence for _, sentence in report.messages("f", max_length)]
    assert f"f: 4 images, {placeholders} tokens of them." in told


def test_files_are_checked_without_a_base(file: DataFileRef) -> None:
    report = check_lines(Path(file.path))
    assert (report.examples, report.images, report.faults_total) == (4, 4, 0)
    assert "f: 4 images." in [sentence for _, sentence in report.messages("f", 10)]


def test_an_image_is_shown_as_one_token(base: Path, file: DataFileRef) -> None:
    tokenizer = load_tokenizer(str(base))
    page = page_of(tokenizer, open_data(Path(file.path)), DEFAULT, 512, RecordRange(2, 1))
    (shown,) = page.samples
    assert shown.error is None
    texts = [token.text for token in shown.tokens]
    images = [token for token in shown.tokens if token.text.startswith("[image ")]
    assert [token.text for token in images] == [
        "[image 28x28, 4 tokens]",
        "[image 112x28, 4 tokens]",
    ]
    assert {token.role for token in images} == {"words"}
    assert "<|image_pad|>" not in texts
    assert shown.total == len(shown.tokens) + 3 + 3
    words = "".join(token.text for token in shown.tokens if token.role == "words")
    assert words == "Both [image 28x28, 4 tokens][image 112x28, 4 tokens]"
    assert "".join(texts).endswith("<|im_start|>assistant\nA gauge.<|im_end|>")
    at = texts.index("[image 112x28, 4 tokens]") + 3  # its first token
    (cut,) = page_of(
        tokenizer, open_data(Path(file.path)), DEFAULT, at + 2, RecordRange(2, 1)
    ).samples
    assert (cut.cut_at, cut.total, cut.learned) == (at, shown.total, 0)
    assert [token.role for token in cut.tokens if token.text.startswith("[image ")] == [
        "words",
        "cut",
    ]


def test_keys_are_of_the_processor_s_files(base: Path, tmp_path: Path) -> None:
    folder = save_image_base(tmp_path / "other", "qwen 2.5 vl")
    key = tokens_key(str(folder), "ab")
    assert tokens_key(str(base), "ab") == key
    file = folder / "preprocessor_config.json"
    file.write_text(file.read_text().replace("0.5", "0.4"))
    assert tokens_key(str(folder), "ab") != key
    file.unlink()
    (folder / "processor_config.json").write_text("{}")
    assert tokens_key(str(folder), "ab") != key


def test_the_process_that_examines_files_reads_images_without_torch(
    base: Path, file: DataFileRef, tmp_path: Path
) -> None:
    spec = spec_for(base, file)
    broken = tmp_path / "broken.jsonl"
    data = encoded(drawn(200, 200), "JPEG")
    broken.write_text(line("Read ", image_part(data)) + line("Cut ", image_part(data[:600])))
    other = DataFileRef(name=broken.name, path=str(broken), sha256=sha256_of(broken))
    with Examiner(tokens=tmp_path / "tokens") as examiner:
        report = examiner.examine_file("training_file", file, Path(file.path), spec, pytest.fail)
        fault = examiner.examine_file("training_file", other, broken, spec, pytest.fail)
    assert isinstance(report, DataReport)
    assert report.images == 4
    (entry,) = entries_of(tmp_path / "tokens", file.sha256)
    samples = open_token_set(entry)
    assert samples is not None
    assert same(samples, load_dataset(load_tokenizer(str(base)), file, 10_000))
    assert isinstance(fault, DataReport)
    assert (fault.examples, fault.skipped.lines) == (1, (2,))
    (group,) = fault.skipped.groups
    assert group.first.field == "messages.0.content.1.image_url"
