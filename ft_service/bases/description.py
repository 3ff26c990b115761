"""The description of a base: names, shapes and layouts that the training code found, as a JSON
document.

`python -m workers.describe FOLDER` writes it (workers/describe.py); the plan, admission, the
catalogue and `ft models` read it. Nothing else derives a name, a shape or a layout of a base.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from ft_service import __version__, installation
from ft_service.bases.base_files import MAX_ENTRIES, open_base_file, read_bytes
from ft_service.bases.module_rules import OuterModules, WeightNames, kept_plain
from ft_service.bases.safetensors_header import HEADER
from ft_service.errors import SpecError
from ft_service.host.processor import Products
from ft_service.spec import WeightFormat

Kind = Literal["linear", "experts", "embedding", "head", "router", "norm", "bias", "other"]


@dataclass(frozen=True)
class Weight:
    """One frozen parameter of the model."""

    module: str
    """Full name of the module that holds it; for a stack of experts with the stack's name
    (`….experts.gate_up_proj`).
    """
    parameter: str
    """The module's name for it: `weight`, `bias` or another."""
    shape: tuple[int, ...]
    """Logical shape in the model; a stack of experts as [experts · out, in]."""
    kind: Kind
    layer: int | None
    """Number of the decoder layer; None: outside the decoder layers."""
    held: WeightFormat | None = None
    """Format in which a base that is published quantised stores it; None: plain."""
    files: str = ""
    """Name of its tensor in the base's files, `*` for the numbers of experts; empty: the weights
    are not downloaded yet.
    """
    dtype: str = ""
    """Dtype in the files, as safetensors writes it: BF16, F8_E4M3, U8, …"""
    adapted: bool = False
    """Whether `lora.target_modules: all-linear` adapts it."""
    kept_fp32: bool = False
    """Whether the model stores it in fp32 although others are in bf16: some architectures do so
    with routers. Every rank holds it whole.
    """

    @property
    def name(self) -> str:
        return f"{self.module}.{self.parameter}"

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def numel_of_row(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def numel(self) -> int:
        return self.rows * self.numel_of_row


@dataclass(frozen=True)
class FusedParts:
    """The parts of a decoder that fused kernels compute on a GPU (workers/patches/fused_layers.py).

    They keep less for the backward than the model's own operations do.
    """

    norms: int = 0
    """Norms of the hidden state in a layer: of every layer at least so many."""
    head_norms: bool = False
    """Whether the norms of queries and keys are among what they compute."""
    last_norm: bool = False
    """Whether the norm behind the last layer is."""
    gate: bool = False
    """Whether a feed-forward of every layer is; beside experts the shared one, since they do not
    compute experts' gating.
    """


@dataclass(frozen=True)
class Dimensions:
    """Sizes of the decoder, for planning activations.

    `q`, `kv`: heads × head size of queries, and of keys or values.
    """

    layers: int
    hidden: int
    heads: int
    q: int
    kv: int
    intermediate: int
    vocabulary: int
    """Rows of the embedding or of the head, whichever has more."""
    norms: int
    """Norms of the hidden state in a layer."""
    head_norms: bool
    """Whether queries and keys have norms too."""
    gated: bool
    """Whether the feed-forward multiplies two projections of its input."""
    experts: int
    """Experts per layer; 0: a dense feed-forward."""
    experts_per_token: int
    expert_intermediate: int
    max_positions: int | None
    """Context length in tokens; None: the config does not limit it."""
    fused: FusedParts = FusedParts()
    shared_intermediate: int = 0
    """Width of what every token passes beside the experts: shared experts, or a dense
    feed-forward.
    """
    shared_scaled: bool = False
    """Whether a gate of one number a token multiplies what shared experts give."""
    silu_experts: bool = False
    """Whether experts are gated by SiLU of half of a stack's rows, which is computed again in the
    backward.
    """


@dataclass(frozen=True)
class ImageFacts:
    """What training needs to know of the towers of a base that reads pictures."""

    token_id: int
    """The token whose embedding is replaced by features of a picture."""
    early_layers: int
    """So many of the first decoder layers get features of their own (DeepStack)."""
    tower_weights: int
    """Numbers in the towers' weights, which are read and computed in fp32."""
    two_way: tuple[str, ...] = ()
    """Kinds of decoder layers in which the tokens of a picture see each other in both directions,
    as its config names them (`layer_types`).
    """

    @property
    def tower_bytes(self) -> int:
        """Bytes of the towers' weights on a rank, in fp32."""
        return 4 * self.tower_weights


@dataclass(frozen=True)
class Versions:
    """Versions of the packages that described a base; another version may build another model from
    the same config.
    """

    transformers: str
    torch: str
    peft: str
    ft_service: str
    sources: str = ""
    """Digest of the code that describes (`sources_digest`): a development tree changes without a
    new version.
    """

    @classmethod
    def installed(cls) -> Versions:
        """Versions of this environment, read without an import.

        Raises LookupError if a package is not installed.
        """
        try:
            return cls(
                transformers=version("transformers"),
                torch=version("torch"),
                peft=version("peft"),
                ft_service=__version__,
                sources=sources_digest(installation.ROOT, Path(__file__).parents[1]),
            )
        except PackageNotFoundError as error:
            raise LookupError(f"{error.name} is not installed here") from None


_WORKERS_SOURCES = ("base", "images", "layers", "model", "patches")


@cache
def sources_digest(root: Path, core: Path) -> str:
    """Digest of the source files that decide what a description says: 16 hexadecimal digits, the
    same in the repository and in its wheel. `root`: the folder with `workers`; `core`: that of
    `ft_service`.
    """
    digest = hashlib.sha256()
    workers = root / "workers"
    paths = [
        workers / "describe.py",
        *(path for name in _WORKERS_SOURCES for path in sorted((workers / name).rglob("*.py"))),
    ]
    named = [(path.relative_to(root).as_posix(), path) for path in paths]
    named += [
        (f"ft_service/{path.relative_to(core).as_posix()}", path)
        for path in sorted((core / "bases").rglob("*.py"))
    ]
    for name, path in named:
        digest.update(f"\n{name}\n".encode() + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Description:
    """A base that can be tuned. It is equal only to itself, so that caches can use it as a key."""

    model_type: str
    """Model type of the decoder, as in config.json."""
    architecture: str
    """Class of transformers that is built from it."""
    dimensions: Dimensions
    weights: tuple[Weight, ...]
    """Weights in the model's order, those outside the decoder layers first."""
    layout: str
    """Text that says how the files store the weights: `bf16`, `bitsandbytes NF4`, `FP8 in blocks of
    128x128`, …
    """
    outer: OuterModules
    """Embedding and output head."""
    loss_in_chunks: bool
    """Whether the loss is computed inside the output head, a few tokens' logits at a time."""
    padded_because: str | None = None
    """Why samples are padded and not packed; None: they are packed."""
    whole_because: str | None = None
    """Why ranks cannot share a sample (distributed.context_parallel), as the end of a sentence;
    None: they can.
    """
    not_adapted: Mapping[str, str] = field(default_factory=dict[str, str])
    """Full name of a linear layer that cannot have an adapter → reason."""
    row_wise: tuple[str, ...] = ()
    """Full names of the feed-forwards that compute every token by itself, so that they can be
    computed by tiles of rows.
    """
    unkept: Mapping[str, str] = field(default_factory=dict[str, str])
    """Module → layout that its weight is published in, of those that no format keeps."""
    downloaded: bool = True
    """Whether the weights are in the folder; False: described by config.json and the index
    alone.
    """
    warnings: tuple[str, ...] = ()
    """Sentences that a job's owner should read."""
    images: ImageFacts | None = None
    """None: its pictures cannot be learned from."""
    tower_linears: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Full name of a linear layer outside the text part → rows and columns of its weight."""
    no_images_because: str | None = None
    """Why not, as the end of a sentence. None: it is a base of text, or they can."""
    products: Products | None = None
    """Matrix products on the processor of the process that described the base; None: not
    measured.
    """
    teacher: Description | None = None
    """That of the base which teaches a job (ft_service/plan/teacher.py); no document has it."""

    @cached_property
    def quantizable(self) -> tuple[Weight, ...]:
        """The weights in the precision map: linear layers and stacks of experts inside the decoder
        layers.
        """
        inside = [
            w for w in self.weights if w.layer is not None and w.kind in ("linear", "experts")
        ]
        return tuple(w for w in inside if not kept_plain(w.module) and not w.kept_fp32)

    @cached_property
    def tiles(self) -> bool:
        """Whether the feed-forward of every layer can be computed by tiles of rows."""
        layers = {w.module.split(f".{w.layer}.")[0] + f".{w.layer}" for w in self.quantizable}
        tiled = {name.rpartition(".")[0] for name in self.row_wise}
        return bool(layers) and layers <= tiled

    @cached_property
    def held(self) -> Mapping[str, WeightFormat]:
        """Format of the linear layers and stacks of experts that the base holds quantised, by
        module name.
        """
        layers = [
            w
            for w in self.weights
            if w.kind in ("linear", "experts", "head") and not kept_plain(w.module)
        ]
        return {w.module: w.held for w in layers if w.held is not None and not w.kept_fp32}

    @cached_property
    def linears(self) -> tuple[Weight, ...]:
        """Linear layers except the output head."""
        return tuple(w for w in self.weights if w.kind == "linear")

    @cached_property
    def experts(self) -> tuple[Weight, ...]:
        """Stacks of experts."""
        return tuple(w for w in self.weights if w.kind == "experts")

    @cached_property
    def names(self) -> WeightNames:
        """The module names that patterns of a spec are matched against."""
        weighted = {w.module: w for w in self.weights if len(w.shape) > 1}
        stacks = {w.module.rpartition(".")[0] for w in self.experts}
        outside = [name for name, weight in weighted.items() if weight.layer is None]
        return WeightNames(
            [w.module for w in self.quantizable], outside, [*weighted, *sorted(stacks)]
        )


def facts_of_images(base: Description) -> ImageFacts:
    """What training needs to know of a base's towers.

    Raises SpecError for a base whose pictures cannot be learned from.
    """
    if base.images is not None:
        return base.images
    raise SpecError(
        f"The base does not learn from images here: {why_no_images(base)}. Leave the lines with "
        "images out, or take another base.",
        param="model",
    )


def why_no_images(base: Description) -> str:
    """Why a base without facts of images reads none here, as the end of a sentence."""
    return (base.no_images_because or "it is a text model").rstrip(".")


@dataclass(frozen=True)
class Refusal:
    """Why a base cannot be tuned."""

    message: str
    param: str | None = "model"
    code: str | None = None
    model_type: str | None = None
    """Model type, where config.json could be read."""

    def error(self) -> SpecError:
        return SpecError(self.message, param=self.param, code=self.code)


@dataclass(frozen=True)
class Described:
    """The document. Exactly one of `base` and `refused` is set."""

    key: str
    """Digest of config.json, the files' headers and the versions (`description_key`)."""
    versions: Versions
    base: Description | None = None
    refused: Refusal | None = None

    def description(self) -> Description:
        """The description. Raises SpecError with the refusal's message."""
        if self.base is None:
            raise (self.refused or Refusal("The base has no description.")).error()
        return self.base


_DOCUMENT = TypeAdapter(Described)


def write_described(document: Described) -> bytes:
    """The document as JSON."""
    return _DOCUMENT.dump_json(document, exclude_defaults=True)


def read_described(text: bytes) -> Described:
    """A document that `write_described` wrote. Raises ValueError for anything else."""
    try:
        document = _DOCUMENT.validate_json(text)
    except ValidationError as error:
        raise ValueError(
            "not a description of a base: "
            f"{error.errors(include_url=False, include_input=False)[:1]}"
        ) from None
    if (document.base is None) == (document.refused is None):
        raise ValueError(
            "not a description of a base: it holds both a base and a refusal, or neither of them"
        )
    return document


READ_WHOLE = ("config.json", "hf_quant_config.json", "model.safetensors.index.json")
"""Files that a description depends on, in addition to the headers and lengths of the files with
weights.
"""


def description_key(folder: Path, versions: Versions) -> str:
    """Digest of a base's files and the describer's versions: 64 hexadecimal digits.

    No weight is read.

    Raises SpecError for a file that may not be opened, OSError for a folder that cannot be read.
    """
    digest = hashlib.sha256(repr(astuple(versions)).encode())
    for name in READ_WHOLE:
        if (folder / name).is_file():
            digest.update(
                f"\n{name}\n".encode() + hashlib.sha256(read_bytes(folder / name)).digest()
            )
    for path in sorted(folder.glob("*.safetensors"))[:MAX_ENTRIES]:
        with open_base_file(path) as file:
            first = file.read(8)
            header = file.read(min(int.from_bytes(first, "little"), HEADER.bytes))
            length = file.seek(0, 2)
        digest.update(f"\n{path.name}\n{length}\n".encode() + hashlib.sha256(header).digest())
    return digest.hexdigest()
