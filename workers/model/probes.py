"""Facts about a base that no config tells, found by running a small copy of it on the CPU.

Whether its tokens see those behind them, whether samples can be packed, whether the head is its
last step, which linear layers an adapter has no effect on, and which adapters PEFT could not load
again. Training tries the loaded model again where the real weights matter
(workers/training/packing.py).
"""

from __future__ import annotations

import warnings as python_warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ft_service.bases.description import Description
from ft_service.bases.module_rules import last_name
from ft_service.errors import SpecError
from ft_service.spec import LoraOptions
from workers.layers.segments import CURRENT
from workers.model.attention import stay_within_segments
from workers.model.feed_forwards import row_wise_parts
from workers.model.head import loss_in_head
from workers.model.lora import add_adapters, linear_names
from workers.model.multimodal import causal_model, decoder_layers, text_decoder
from workers.model.packed_trial import (
    NotCausalError,
    NotRunnableError,
    logits_apart,
    settle_attention,
    trial_samples,
)
from workers.model.small_copy import DENSE, SmallCopy, put_all_experts, small_copy

_CPU = torch.device("cpu")
_WORDS = 1024
"""Rows of a head that is cut to be tried."""
_LOUD = 4.0
"""Standard deviation of the logits that a head is tried with: large enough for a cap on them to
show.
"""
_EQUAL = 1e-4
"""Largest relative difference of a loss, or of a gradient, in fp32."""
NO_EFFECT = (
    "an adapter on it would change nothing: the model never calls the layer, or no "
    "gradient comes back to it"
)


@dataclass(frozen=True)
class Probed:
    """What the probes found."""

    causal: bool | None
    """Whether no token sees those behind it. None: the copy could not be run."""
    padded_because: str | None = None
    """Why samples are padded and not packed, as the end of a sentence; None: they can be packed."""
    loss_in_chunks: bool = False
    """Whether the head is the model's last step, but for `final_logit_softcapping`."""
    not_adapted: Mapping[str, str] = field(default_factory=dict[str, str])
    """Full name of a linear layer of the base → why an adapter on it would be in vain."""
    row_wise: tuple[str, ...] = ()
    """Full names of the feed-forwards that compute every token by itself."""
    refused: str | None = None
    """Why the base cannot be tuned, for users."""
    warnings: tuple[str, ...] = ()
    """Sentences for users."""

    @classmethod
    def of(cls, base: Description) -> Probed:
        """What a description says that the probes found."""
        return cls(
            True,
            base.padded_because,
            base.loss_in_chunks,
            base.not_adapted,
            base.row_wise,
            warnings=base.warnings,
        )


PROBED: dict[str, Probed] = {}
"""What the probes found in this process, by class, attention and config."""


def probe(base: PreTrainedModel) -> Probed:
    """What the probes find of a base that `base_on_meta` built, which is left as it is.

    One config is probed once a process.

    Takes seconds and some hundred megabytes, whatever the size of the base. Computes on the CPU
    alone, without collectives.
    """
    key = f"{type(base).__name__} {text_decoder(base).config._attn_implementation} {base.config!r}"
    if key not in PROBED:
        PROBED[key] = _probe(base)
    return PROBED[key]


def _probe(base: PreTrainedModel) -> Probed:
    copy = None
    try:
        copy = small_copy(base)
        stay_within_segments(copy.model)
        found = _tried(copy)
    except NotCausalError as error:
        return Probed(causal=False, refused=str(error))
    except NotRunnableError as error:
        if copy is None or not copy.leaves_out:  # else it may fail because those layers are missing
            return Probed(causal=None, refused=str(error))
        found = _untried(error.__cause__ or error)
    except SpecError as error:  # building the base for training raises the same
        return Probed(causal=None, refused=str(error))
    except Exception as error:  # architectures run their own code
        found = _untried(error)
    finally:
        CURRENT.use(None)
    as_trained = deepcopy(base)
    put_all_experts(as_trained, decoder_layers(as_trained))
    not_adapted, refused = settle_in_peft(as_trained, found.not_adapted)
    return replace(found, not_adapted=not_adapted, refused=refused)


def _untried(error: BaseException) -> Probed:
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return Probed(
        causal=None,
        padded_because="a small copy of the base could not be run to find out whether they can be "
        "packed",
        warnings=(
            f"The base could not be tried on a small copy of it ({said}): samples are padded, the "
            "loss is taken on whole "
            "logits, and whether its tokens see those behind them is found out before training.",
        ),
    )


def _tried(copy: SmallCopy) -> Probed:
    """Raises NotCausalError, and what the copy raises."""
    padded_because = settle_attention(copy.model, _CPU, torch.float32)
    unmoved = without_effect(copy)
    row_wise = row_wise_parts(copy)
    return Probed(True, padded_because, works_in_chunks(copy.model), unmoved, row_wise)


# Adapters
# ------------------------------------------------------------------------------


def without_effect(copy: SmallCopy) -> dict[str, str]:
    """Full names of the base's linear layers whose adapters do not change a logit, with the reason.

    Raises RuntimeError where the logits are not finite.
    """
    names = [
        name
        for name in linear_names(copy.model)
        if not copy.model.get_submodule(name).weight.is_meta
    ]
    with _adapted(copy.model, names) as adapters:
        logits = torch.cat(logits_apart(copy.model, trial_samples(copy.model), _CPU))
        if not logits.isfinite().all():
            raise RuntimeError("its logits are not finite")
        logits.mul(
            torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
        ).sum().backward()
    unmoved = [
        name for name, adapter in adapters.items() if adapter.grad is None or not adapter.grad.any()
    ]
    return dict.fromkeys((own for name in unmoved for own in copy.alike_of(name)), NO_EFFECT)


@contextmanager
def _adapted(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """While it is entered, each of these layers has an adapter of rank 1 that is zero; yields their
    B matrices by name.
    """
    generator = torch.Generator().manual_seed(0)
    handles: list[RemovableHandle] = []
    adapters: dict[str, Tensor] = {}
    for name in names:
        layer: Any = model.get_submodule(name)
        down = torch.randn(1, layer.in_features, generator=generator) / layer.in_features**0.5
        adapters[name] = torch.zeros(layer.out_features, 1, requires_grad=True)
        handles.append(layer.register_forward_hook(partial(_add, down, adapters[name])))
    try:
        yield adapters
    finally:
        for handle in handles:
            handle.remove()


def _add(
    down: Tensor, up: Tensor, _layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    return output + F.linear(F.linear(inputs[0], down), up)


def settle_in_peft(
    base: PreTrainedModel, without: Mapping[str, str]
) -> tuple[dict[str, str], str | None]:
    """Whether PEFT puts adapters on the linear layers of a base with our experts in it, and loads
    them again.

    `without`: layers that get none, with reasons. Returns these and those that PEFT refuses; and
    why the base cannot be tuned, None: it can.
    """
    not_adapted = dict(without)
    names = linear_names(base)
    while True:
        try:
            add_adapters(
                deepcopy(base), LoraOptions(r=1), shared_experts=True, not_adapted=not_adapted
            )
        except SpecError as error:
            said = str(error)
        else:
            return not_adapted, None
        of_last = {last_name(name): name for name in names if name not in not_adapted}
        words = {last: _refused_by_peft(base, name) for last, name in of_last.items()}
        unfit = {last: why for last, why in words.items() if why is not None and why in said}
        if not unfit:
            return not_adapted, said
        not_adapted.update(
            (name, f"PEFT says: {unfit[last_name(name)]}")
            for name in names
            if last_name(name) in unfit
        )


def _refused_by_peft(base: PreTrainedModel, name: str) -> str | None:
    alone: Any = nn.Module()  # with the base's config, by which PEFT decides
    alone.config = base.config
    *path, last = name.split(".")
    place = alone
    for part in path:
        place.add_module(part, nn.Module())
        place = place.get_submodule(part)
    place.add_module(last, nn.Linear(1, 1, device="meta"))
    try:
        with python_warnings.catch_warnings(action="ignore"):
            get_peft_model(alone, LoraConfig(r=1, target_modules=[name]), low_cpu_mem_usage=True)
    except ValueError as error:
        return str(error)
    return None


# The head
# ------------------------------------------------------------------------------


def works_in_chunks(model: PreTrainedModel) -> bool:
    """Whether the loss that is taken inside the head, and its gradient in the hidden states, are
    those of the whole logits.

    The head of the copy gets other weights.
    """
    try:
        _cut_head(model)
        whole, of_whole = _loss(model, in_head=False)
        inside, of_inside = _loss(model, in_head=True)
    except (
        Exception
    ):  # architectures do with logits what they like, and get one number in their place
        return False
    return _is_near(inside, whole) and _is_near(of_inside, of_whole)


def _cut_head(model: PreTrainedModel) -> None:
    """Give the head dense weights of its own, of its first words alone where it is large."""
    head: Any = model.get_output_embeddings()
    words = len(head.weight) if head.weight.numel() <= 16 * DENSE else _WORDS
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(words, head.weight.shape[1], generator=generator) * (
        _LOUD / head.weight.shape[1] ** 0.5
    )
    head.weight = nn.Parameter(drawn, requires_grad=False)
    head.out_features = words
    if head.bias is not None:
        head.bias = nn.Parameter(head.bias[:words].clone(), requires_grad=False)
    head.__dict__.pop("forward", None)  # the product of a large one


def _loss(model: PreTrainedModel, *, in_head: bool) -> tuple[Tensor, Tensor]:
    """The cross entropy of the trial's samples, a scalar, and its gradient in what the head is
    given, [.., hidden].
    """
    samples = trial_samples(model)
    head: Any = model.get_output_embeddings()
    length = max(map(len, samples))
    places = torch.cat(
        [row * length + torch.arange(len(own) - 1) for row, own in enumerate(samples)]
    )
    targets = torch.cat([own[1:] for own in samples]) % head.out_features
    given: list[Tensor] = []

    def take(_head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given.append(F.layer_norm(inputs[0].detach(), inputs[0].shape[-1:]).requires_grad_())
        return (given[-1], *inputs[1:])

    handle = head.register_forward_pre_hook(take)
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    CURRENT.use(None, lengths=tuple(map(len, samples)))
    try:
        if in_head:
            with loss_in_head(causal_model(model), places, targets, 0.5):
                loss = model(input_ids=ids).logits
        else:
            loss = 0.5 * F.cross_entropy(
                model(input_ids=ids).logits.flatten(0, 1)[places].float(), targets, reduction="sum"
            )
        (gradient,) = torch.autograd.grad(loss, given)
    finally:
        handle.remove()
    return loss.detach(), gradient


def _is_near(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and bool((ours - theirs).norm() <= _EQUAL * theirs.norm())
