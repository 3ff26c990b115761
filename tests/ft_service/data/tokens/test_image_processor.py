import hashlib
import io
import json
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from ft_service.data.line_errors import LineError
from ft_service.data.sample_kinds import Picture
from ft_service.data.token_options import PixelBounds
from ft_service.data.tokens import image_processor
from ft_service.data.tokens.image_processor import (
    ImageProcessor,
    bounded_documents,
    bounds_of,
    decoded,
    size_of,
)
from ft_service.errors import SpecError
from tests.support.image_bases import FAMILIES, drawn, encoded, save_image_base

ROOT = Path(__file__).parents[4]


def picture(image: Image.Image, format: str = "PNG", detail: str = "auto", **how: Any) -> Picture:
    return Picture.of(encoded(image, format, **how), detail)


def png(width: int, height: int, body: bytes = b"") -> bytes:
    """A PNG that says this size, in 8 bits of grey."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(body))
        + chunk(b"IEND", b"")
    )


JPEG = encoded(drawn(200, 160), "JPEG")
WHOLE = encoded(drawn(200, 160))
HOSTILE = {
    "a bomb": (png(60_000, 60_000), "pixels, and a picture may have 64,000,000"),
    "a larger bomb": (png(2**31 - 1, 2**31 - 1), "more than"),
    "just too many": (png(8_001, 8_000), "has 8,001 x 8,000 pixels"),
    "one pixel wide": (png(1, 100_000, b"\0\0" * 100_000), "at most 200 times the other"),
    "a cut JPEG": (JPEG[: len(JPEG) // 2], "cannot be decoded: image file is truncated"),
    "a cut PNG": (WHOLE[: len(WHOLE) // 2], "cannot be decoded"),
    "a damaged PNG": (WHOLE[:60] + b"\xff" * 40 + WHOLE[100:], "cannot be decoded"),
    "no size": (png(0, 0), "cannot be decoded"),
    "a beginning": (b"\x89PNG\r\n\x1a\n", "cannot be decoded"),
    "HTML": (b"<html><img src=x></html>", "cannot be decoded. The file is damaged"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be decoded"),
    "nothing": (b"", "cannot be decoded"),
    "another format": (encoded(drawn(), "TIFF"), "cannot be decoded"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_a_fault_of_its_line(name: str) -> None:
    data, reason = HOSTILE[name]
    with pytest.raises(LineError) as refusal:
        decoded(Picture.of(data))
    assert reason in refusal.value.reason
    assert refusal.value.field == ""


def test_a_picture_is_seen_as_people_see_it() -> None:
    left = drawn(70, 50)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned clockwise
    turned = picture(left, exif=exif)
    assert decoded(turned).size == size_of(turned) == (50, 70)
    assert list(decoded(turned).get_flattened_data()) == list(
        left.rotate(-90, expand=True).get_flattened_data()
    )
    assert size_of(picture(left)) == (70, 50)


def test_what_is_clear_is_white() -> None:
    clear = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    clear.putpixel((1, 0), (255, 0, 0, 128))
    assert list(decoded(picture(clear)).get_flattened_data()) == [(255, 255, 255), (255, 127, 127)]
    grey = Image.new("LA", (1, 1), (0, 0))
    assert list(decoded(picture(grey)).get_flattened_data()) == [(255, 255, 255)]
    palette = Image.new("P", (1, 1), 3)
    palette.putpalette([0] * 9 + [9, 8, 7])
    assert list(decoded(picture(palette)).get_flattened_data()) == [(9, 8, 7)]
    assert list(decoded(picture(palette, transparency=3)).get_flattened_data()) == [(255, 255, 255)]


def test_every_kind_of_pixel_becomes_8_bits_of_red_green_and_blue() -> None:
    deep = Image.fromarray(np.array([[0, 257 * 128, 65535]], np.uint16))
    assert list(decoded(picture(deep)).get_flattened_data()) == [(0,) * 3, (128,) * 3, (255,) * 3]
    black = Image.new("CMYK", (8, 8), (0, 0, 0, 255))
    assert decoded(picture(black, "JPEG")).getpixel((4, 4)) == (0, 0, 0)
    assert list(decoded(picture(Image.new("1", (1, 1), 1))).get_flattened_data()) == [(255,) * 3]


@pytest.mark.parametrize("format", ["GIF", "WEBP"])
def test_the_first_of_several_frames_is_seen(format: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    film = picture(frames[0], format, save_all=True, append_images=frames[1:])
    pixel: Any = decoded(film).getpixel((4, 4))
    red, green, blue = pixel
    assert (red > 250, green < 5, blue < 5) == (True, True, True)


def test_little_detail_is_a_smaller_picture() -> None:
    for detail, size in (("low", (512, 256)), ("high", (1200, 600)), ("auto", (1200, 600))):
        assert decoded(picture(drawn(1200, 600), detail=detail)).size == size
    assert decoded(picture(drawn(70, 50), detail="low")).size == (70, 50)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_base(tmp_path_factory.mktemp("qwen"), "qwen 2.5 vl")


def test_the_inputs_of_a_tower_are_of_one_picture(qwen: Path) -> None:
    processor = ImageProcessor.of(str(qwen))
    inputs = processor.inputs(picture(drawn(112, 56)))
    assert {name: (array.dtype.name, array.shape) for name, array in inputs.items()} == {
        "pixel_values": ("float32", (32, 3 * 2 * 14 * 14)),
        "image_grid_thw": ("int64", (1, 3)),
    }
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 8]]
    assert processor.replacement(picture(drawn(112, 56))) == "<|image_pad|>" * 8
    assert processor.image_token == "<|image_pad|>"
    assert ImageProcessor.of(str(qwen)) is processor


def test_what_the_base_refuses_is_a_fault_of_the_line(qwen: Path, tmp_path: Path) -> None:
    processor = ImageProcessor.of(str(qwen))
    with pytest.raises(LineError, match="is 3 x 900 pixels, and one side"):
        processor.replacement(picture(Image.new("RGB", (3, 900))))
    assert processor.replacement(picture(Image.new("RGB", (3, 597))))
    pixtral = ImageProcessor.of(str(save_image_base(tmp_path, "pixtral")))
    with pytest.raises(LineError, match=r"is 300 x 2 pixels, .* refuses it: Size must contain"):
        pixtral.replacement(picture(Image.new("RGB", (300, 2))))


def test_the_digest_is_of_what_makes_the_pixels(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ImageProcessor.of(str(qwen)).digest
    same = save_image_base(tmp_path / "same", "qwen 2.5 vl")
    assert ImageProcessor.of(str(same)).digest == first
    file = same / "preprocessor_config.json"
    changed = json.loads(file.read_text()) | {"image_mean": [0.1, 0.5, 0.5]}
    file.write_text(json.dumps(changed))
    assert ImageProcessor.of(str(same)).digest != first
    monkeypatch.setattr(image_processor.transformers, "__version__", "5.99")
    assert ImageProcessor(str(qwen)).digest != first


def changed(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    document = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in (document | values).items() if v is not None}))


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("config.json", {"image_token_id": None}, "neither image_token_id nor image_token_index"),
        ("config.json", {"image_token_id": 5}, "writes no token 5 for a picture"),
        (
            "preprocessor_config.json",
            {"image_processor_type": "VivitImageProcessor"},
            None,
        ),
        ("preprocessor_config.json", {"patch_size": 0}, "fails for a white picture"),
        ("preprocessor_config.json", {"processor_class": "Evil"}, None),
    ],
)
def test_a_base_whose_files_do_not_fit_is_told(
    name: str, values: dict[str, Any], reason: str | None, tmp_path: Path
) -> None:
    folder = save_image_base(tmp_path, "qwen 2.5 vl")
    changed(folder, name, **values)
    if reason is None:  # config.json's model_type decides
        assert ImageProcessor.of(str(folder)).image_token == "<|image_pad|>"
        return
    with pytest.raises(SpecError) as refusal:
        ImageProcessor.of(str(folder))
    assert (refusal.value.param, reason in refusal.value.message) == ("model", True), refusal.value


def test_a_base_of_text_reads_no_images(tmp_path: Path) -> None:
    folder = save_image_base(tmp_path, "qwen 2.5 vl")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(SpecError, match=r"no preprocessor_config.json in its folder"):
        ImageProcessor.of(str(folder))
    changed(folder, "preprocessor_config.json", size={"shortest_edge": 16})
    changed(folder, "config.json", model_type="vivit")
    with pytest.raises(SpecError, match="has no processor for its model_type 'vivit'"):
        ImageProcessor.of(str(folder))


LLAVA = FAMILIES["llava 1.5"]
GEMMA = FAMILIES["gemma 3"]
OTHERS = {
    "qwen 3.5": (
        replace(FAMILIES["qwen 3 vl"], config={"model_type": "qwen3_5"}),
        {"pixel_values": (16, 1536), "image_grid_thw": (1, 3)},
    ),
    "llava 1.6": (
        replace(
            LLAVA,
            config={"model_type": "llava_next"},
            preprocessor=LLAVA.preprocessor
            | {
                "image_processor_type": "LlavaNextImageProcessor",
                "image_grid_pinpoints": [[56, 112], [112, 56]],
            },
            processor=LLAVA.processor | {"processor_class": "LlavaNextProcessor"},
        ),
        {"pixel_values": (1, 3, 3, 56, 56), "image_sizes": (1, 2)},
    ),
    "gemma 4": (
        replace(
            GEMMA,
            config={"model_type": "gemma4"},
            preprocessor={
                "image_processor_type": "Gemma4ImageProcessor",
                "patch_size": 16,
                "max_soft_tokens": 70,
                "pooling_kernel_size": 3,
            },
            processor={"processor_class": "Gemma4Processor", "image_seq_length": 70},
            specials=(*GEMMA.specials, "<audio>", "<boa>", "<eoa>"),
            named=GEMMA.named
            | {"audio_token": "<audio>", "boa_token": "<boa>", "eoa_token": "<eoa>"},
            id_key="image_token_id",
        ),
        {"pixel_values": (1, 630, 768), "image_position_ids": (1, 630, 2)},
    ),
}


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_found_by_their_files(family: str, tmp_path: Path) -> None:
    base, shapes = OTHERS[family]
    inputs = ImageProcessor.of(str(save_image_base(tmp_path, base))).inputs(picture(drawn(70, 50)))
    assert {name: array.shape for name, array in inputs.items()} == shapes


def test_a_family_without_a_processor_on_pillow_is_told(tmp_path: Path) -> None:
    base = replace(
        LLAVA,
        config={"model_type": "llama4"},
        preprocessor={"image_processor_type": "Llama4ImageProcessorFast"},
        processor={"processor_class": "Llama4Processor"},
    )
    with pytest.raises(SpecError, match="has no image processor on Pillow for its model_type") as e:
        ImageProcessor.of(str(save_image_base(tmp_path, base)))
    assert e.value.param == "model"


def test_an_old_transformers_is_told(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(transformers.ProcessorMixin, "replace_image_token")
    with pytest.raises(SpecError, match=r"images need 5.23. Install it: pip install"):
        ImageProcessor(str(qwen))


def test_no_family_needs_torch(tmp_path: Path) -> None:
    """And the pixels are those of this process, where torch is."""
    folders = {family: save_image_base(tmp_path / family, family) for family in FAMILIES}
    program = """
import sys
sys.modules["torch"] = None
import hashlib, json
from ft_service.data.sample_kinds import Picture
from ft_service.data.tokens.image_processor import ImageProcessor
data = sys.stdin.buffer.read()
for folder in sys.argv[1:]:
    inputs = ImageProcessor.of(folder).inputs(Picture.of(data))
    print(hashlib.sha256(b"".join(inputs[name].tobytes() for name in sorted(inputs))).hexdigest())
"""
    data = encoded(drawn(90, 40))
    ran = subprocess.run(
        [sys.executable, "-c", program, *map(str, folders.values())],
        input=data,
        capture_output=True,
        check=True,
        cwd=ROOT,
    )
    for folder, found in zip(folders.values(), ran.stdout.decode().split(), strict=True):
        inputs = ImageProcessor.of(str(folder)).inputs(Picture.of(data))
        here = hashlib.sha256(b"".join(inputs[name].tobytes() for name in sorted(inputs)))
        assert here.hexdigest() == found, folder.name


SIDE = 28  # of the square for which there is one token


@pytest.mark.parametrize(
    ("bounds", "size", "tokens"),
    [
        (PixelBounds(), (560, 280), 55),  # at most 64, at least 4, by the base
        (PixelBounds(most=18 * SIDE**2), (560, 280), 18),
        (PixelBounds(least=32 * SIDE**2), (56, 28), 32),
        (PixelBounds(2 * SIDE**2, 2 * SIDE**2), (56, 28), 2),
        (PixelBounds(most=200 * SIDE**2), (560, 280), 200),
    ],
)
def test_a_job_s_bounds_are_the_processor_s_own(
    bounds: PixelBounds, size: tuple[int, int], tokens: int, qwen: Path
) -> None:
    base = ImageProcessor.of(str(qwen))
    bounded = ImageProcessor.of(str(qwen), bounds)
    assert bounded.replacement(picture(drawn(*size))) == "<|image_pad|>" * tokens
    grid = bounded.inputs(picture(drawn(*size)))["image_grid_thw"]
    assert int(np.prod(grid)) == 4 * tokens
    assert (bounded.digest == base.digest) is (not bounds)


@pytest.mark.parametrize(
    ("family", "bounds", "param", "reason"),
    [
        ("gemma 3", PixelBounds(most=2000), "data.max_pixels", "has no bounds of pixels"),
        ("pixtral", PixelBounds(least=2000), "data.min_pixels", "has no bounds of pixels"),
        ("qwen 2.5 vl", PixelBounds(most=2000), "data.max_pixels", "3,136 pixels at least"),
        ("qwen 2.5 vl", PixelBounds(least=60_000), "data.min_pixels", "50,176 at most with it"),
    ],
)
def test_bounds_that_do_nothing_are_refused(
    family: str, bounds: PixelBounds, param: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=reason) as refusal:
        ImageProcessor.of(str(save_image_base(tmp_path, family)), bounds)
    assert refusal.value.param == param


@pytest.mark.parametrize("nested", [False, True])
def test_bounds_are_written_as_published_classes_read_them(nested: bool, tmp_path: Path) -> None:
    base = save_image_base(tmp_path / "base", "qwen 2.5 vl")
    if nested:
        alone = json.loads((base / "preprocessor_config.json").read_text())
        (base / "processor_config.json").write_text(json.dumps({"image_processor": alone}))
    bounds = PixelBounds(most=18 * SIDE**2)
    documents = bounded_documents(str(base), bounds)
    assert sorted(documents) == ["preprocessor_config.json", *["processor_config.json"] * nested]
    assert bounded_documents(str(base), PixelBounds()) == {}
    wide = picture(drawn(560, 280))
    expected = ImageProcessor.of(str(base), bounds).inputs(wide)
    for name, document in documents.items():
        (base / name).write_text(json.dumps(document))
    published = transformers.AutoImageProcessor.from_pretrained(base, backend="pil")
    found = published(Image.open(io.BytesIO(wide.data)), return_tensors="np")
    assert np.array_equal(found["pixel_values"], expected["pixel_values"])
    assert bounds_of(base) == PixelBounds(4 * SIDE**2, 18 * SIDE**2)
    assert bounds_of(tmp_path) == PixelBounds()
