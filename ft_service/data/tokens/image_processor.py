"""Pictures as a base's tower takes them, and the text that stands for one in a sample.

Both are those of the base's published processor (transformers), always with its Pillow back end:
the other one, on torchvision, makes other pixels. Nothing is fetched, no code of the folder runs,
and torch is not needed. The samples' tokens and the features of pictures are made with this module,
by the process that examines files and by the workers.

A picture comes from a user. Its size is read before its pixels are, and an error of a library is
the line's: which picture, and what to do.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import io
import json
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import PIL
import transformers
from PIL import Image, ImageOps

from ft_service.bases.base_files import document_or_none, shown
from ft_service.data.line_errors import ImageError
from ft_service.data.sample_kinds import Picture
from ft_service.data.token_options import NO_BOUNDS, PixelBounds
from ft_service.data.tokenizer_files import IMAGE_FILES, tokenizer_state
from ft_service.data.tokens.base_tokenizer import load_tokenizer
from ft_service.data.tokens.patches.pixtral_processor import without_torchvision
from ft_service.data.tokens.patches.smolvlm_processor import need_no_num2words
from ft_service.errors import SpecError
from ft_service.spec.options import MOST_PIXELS

MOST_ASPECT = 200
"""The longer side of a picture by its shorter one, at most: processors refuse more, or enlarge it
beyond all memory."""
LOW_SIDE = 512
"""Pixels of the longer side to which a picture of `detail: low` is made smaller before the base's
processor sees it; that of `high` and `auto` is not."""
DECODING = 1
"""Version of the pixels that `decoded` makes of a file; increase it when they change."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_LEAST = "min_pixels"
_MOST = "max_pixels"
_KNOWN_TEXTS = 32
_LEAST_TRANSFORMERS = "5.23"
_PIXTRAL = "PixtralProcessor"
_SMOLVLM = "SmolVLMProcessor"
Made = TypeVar("Made")
_NOT_OPTIONS = {"processor_class", "auto_map", "chat_template", "image_processor", "tokenizer"}


class ImageProcessor:
    """A base's processor of images."""

    image_token: str
    """What the chat template writes for a picture."""
    token_id: int
    """The token whose embedding is replaced by features of the picture."""
    digest: str
    """Of all that determines `inputs`: classes, options, versions of libraries."""

    def __init__(self, model_path: str, bounds: PixelBounds = NO_BOUNDS) -> None:
        """Raises SpecError if the base reads no images here, or its processor has no bounds."""
        folder = Path(model_path)
        config = document_or_none(folder / "config.json") or {}
        own, options = _documents(folder)
        if not own:
            raise _refused(
                f"there is no {IMAGE_FILES[0]} in its folder, so it reads no images. Leave the "
                "lines with images out, or take a base that reads them, with all its files"
            )
        token_id = config.get("image_token_id", config.get("image_token_index"))
        if not isinstance(token_id, int):
            raise _refused(
                "its config.json has neither image_token_id nor image_token_index, so it reads no "
                "images. Leave the lines with images out, or take a base that reads them"
            )
        self.token_id = token_id
        self._processor = _processor(folder, config, own, options, bounds)
        self.image_token = self._processor.image_token
        self.digest = self._digest(options)
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._try()

    @classmethod
    def of(cls, model_path: str, bounds: PixelBounds = NO_BOUNDS) -> ImageProcessor:
        """The processor of a base's folder, with other bounds of pixels.

        Raises SpecError (param: model) if the base reads no images, or not with Pillow; (param:
        data.max_pixels or data.min_pixels) if its processor has no bounds of pixels.
        """
        return _kept(model_path, tokenizer_state(model_path), bounds)

    @property
    def published(self) -> Any:
        """The published processor, a transformers.ProcessorMixin; parts of it for films and sound
        may be missing.
        """
        return self._processor

    @property
    def size(self) -> dict[str, int]:
        """The image processor's `size`."""
        return dict(self._processor.image_processor.size)

    def inputs(self, picture: Picture) -> dict[str, np.ndarray]:
        """What the tower takes for a picture: `pixel_values` and what its class has beside, in a
        batch of one. Raises ImageError without a field.
        """
        return self.looked_at(picture)[0]

    def looked_at(self, picture: Picture) -> tuple[dict[str, np.ndarray], str]:
        """`inputs` and `replacement` at once. Raises ImageError without a field."""
        data, text = self._processed(picture)
        unused = {"rows", "cols", *self._processor.unused_input_names}
        inputs = {name: np.asarray(value) for name, value in data.items() if name not in unused}
        return inputs, text

    def replacement(self, picture: Picture) -> str:
        """The text in place of one `image_token`: placeholders, and the base's marks around and
        between them. Raises ImageError without a field.
        """
        text = self._texts.get(picture.key)
        if text is None:
            _, text = self._processed(picture)
        self._texts[picture.key] = text
        self._texts.move_to_end(picture.key)
        if len(self._texts) > _KNOWN_TEXTS:
            self._texts.popitem(last=False)
        return text

    def _processed(self, picture: Picture) -> tuple[dict[str, Any], str]:
        image = decoded(picture)
        processor = self._processor
        try:
            options = processor._merge_kwargs(
                tokenizer_init_kwargs=processor.tokenizer.init_kwargs, return_tensors="np"
            )["images_kwargs"]
            images, *_ = processor.prepare_inputs_layout(images=[image])
            data, (text,) = processor._process_images(images, **options)
        except MemoryError:
            raise
        except Exception as error:  # of any class, by the size of the picture
            width, height = image.size
            raise ImageError(
                "",
                f"is {width:,} x {height:,} pixels, and the base's image processor refuses it: "
                f"{str(error)[:200].rstrip('.')}. Give the picture another size, or leave the line "
                "out",
            ) from None
        return dict(data), text

    def _try(self) -> None:
        """Raise SpecError if the processor does not work."""
        file = io.BytesIO()
        Image.new("RGB", (64, 48), "white").save(file, "PNG")
        try:
            text = self.replacement(Picture.of(file.getvalue()))
        except ImageError as error:
            reason = f"its image processor fails for a white picture, which {error.reason}"
            raise _refused(reason) from None
        sign = self._processor.tokenizer.convert_ids_to_tokens(self.token_id)
        if not isinstance(sign, str) or sign not in text:
            raise _refused(
                f"its image processor writes no token {self.token_id} for a picture, whose "
                "embedding config.json says to replace. Take the base with the files as published"
            )

    def _digest(self, options: dict[str, Any]) -> str:
        image_processor = self._processor.image_processor
        made_by = {
            "processor": type(self._processor).__name__,
            "image_processor": type(image_processor).__name__,
            "back_end": "pil",
            "config": image_processor.to_dict(),
            "options": options,
            "decoding": DECODING,
            "libraries": [transformers.__version__, PIL.__version__],
        }
        text = json.dumps(made_by, sort_keys=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()


@lru_cache(maxsize=2)
def _kept(model_path: str, state: str, bounds: PixelBounds) -> ImageProcessor:
    """`state`: of the base's files, so that changed files are read again."""
    return ImageProcessor(model_path, bounds)


def bounded_documents(model_path: str, bounds: PixelBounds) -> dict[str, dict[str, Any]]:
    """The files of a base's image processor with other bounds of pixels, by name: those that have
    its options. None without bounds.
    """
    if not bounds:
        return {}
    size = ImageProcessor.of(model_path, bounds).size
    changed = {"size": size, _LEAST: size["shortest_edge"], _MOST: size["longest_edge"]}
    made: dict[str, dict[str, Any]] = {}
    for name in IMAGE_FILES:
        document = document_or_none(Path(model_path) / name) or {}
        if isinstance(nested := document.get("image_processor"), dict):
            made[name] = {**document, "image_processor": {**nested, **changed}}
        elif name == IMAGE_FILES[0] and document:
            made[name] = {**document, **changed}
    return made


def bounds_of(folder: Path) -> PixelBounds:
    """Those of the files that `bounded_documents` made, in this folder; none where there are
    none.
    """
    own, _ = _documents(folder)
    bounds = [value if type(value := own.get(name)) is int else None for name in (_LEAST, _MOST)]
    return PixelBounds(*bounds)


def size_of(picture: Picture) -> tuple[int, int]:
    """Width and height of a picture as it is seen, in pixels, of which none is decoded.

    Raises ImageError without a field.
    """
    return _guarded(picture, _turned)


def decoded(picture: Picture) -> Image.Image:
    """A picture's first frame as RGB in 8 bits, turned as its camera notes, on white where it is
    transparent; that of `detail: low` is at most LOW_SIDE long. Raises ImageError without a field.
    """
    return _guarded(picture, partial(_as_rgb, detail=picture.detail))


def _guarded(picture: Picture, work: Callable[[Image.Image], Made]) -> Made:
    """What `work` makes of a picture, of which only the size was read before. Raises ImageError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's on sizes, which are checked here
            with Image.open(io.BytesIO(picture.data), formats=_FORMATS) as image:
                _require_size(*image.size)
                return work(image)
    except (ImageError, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise _too_many(f"more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,}") from None
    except Exception as error:  # of any class: decoders raise what they like
        reason = "" if isinstance(error, PIL.UnidentifiedImageError) else f": {error}"
        raise ImageError(
            "",
            f"cannot be decoded{reason}. The file is damaged or cut off: save the picture again, "
            "or leave the line out",
        ) from None


def _require_size(width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise _too_many(f"{width:,} x {height:,}")
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise ImageError(
            "",
            f"is {width:,} x {height:,} pixels, and one side may be at most {MOST_ASPECT} times "
            "the other: cut the picture, or leave the line out",
        )


def _too_many(size: str) -> ImageError:
    return ImageError(
        "",
        f"has {size} pixels, and a picture may have {MOST_PIXELS:,}: make it smaller, or leave "
        "the line out",
    )


def _turned(image: Image.Image) -> tuple[int, int]:
    orientation = image.getexif().get(0x0112, 1)
    width, height = image.size
    return (height, width) if orientation in (5, 6, 7, 8) else (width, height)


def _as_rgb(image: Image.Image, detail: str) -> Image.Image:
    image.load()
    turned = ImageOps.exif_transpose(image)
    if turned.mode in ("I", "F") or turned.mode.startswith("I;"):  # grey in 16 bits
        grey = np.asarray(turned).astype(np.float64) / 257
        turned = Image.fromarray(np.clip(np.rint(grey), 0, 255).astype(np.uint8))
    if turned.has_transparency_data:
        clear = turned.convert("RGBA")
        turned = Image.new("RGBA", clear.size, "white")
        turned.alpha_composite(clear)
    seen = turned.convert("RGB")
    if detail == "low":
        seen.thumbnail((LOW_SIDE, LOW_SIDE), Image.Resampling.BICUBIC, reducing_gap=None)
    return seen


def _documents(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the image processor, and those of the processor."""
    alone, together = (document_or_none(folder / name) or {} for name in IMAGE_FILES)
    nested = together.get("image_processor")
    own = nested if isinstance(nested, dict) else alone
    classes = {"processor_class": name} if (name := alone.get("processor_class")) else {}
    return own, {**classes, **together}


def _processor(
    folder: Path,
    config: dict[str, Any],
    own: dict[str, Any],
    options: dict[str, Any],
    bounds: PixelBounds,
) -> Any:
    """The published processor, with its image processor on Pillow. Raises SpecError."""
    if not hasattr(transformers.ProcessorMixin, "replace_image_token"):
        raise _refused(
            f"transformers {transformers.__version__} is installed, and images need "
            f"{_LEAST_TRANSFORMERS}. Install it: pip install 'transformers>={_LEAST_TRANSFORMERS}'"
        )
    model_type = str(config.get("model_type"))
    kind = _processor_class(options.get("processor_class"), model_type)
    image_kind = _image_processor_class(own.get("image_processor_type"), model_type)
    own = _within(image_kind, own, bounds)
    tokenizer = load_tokenizer(str(folder))
    try:
        parts: dict[str, Any] = dict.fromkeys(kind.get_attributes())
        parts |= {"image_processor": image_kind.from_dict(own), "tokenizer": tokenizer}
        known = inspect.signature(kind.__init__).parameters
        given = {name: options[name] for name in options if name in known}
        return kind(**{k: v for k, v in given.items() if k not in _NOT_OPTIONS | {*parts}}, **parts)
    except Exception as error:  # of any class, depending on the files
        raise _refused(
            f"its {kind.__name__} cannot be made: {shown(error)}. Take the base with all its "
            "files as published"
        ) from error


def _within(kind: Any, own: dict[str, Any], bounds: PixelBounds) -> dict[str, Any]:
    """Options of an image processor with other bounds of pixels. Raises SpecError if its class has
    none.

    One that has them takes min_pixels and max_pixels, and keeps them as `size`: shortest_edge and
    longest_edge, which count pixels there.
    """
    given = {_LEAST: bounds.least, _MOST: bounds.most}
    given = {name: pixels for name, pixels in given.items() if pixels is not None}
    if not given:
        return own
    known = inspect.get_annotations(kind.valid_kwargs)
    name = next(iter(given))
    if not known.keys() >= {_LEAST, _MOST}:
        raise SpecError(
            f"data.{name} = {given[name]:,}: the base's image processor, {kind.__name__}, has no "
            "bounds of pixels: it makes all pictures of sizes of its own. Leave it out, or give "
            "detail: low to make pictures smaller before",
            param=f"data.{name}",
        )
    size = kind(**{**own, **given}).size
    if size["shortest_edge"] > size["longest_edge"]:
        other = next(iter({_LEAST, _MOST} - given.keys()))
        raise SpecError(
            f"data.{name} = {given[name]:,}: the base's own pictures have {size['shortest_edge']:,}"
            f" pixels at least and {size['longest_edge']:,} at most with it. Give data.{other} too",
            param=f"data.{name}",
        )
    return {**own, **given}


def _processor_class(named: Any, model_type: str) -> Any:
    """The class of the processor, of which parts may be missing: films and sound need packages that
    images do not. Raises SpecError.
    """
    from transformers.models.auto.auto_mappings import PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    names = PROCESSOR_MAPPING_NAMES.values()
    name = named if named in names else PROCESSOR_MAPPING_NAMES.get(model_type)
    if name == _SMOLVLM:
        need_no_num2words()
    for key in (key for key, of_key in PROCESSOR_MAPPING_NAMES.items() if of_key == name):
        module = model_type_to_module_name(key)
        path = f"transformers.models.{module}.processing_{module}"
        patched = without_torchvision() if name == _PIXTRAL else nullcontext()
        try:
            with patched:
                found = getattr(importlib.import_module(path), str(name), None)
        except ImportError:
            continue
        if found is not None:
            return type(found.__name__, (_Partial, found), {"__module__": found.__module__})
    raise _refused(
        f"transformers has no processor for its model_type {shown(model_type)} that works here. "
        "Leave the lines with images out, or take a base of another family"
    )


class _Partial:
    """A processor whose parts for films and sound are None."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> type:
        return type(argument)


def _image_processor_class(named: Any, model_type: str) -> Any:
    """The class of the image processor on Pillow. Raises SpecError."""
    from transformers.models.auto.auto_mappings import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

    base = str(named).removesuffix("Fast").removesuffix("Pil")
    known = IMAGE_PROCESSOR_MAPPING_NAMES.values()
    on_pillow = {names["pil"] for names in known if "pil" in names}
    name = next((name for name in (f"{base}Pil", base) if name in on_pillow), None)
    if name is None:
        name = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type, {}).get("pil")
    found: Any = get_image_processor_class_from_name(name) if name else None
    if found is None:
        raise _refused(
            f"transformers has no image processor on Pillow for its model_type "
            f"{shown(model_type)}. Leave the lines with images out, or take a base of another "
            "family"
        )
    return found


def _refused(reason: str) -> SpecError:
    return SpecError(f"The base cannot be trained on images: {reason}.", param="model")
