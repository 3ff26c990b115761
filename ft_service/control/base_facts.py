"""What is told of a base before anybody trains on it, and whether one can: as admission would answer a job with no options."""

from __future__ import annotations

import logging
import os
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from ft_service.bases.base_files import MAX_ENTRIES, document_or_none
from ft_service.bases.catalogue import Base, pickled_weights
from ft_service.bases.contents import BaseContents, read_config
from ft_service.bases.described import contents_or_description
from ft_service.bases.module_rules import IN_FP8
from ft_service.bases.origin import licence_of, read_origin
from ft_service.bases.wrapped import text_config
from ft_service.errors import FtError, SpecError
from ft_service.plan.admit import admit
from ft_service.plan.base import BaseShape, base_shape
from ft_service.plan.machines import Machine
from ft_service.spec import BaseModelRef, DataFileRef, JobSpec, parse_request, resolve

log = logging.getLogger(__name__)

_DTYPES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F8_E4M3": "fp8", "U8": "packed"}
_UNKNOWN = Machine("any machine", None)


@dataclass(frozen=True)
class BaseFacts:
    """None: not known, or it says nothing of it."""

    family: str | None = None
    """model_type of its decoder."""
    parameters: int | None = None
    """Of the decoder, frozen."""
    format: str | None = None
    """How its weights are published: a dtype, or the method of quantisation."""
    context: int | None = None
    """Positions that it was made for."""
    chat_template: bool = False
    """Whether it brings one; without, it trains on bare text, or a job brings one."""
    licence: str | None = None
    repository: str | None = None
    """ORG/NAME, where `ft pull` has fetched it."""
    commit: str | None = None
    trainable: bool = True
    why_not: str | None = None


def base_facts(folder: Path, name: str) -> BaseFacts:
    """The facts of a base, remembered as long as no file of its folder comes, goes, or changes in size or time."""
    try:
        with os.scandir(folder) as entries:
            states = tuple(sorted(_state(entry) for entry in islice(entries, MAX_ENTRIES + 1)))
    except OSError as error:
        return BaseFacts(trainable=False, why_not=f"its folder cannot be read: {error.strerror}")
    return _facts(folder, name, states)


def is_tunable(base: Base) -> bool:
    """Whether a job with no options would be accepted on a base."""
    return base_facts(base.path, base.name).trainable


def refuse_untrainable(folder: Path, name: str) -> None:
    """Ask admission of a job with no options on this base, of which the weights need not be there yet. Raises SpecError."""
    contents, whole = contents_or_description(folder)
    base_shape(contents)
    if whole:
        admit(_plain_job(folder, name), _UNKNOWN)


@lru_cache(maxsize=1024)
def _facts(folder: Path, name: str, states: tuple[tuple[str, int, int], ...]) -> BaseFacts:
    """`states`: of the files, by which the answer is remembered."""
    origin = read_origin(folder)
    known = {
        "licence": licence_of(folder),
        "chat_template": _has_template(folder),
        "repository": origin.repository if origin else None,
        "commit": origin.commit if origin else None,
    }
    config: Any = {}
    try:
        if (pickled := pickled_weights(folder)) is not None:
            raise SpecError(
                f"It has no weights in safetensors, only {pickled}, which is pickled and never read.", param="model"
            )
        config = text_config(read_config(folder))
        known["family"] = str(config.get("model_type"))[:80]
        contents, _ = contents_or_description(folder)
        shape = base_shape(contents)
        known |= {"parameters": sum(weight.numel for weight in shape.weights), "context": shape.shape.max_positions}
        known["format"] = _format(contents, shape)
        refuse_untrainable(folder, name)
    except FtError as error:
        return BaseFacts(**known, trainable=False, why_not=error.message)
    except OSError as error:
        return BaseFacts(**known, trainable=False, why_not=f"its folder cannot be read: {error.strerror}")
    except Exception as error:  # one folder must not hide the others; whatever is wrong with it, it cannot be tuned
        log.exception("The base in %s cannot be judged.", folder)
        return BaseFacts(
            **known, trainable=False, why_not=f"it cannot be judged ({type(error).__name__}); see the server's log"
        )
    return BaseFacts(**known)


def _plain_job(folder: Path, name: str) -> JobSpec:
    request = parse_request({"model": name, "training_file": "none", "distributed": {"nproc_per_node": 1}})
    return resolve(
        request,
        job_id="",
        organization="local",
        model=BaseModelRef(name=name, path=str(folder)),
        training_data=DataFileRef(name="", path="", sha256=""),
        validation_data=None,
        seed=0,
        gpus=0,
    )


def _format(contents: BaseContents, shape: BaseShape) -> str | None:
    held = Counter(weight.held for weight in shape.weights if weight.held is not None)
    if held:
        most_held = held.most_common(1)[0][0]
        return "fp8" if most_held in IN_FP8 else most_held
    quantized = contents.config.get("quantization_config")
    if isinstance(quantized, dict) and quantized.get("quant_method"):
        return str(quantized["quant_method"])
    dtypes: Counter[str] = Counter()
    for tensor in contents.tensors:
        dtypes[tensor.dtype] += tensor.bytes
    most = dtypes.most_common(1)
    return _DTYPES.get(most[0][0], most[0][0].lower()) if most else None


def _has_template(folder: Path) -> bool:
    if any(folder.glob("chat_template*")):
        return True
    return bool((document_or_none(folder / "tokenizer_config.json") or {}).get("chat_template"))


def _state(entry: os.DirEntry[str]) -> tuple[str, int, int]:
    """Name, time of the last change in ns and bytes of an entry; of a link that leads nowhere its own."""
    try:
        state = entry.stat()
    except OSError:
        state = entry.stat(follow_symlinks=False)
    return entry.name, state.st_mtime_ns, state.st_size
