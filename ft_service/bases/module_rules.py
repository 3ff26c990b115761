"""The modules of a base that a job's options name: the one rule, for the plan before a job and for the worker in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ft_service.bases.families.family import DEFAULT, Family
from ft_service.errors import SpecError
from ft_service.spec import PrecisionOptions, WeightFormat, match_pattern

KEPT_PLAIN = frozenset({"gate", "router", "shared_expert_gate", "dt_proj", "altup"})
"""Names of modules whose linear layers stay bf16: routers, which are small and decide which experts a token meets or which
streams are mixed, and the time steps of state-space layers, whose weights are used without calling the layer."""

LEFT_OUT = frozenset({"router", "dt_proj", "indexer", "altup", "altup_projections", "altup_unembed_projections"})
"""Names of modules whose linear layers all-linear leaves out: routers, what makes, mixes and joins streams of hidden states
(Gemma 3n), and what gets no gradient since its weight is used without calling the layer, or it only chooses what is attended
to."""

EXPERT_WORDS = frozenset({"gate", "gate_proj", "up_proj", "gate_up_proj", "down_proj", "w1", "w2", "w3", "experts"})
"""Last names that PEFT, in a mixture of experts, takes for the experts or their router wherever they stand."""

IN_FP8: frozenset[WeightFormat] = frozenset({"fp8", "fp8_blocks"})
KEPT_IN_FP8: frozenset[WeightFormat] = frozenset({"fp8_blocks"})
"""Formats of published bases whose weights are kept as they are where the job stores them in FP8. Where it stores them
otherwise they are given its format, from the values that they stand for; other formats of published bases stay in any job."""

Value = TypeVar("Value", int, float)


def kept_plain(name: str) -> bool:
    """Whether a linear layer of this full name stays bf16 whatever the precision map says."""
    return not KEPT_PLAIN.isdisjoint(name.split("."))


@dataclass(frozen=True)
class WeightNames:
    """Full names of the modules of a base that hold weights."""

    quantizable: Sequence[str]
    """Linear layers and stacked experts inside the decoder layers; routers are none of them."""
    outside: Sequence[str]
    """Modules with weights outside the decoder layers."""
    weighted: Sequence[str]
    """All modules with weights."""


def assign_formats(
    names: WeightNames, precision: PrecisionOptions, held: Mapping[str, WeightFormat] | None = None
) -> dict[str, WeightFormat]:
    """Format of every weight that can have one, by module name.

    `held`: formats of a base that is published quantised; they stay, but for those of `KEPT_IN_FP8` in a job that stores them
    in another format than FP8. Raises SpecError for a pattern that matches none of the weights, or one outside the decoder
    layers, or that asks for another format than one that stays.
    """
    held = held or {}
    formats: dict[str, WeightFormat] = dict.fromkeys([*names.quantizable, *held], precision.format)
    stay = staying(held)
    for pattern, weight_format in precision.overrides.items():
        matched = match_pattern(pattern, names.quantizable)
        _require_override(pattern, weight_format, matched, names)
        _refuse_conflict(pattern, weight_format, matched, stay)
        formats.update(dict.fromkeys(match_pattern(pattern, formats), weight_format))
    own: dict[str, WeightFormat] = {name: formats[name] for name in names.quantizable}
    own.update((name, published) for name, published in held.items() if name in stay or formats[name] in IN_FP8)
    return own


def staying(held: Mapping[str, WeightFormat]) -> dict[str, WeightFormat]:
    """Those of the formats in which a base is published that weights have in every job, by module name."""
    return {name: published for name, published in held.items() if published not in KEPT_IN_FP8}


def refuse_resharding_of_held(size: int | None, held: Mapping[str, WeightFormat]) -> None:
    """Raises SpecError for a resharding size that a quantised base does not allow.

    `size`: distributed.reshard_after_forward where it is a number. Formats that the spec names itself are checked with the
    spec.
    """
    kept = sorted(set(staying(held).values()))
    if size is not None and kept:
        raise SpecError(
            f"distributed.reshard_after_forward = {size}: FSDP2 reshards to a number of ranks only plain weights, and the base "
            f"holds some in {' and '.join(kept)}. Use true or false.",
            param="distributed.reshard_after_forward",
        )


def _refuse_conflict(pattern: str, wanted: WeightFormat, matched: list[str], held: Mapping[str, WeightFormat]) -> None:
    for name in matched:
        if name in held and held[name] not in (wanted, f"{wanted}_fp32"):
            raise SpecError(
                f"precision.overrides: the pattern {pattern!r} asks for {wanted} in {name}, which the base holds in "
                f"{held[name]} already. Leave these modules out of the pattern, or start from a base that is not quantised.",
                param="precision.overrides",
            )


def _require_override(pattern: str, weight_format: WeightFormat, matched: list[str], names: WeightNames) -> None:
    outside, others = match_pattern(pattern, names.outside), match_pattern(pattern, names.weighted)
    if outside and weight_format != "bf16":
        raise SpecError(
            f"precision.overrides: the pattern {pattern!r} asks for {weight_format} and matches {outside[0]}, which lies "
            "outside the decoder layers: embeddings and the output head stay bf16, since every token's error passes through "
            "them. Make the pattern narrower.",
            param="precision.overrides",
        )
    if matched or (others and weight_format == "bf16"):
        return
    if others:
        raise SpecError(
            f"precision.overrides: the pattern {pattern!r} matches {others[0]} and nothing that can be stored in "
            f"{weight_format}; routers and whatever is no plain linear layer stay bf16.",
            param="precision.overrides",
        )
    raise SpecError(
        f"precision.overrides: the pattern {pattern!r} matches no linear layer inside the decoder layers "
        f"(their names look like {names.quantizable[0]!r}).",
        param="precision.overrides",
    )


ROUTERS = frozenset({"gate", "router"})
"""Names of modules that, in a mixture of experts, send tokens to experts."""


def choose_targets(
    linears: Sequence[str],
    experts: Sequence[str],
    wanted: str | Sequence[str],
    family: Family = DEFAULT,
    *,
    shared_experts: bool = False,
) -> list[str]:
    """The modules that get an adapter, in the model's order.

    `linears`: every linear layer but the output head; `experts`: stacks of experts; `wanted`: lora.target_modules;
    `shared_experts`: whether all-linear means those, and dense layers, in a mixture too. Raises SpecError for a name or pattern
    that matches none, or that names experts, or what the family cannot adapt.
    """
    refused = [name for name in linears if last_name(name) in family.not_adapted]
    chosen = _choose_targets(
        [name for name in linears if name not in refused] if wanted == "all-linear" else linears,
        experts,
        wanted,
        shared_experts,
    )
    for name in chosen:
        if name in refused:
            raise SpecError(
                f"lora.target_modules: {name!r} cannot have an adapter: {family.not_adapted[last_name(name)]}. Leave it out; "
                "all-linear does.",
                param="lora.target_modules",
            )
    return chosen


def _choose_targets(
    linears: Sequence[str], experts: Sequence[str], wanted: str | Sequence[str], shared_experts: bool
) -> list[str]:
    barred = [name for name in linears if experts and last_name(name) in EXPERT_WORDS]
    allowed = [name for name in linears if name not in barred] if barred else list(linears)
    if wanted == "all-linear":
        left_out = LEFT_OUT | (ROUTERS if experts and shared_experts else frozenset())
        meant = linears if shared_experts else allowed
        return _matches("all-linear", [name for name in meant if left_out.isdisjoint(name.split("."))], allowed)
    if isinstance(wanted, str):
        _refuse_experts(wanted, match_pattern(wanted, [*experts, *barred]))
        return _matches(wanted, match_pattern(wanted, allowed), allowed)
    chosen: set[str] = set()
    for word in wanted:
        apart = [name for name in barred if "." in word and f".{name}".endswith(f".{word}")]
        _refuse_experts(word, [word] if experts and last_name(word) in EXPERT_WORDS and not apart else [])
        chosen.update(apart or _matches(word, [name for name in allowed if f".{name}".endswith(f".{word}")], allowed))
    return [name for name in linears if name in chosen]


def named_apart(chosen: Sequence[str], experts: Sequence[str]) -> list[str]:
    """The adapted linear layers that PEFT would take for experts by their last names, and finds by their parameters only."""
    return [name for name in chosen if experts and last_name(name) in EXPERT_WORDS]


def refuse_dropout(dropout: float, what: Sequence[str]) -> None:
    """Raises SpecError for lora.lora_dropout where any of the adapters is one that PEFT has no dropout for. `what`: those."""
    if dropout and what:
        raise SpecError(
            f"lora.lora_dropout = {dropout:g}: PEFT has no dropout for adapters on {what[0]}, parameters to it: set it to 0.",
            param="lora.lora_dropout",
        )


def choose_parameters(experts: Sequence[str], wanted: Sequence[str], dropout: float, modules: Sequence[str]) -> list[str]:
    """The stacks of experts that get an adapter, in the model's order.

    `wanted`: lora.target_parameters; `dropout`: lora.lora_dropout; `modules`: the other modules that get one. Raises SpecError
    for a name that matches none.
    """
    refuse_dropout(dropout, ["experts"] if wanted else named_apart(modules, experts))
    for word in wanted:
        if not any(f".{name}".endswith(f".{word}") for name in experts):
            named = f"its stacks look like {experts[-1]!r}" if experts else "it has none"
            raise SpecError(
                f"lora.target_parameters: {word!r} matches no stack of experts of this model; {named}. Linear layers are named "
                "in lora.target_modules.",
                param="lora.target_parameters",
            )
    return [name for name in experts if any(f".{name}".endswith(f".{word}") for word in wanted)]


def values_by_module(chosen: Sequence[str], patterns: Mapping[str, Value], field: str) -> dict[str, Value]:
    """Values of lora.rank_pattern or alpha_pattern by module; the first pattern that matches wins, as in PEFT.

    Raises SpecError for a pattern that matches none of the adapted modules.
    """
    values: dict[str, Value] = {}
    for pattern, value in patterns.items():
        matched = match_pattern(rf"(.*\.)?({pattern})", chosen)
        if not matched:
            raise SpecError(f"{field}: the pattern {pattern!r} matches none of the adapted modules.", param=field)
        for name in matched:
            values.setdefault(name, value)
    return values


def choose_ignored(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """The base's weights, by their names in its files, that distributed.ignored keeps whole on every rank.

    Raises SpecError for a pattern that matches none.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        matched = match_pattern(pattern, names)
        if not matched:
            raise SpecError(
                f"distributed.ignored: the pattern {pattern!r} matches no weight of the base "
                f"(their names look like {names[0]!r}). Adapters are always sharded.",
                param="distributed.ignored",
            )
        chosen.update(matched)
    return chosen


def last_name(name: str) -> str:
    return name.rpartition(".")[2]


def _matches(wanted: str, matched: list[str], allowed: list[str]) -> list[str]:
    if matched:
        return matched
    kinds = ", ".join(sorted({last_name(name) for name in allowed})) or "none that an adapter can be put on"
    raise SpecError(
        f"lora.target_modules: {wanted!r} matches no linear layer of this model; it has {kinds}.", param="lora.target_modules"
    )


def _refuse_experts(wanted: str, matched: list[str]) -> None:
    if not matched:
        return
    raise SpecError(
        f"lora.target_modules: {wanted!r} names {matched[0]!r}. In a mixture of experts, shared experts and "
        "dense layers are named with what they lie in (shared_expert.down_proj, mlp.down_proj), stacks of experts in "
        "lora.target_parameters, and routers have no adapter; all-linear means the former, and leaves stacks and routers out.",
        param="lora.target_modules",
    )
