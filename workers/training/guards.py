"""Checks that stop a job whose numbers cannot be right, before its adapter is used.

Trainers that shard quantised weights have been seen to train with garbage, silently. So at the
start every rank proves that what a gather delivers is what the ranks read, and while it trains each
step's numbers must be possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ft_service.bases.adapter_names import is_lora
from ft_service.bases.module_rules import refuse_without_position
from ft_service.data.tokens.token_set import TokenSet
from ft_service.errors import SpecError
from workers.base.load import own_rows, plain_name
from workers.job.training_state import JobState
from workers.model.multimodal import causal_model, text_decoder
from workers.model.whole_modules import EmbeddedRows
from workers.quant.local_rows import local_rows
from workers.quant.rowwise import RowQuantized
from workers.ranks.runtime import TrainingError
from workers.training.objective import BatchSums

STEPS_UNTIL_CHANGE = 3
"""Optimizer steps of an attempt after which some lora_B must have changed, and each of these on all
ranks with rows of it; of what is trained whole all must, but for rows of an embedding whose tokens
did not occur.
"""
_CHUNK = 1 << 22


def checksum(tensor: Tensor) -> int:
    """Return 64 bits that depend on a tensor's bytes and their positions.

    Finds mistakes, not attacks.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    padded = nn.functional.pad(data, (0, -data.numel() % 8)).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, padded.numel(), _CHUNK):
        words = padded[start : start + _CHUNK]
        weights = (
            torch.arange(start, start + words.numel(), dtype=torch.int64, device=words.device) * 2
            + 1
        )
        total += (words * weights).sum()  # wraps around, on every device alike
    return int(total)


def check_gathered_weights(model: nn.Module, compute_dtype: torch.dtype) -> None:
    """Gather every group once and compare, row by row, with what each rank holds.

    Called by all ranks together.

    `compute_dtype`: to which plain weights are converted as they are gathered. Raises TrainingError
    on all ranks, naming weights that differ. Does nothing on an unsharded model.
    """
    wrong: list[str] = []
    for group_name, group in model.named_modules():
        if not isinstance(group, FSDPModule):
            continue
        expected = {
            name: _checksums_of_all_ranks(p, compute_dtype)
            for name, p in _own_parameters(group)
            if isinstance(p, DTensor)
        }
        group.unshard()
        gathered: dict[str, Any] = dict(_own_parameters(group))
        for name, of_ranks in expected.items():
            if _checksums_by_rows(gathered[name], len(of_ranks)) != of_ranks:
                wrong.append(plain_name(f"{group_name}.{name}".lstrip(".")))
        group.reshard()
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, wrong)
    wrong_anywhere = sorted({name for names in everyone for name in names})
    if wrong_anywhere:
        raise TrainingError(
            f"{len(wrong_anywhere)} weights are not what was read once they are gathered, the "
            f"first: {wrong_anywhere[0]}. "
            "This is a fault of the service or of its torch version, not of the job; please "
            "report it.",
            code="gathered_weights_differ",
        )


def check_ids(samples: TokenSet, rows: int) -> None:
    """Raises SpecError for a token id without a row in the embedding. `rows`: of the embedding.

    The tokenizer is compared with the base before a job starts; its files may have changed since.
    """
    if samples.largest_id < rows:  # the usual case, in which no token is read
        return
    # Of what is left of them once cut.
    largest = max((int(sample.ids.max(initial=-1)) for sample in samples), default=-1)
    if largest >= rows:
        raise SpecError(
            f"The base's tokenizer makes token {largest} of the data, and the base's embedding "
            f"has {rows} rows, for ids up to "
            f"{rows - 1}: the tokenizer is another base's, or tokens were added to it and no rows "
            "to the embedding.",
            param="model",
            code="vocabulary_too_small",
        )


def check_positions(model: nn.Module, *sets: TokenSet) -> None:
    """Raises SpecError for samples that the loaded model has no positions for
    (`refuse_without_position`): the plan knows them only once they are counted.
    """
    longest = max((int(samples.lengths.max()) for samples in sets if len(samples)), default=0)
    refuse_without_position(longest, *positions_of(model))


def positions_of(model: nn.Module) -> tuple[int | None, dict[str, int]]:
    """Positions of a base, None: it does not say; and the rows of its embeddings other than the
    tokens', by their weight.
    """
    causal = causal_model(model)
    positions = getattr(text_decoder(causal).config, "max_position_embeddings", None)
    tokens = causal.get_input_embeddings()
    others = {
        f"{plain_name(name)}.weight": module.num_embeddings
        for name, module in causal.named_modules()
        if isinstance(module, nn.Embedding) and module is not tokens
    }
    return positions if isinstance(positions, int) else None, others


def _own_parameters(group: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a group that belong to no group inside it."""
    inner = {
        id(p)
        for m in group.modules()
        if m is not group and isinstance(m, FSDPModule)
        for _, p in _parameters(m)
    }
    return ((name, p) for name, p in _parameters(group) if id(p) not in inner)


def _parameters(group: Any) -> Iterator[tuple[str, nn.Parameter]]:
    return group.named_parameters()


def _parts(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.parts if isinstance(weight, RowQuantized) else (weight,)


def _checksums_of_all_ranks(parameter: DTensor, compute_dtype: torch.dtype) -> list[list[int]]:
    """Checksums of the parts of each rank's rows, by rank of the shard group."""
    mesh = parameter.device_mesh
    local = parameter.to_local()
    rows = local.shape[0]
    parts = [part[:rows] for part in _parts(local)]  # a shard may hold padding rows behind its own
    if not isinstance(local, RowQuantized):
        parts = [part.to(compute_dtype) for part in parts]
    checksums: list[list[int]] = [[] for _ in range(mesh.size(mesh.ndim - 1))]
    dist.all_gather_object(
        checksums, [checksum(part) for part in parts], group=mesh.get_group(mesh.ndim - 1)
    )
    return checksums


def _checksums_by_rows(weight: Tensor, ranks: int) -> list[list[int]]:
    cuts = [own_rows(weight.shape[0], rank, ranks) for rank in range(ranks)]
    return [[checksum(part[start:end]) for part in _parts(weight)] for start, end in cuts]


class AdapterWatch:
    """Whether training changes the adapter at all, every part of it, and each part on every rank
    that holds rows of it; and so what is trained whole (`lora.modules_to_save`).

    A rank whose gradients get lost does not show in the loss: the others' rows learn, and 1/N of
    every lora_B is trained.
    """

    def __init__(
        self, job: JobState, warn: Callable[[str], None], embedded: EmbeddedRows | None = None
    ) -> None:
        """`warn`: called with a sentence on the modules whose adapters do not change.

        `embedded`: None: no embedding is trained whole, or it is the head too, of which every row
        has a gradient.
        """
        self._adapters = [
            _Watched(name, p) for name, p in job.parameters.items() if ".lora_B." in name
        ]
        self._whole = [
            _Watched(name, p, job.optimizer.first_moment(name))
            for name, p in job.parameters.items()
            if not is_lora(name)
        ]
        self._embedded = embedded
        self._warn = warn
        self._before = self._checksums()
        self._steps = 0

    def after_step(self, learning_rate: float) -> None:
        """Call after every optimizer step, on all ranks.

        Raises TrainingError if for too long nothing has changed, or rows of some ranks only.

        The first step after which each adapter has changed everywhere or nowhere says which get no
        gradient.
        """
        if learning_rate <= 0 or self._steps >= STEPS_UNTIL_CHANGE:
            return
        self._steps += 1
        ranks = self._ranks()
        adapters = ranks[: len(self._adapters)]
        whole = ranks[len(self._adapters) :]
        changed = [count.changed > 0 for count in adapters]
        missing = [it for it, count in zip(self._whole, whole, strict=True) if not count.changed]
        partly = [i for i, count in enumerate(ranks) if 0 < count.changed < count.holding]
        if (partly or missing or not any(changed)) and self._steps < STEPS_UNTIL_CHANGE:
            return
        self._steps = STEPS_UNTIL_CHANGE
        if self._embedded is not None:
            self._embedded.close()
        if partly:
            raise _partly_changed([self._watched[i] for i in partly], ranks[partly[0]])
        if missing:
            raise _unchanged(missing[0].what)
        unchanged = [
            it.module
            for it, is_changed in zip(self._adapters, changed, strict=True)
            if not is_changed
        ]
        if any(changed) and unchanged:
            more = f" and {len(unchanged) - 3} more" if len(unchanged) > 3 else ""
            self._warn(
                f"The adapters of {len(unchanged)} modules get no gradient and stay as they were: "
                f"{', '.join(unchanged[:3])}"
                f"{more}. Leave them out of lora.target_modules."
            )
        if not any(changed):
            raise _unchanged("lora_B")

    @property
    def _watched(self) -> list[_Watched]:
        return [*self._adapters, *self._whole]

    def _ranks(self) -> list[_Ranks]:
        """How many ranks hold rows of each that is watched, and on how many of them these have
        changed.
        """
        here = [
            all(new != old for new, old in zip(now, before, strict=True))
            for now, before in zip(self._checksums(), self._before, strict=True)
        ]
        holds = [local_rows(it.parameter).numel() > 0 for it in self._watched]
        if (
            self._embedded is not None
        ):  # rows without a gradient stay as they were in a healthy job, too
            i = [it.name for it in self._watched].index(self._embedded.name)
            holds[i] = self._embedded.reached(self._watched[i].parameter) or here[i]
        counts = torch.tensor([here, holds], dtype=torch.int32, device=_device(self._watched))
        dist.all_reduce(counts)
        return [_Ranks(*of_adapter) for of_adapter in counts.t().tolist()]

    def _checksums(self) -> list[list[int]]:
        return [[checksum(local_rows(tensor)) for tensor in it.tensors] for it in self._watched]


@dataclass(frozen=True)
class _Watched:
    """A lora_B, or a parameter that is trained whole."""

    name: str
    parameter: nn.Parameter
    moment: Tensor | None = None
    """The first moment of what is trained whole: weight decay alone changes the parameter, and
    leaves this at zero.
    """

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that all change once a gradient has come."""
        return [self.parameter] if self.moment is None else [self.parameter, self.moment]

    @property
    def module(self) -> str:
        return self.name.removeprefix("base_model.model.").partition(".lora_B.")[0]

    @property
    def what(self) -> str:
        return (
            f"the lora_B of {self.module}"
            if self.moment is None
            else f"{self.module} (lora.modules_to_save)"
        )


@dataclass(frozen=True)
class _Ranks:
    """Numbers of ranks: those on which a parameter has changed, and those that hold rows of it
    which should.
    """

    changed: int
    holding: int


def _partly_changed(watched: list[_Watched], ranks: _Ranks) -> TrainingError:
    """The error for parameters that have changed on some of their ranks.

    `ranks`: those of the first.
    """
    return TrainingError(
        f"{len(watched)} parameters are trained on some ranks only, the first: of "
        f"{watched[0].what} the rows on "
        f"{ranks.changed} of {ranks.holding} ranks have changed in {STEPS_UNTIL_CHANGE} optimizer "
        "steps, those on the others "
        "never. Gradients are lost between the ranks. This is a fault of the service or of its "
        "torch version, not of the job; "
        "please report it.",
        code="adapter_partly_unchanged",
    )


def _unchanged(what: str) -> TrainingError:
    return TrainingError(
        f"Nothing of {what} has changed in {STEPS_UNTIL_CHANGE} optimizer steps with a learning "
        "rate above 0: no gradient "
        "reaches it.",
        code="adapter_unchanged",
    )


def _device(watched: list[_Watched]) -> torch.device:
    return watched[0].parameter.device if watched else torch.device("cpu")


def check_step(step: int, sums: BatchSums, grad_norm: float) -> None:
    """Raises TrainingError, on all ranks alike, before an impossible step gets into a checkpoint.

    `step`: from 1.
    """
    if not (math.isfinite(sums.loss) and math.isfinite(grad_norm)):
        what = "loss" if not math.isfinite(sums.loss) else "gradient norm"
        raise TrainingError(
            f"At step {step} the {what} was not a finite number. Lower training.learning_rate, "
            "or look at the samples of that step."
        )
    if sums.is_impossible:
        raise TrainingError(
            f"At step {step} the loss of {sums.targets} target tokens was exactly 0, although not "
            "all of them were "
            "the likeliest: the weights are not what they should be.",
            code="zero_loss",
        )
