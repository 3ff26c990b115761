"""The modules of a base that a job's options name. The plan and the worker share these rules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from ft_service.errors import SpecError
from ft_service.spec import (
    AS_PUBLISHED,
    FORMATS,
    SERVED_FORMS,
    FormatChoice,
    JobSpec,
    PrecisionOptions,
    ServedAs,
    WeightFormat,
    keeps,
    match_pattern,
)

KEPT_PLAIN = frozenset({"gate", "router", "shared_expert_gate", "dt_proj", "altup"})
"""Names of modules whose linear layers stay bf16: routers, which are small and choose the experts
of a token or mix streams, and the time steps of state-space layers, whose weights are used without
a call of the layer.
"""

LEFT_OUT = frozenset(
    {"router", "dt_proj", "indexer", "altup", "altup_projections", "altup_unembed_projections"}
)
"""Names of modules whose linear layers all-linear leaves out: routers; layers that split, mix and
join streams of hidden states (Gemma 3n); and layers without a gradient, whose weight is used
without a call of the layer, or which only choose tokens to attend to.
"""

EXPERT_WORDS = frozenset(
    {"gate", "gate_proj", "up_proj", "gate_up_proj", "down_proj", "w1", "w2", "w3", "experts"}
)
"""Last parts of module names that PEFT, in a mixture of experts, takes for experts or their router
in any place.
"""

_MORE_POSITIONS = 8
"""Most rows of an embedding of positions besides those of positions: OPT counts from 2."""

Value = TypeVar("Value", int, float)
NOTHING: Mapping[str, str] = MappingProxyType({})


def kept_plain(name: str) -> bool:
    """Whether a linear layer of this full name stays bf16 whatever the precision map says."""
    return not KEPT_PLAIN.isdisjoint(name.split("."))


@dataclass(frozen=True)
class WeightNames:
    """Full names of the modules of a base that hold weights."""

    quantizable: Sequence[str]
    """Linear layers and stacked experts inside the decoder layers, without routers."""
    outside: Sequence[str]
    """Modules with weights outside the decoder layers."""
    weighted: Sequence[str]
    """All modules with weights."""


def assign_formats(
    names: WeightNames, precision: PrecisionOptions, held: Mapping[str, WeightFormat] | None = None
) -> dict[str, WeightFormat]:
    """Module name → format of its weight, for every weight that can be quantised.

    `held`: formats of a base that is published quantised; which of them stay, `keeps` says, and all
    else is converted. Raises SpecError for a pattern that matches no weight, or one outside the
    decoder layers, or that asks for another format than one that stays.
    """
    held = held or {}
    choices: dict[str, FormatChoice] = dict.fromkeys([*names.quantizable, *held], precision.format)
    stay = staying(held)
    for pattern, choice in precision.overrides.items():
        matched = match_pattern(pattern, names.quantizable)
        _require_override(pattern, choice, matched, names)
        _refuse_conflict(pattern, choice, matched, stay)
        choices.update(dict.fromkeys(match_pattern(pattern, choices), choice))
    own: dict[str, WeightFormat] = {}
    for name in names.quantizable:
        choice = choices[name]
        own[name] = "bf16" if choice == AS_PUBLISHED else choice
    own.update(
        (name, published) for name, published in held.items() if keeps(choices[name], published)
    )
    return own


def staying(held: Mapping[str, WeightFormat]) -> dict[str, WeightFormat]:
    """Module name → format, for the published formats that weights keep in every job."""
    return {
        name: published for name, published in held.items() if FORMATS[published].kept_by is None
    }


def converted(
    held: Mapping[str, WeightFormat], formats: Mapping[str, WeightFormat]
) -> dict[str, WeightFormat]:
    """Module name → published format, for the weights that a job stores in another one."""
    return {name: published for name, published in held.items() if formats.get(name) != published}


def refuse_resharding_of_held(
    size: int | None, held: Mapping[str, WeightFormat], formats: Mapping[str, WeightFormat]
) -> None:
    """Raise SpecError for a resharding size that a quantised base does not allow.

    `size`: distributed.reshard_after_forward if it is a number; `formats`: those that the weights
    are stored in. Formats in the spec are checked with the spec.
    """
    kept = sorted({published for name, published in held.items() if formats.get(name) == published})
    if size is not None and kept:
        raise SpecError(
            f"distributed.reshard_after_forward = {size}: FSDP2 reshards to a number of ranks "
            "only plain weights, and the base "
            f"holds some in {' and '.join(kept)}. Use true or false.",
            param="distributed.reshard_after_forward",
        )


def _refuse_conflict(
    pattern: str, wanted: FormatChoice, matched: list[str], held: Mapping[str, WeightFormat]
) -> None:
    for name in matched:
        if name in held and wanted != AS_PUBLISHED and held[name] not in (wanted, f"{wanted}_fp32"):
            raise SpecError(
                f"precision.overrides: the pattern {pattern!r} asks for {wanted} in {name}, which "
                "the base holds in "
                f"{held[name]} already. Leave these modules out of the pattern, or start from a "
                "base that is not quantised.",
                param="precision.overrides",
            )


def _require_override(
    pattern: str, weight_format: FormatChoice, matched: list[str], names: WeightNames
) -> None:
    outside = match_pattern(pattern, names.outside)
    others = match_pattern(pattern, names.weighted)
    if outside and weight_format not in ("bf16", AS_PUBLISHED):
        raise SpecError(
            f"precision.overrides: the pattern {pattern!r} asks for {weight_format} and matches "
            f"{outside[0]}, which lies "
            "outside the decoder layers: embeddings and the output head stay bf16, since every "
            "token's error passes through "
            "them. Make the pattern narrower.",
            param="precision.overrides",
        )
    if matched or (others and weight_format in ("bf16", AS_PUBLISHED)):
        return
    if others:
        raise SpecError(
            f"precision.overrides: the pattern {pattern!r} matches {others[0]} and nothing that "
            "can be stored in "
            f"{weight_format}; routers and modules that are not plain linear layers stay bf16.",
            param="precision.overrides",
        )
    raise SpecError(
        f"precision.overrides: the pattern {pattern!r} matches no linear layer inside the decoder "
        "layers "
        f"(their names look like {names.quantizable[0]!r}).",
        param="precision.overrides",
    )


ROUTERS = frozenset({"gate", "router"})
"""Names of modules that send tokens to experts in a mixture of experts."""


def choose_targets(
    linears: Sequence[str],
    experts: Sequence[str],
    wanted: str | Sequence[str],
    *,
    shared_experts: bool = False,
    not_adapted: Mapping[str, str] = NOTHING,
    outer: OuterModules | None = None,
    towers: Collection[str] = (),
) -> list[str]:
    """The modules of the text part that get an adapter, in the model's order.

    `linears`: every linear layer except the output head; `experts`: stacks of experts; `wanted`:
    lora.target_modules; `shared_experts`: whether all-linear includes shared experts, and dense
    layers of a mixture; `not_adapted`: full name of a linear layer that cannot have an adapter →
    reason; `outer`: embedding and head; `towers`: linear layers outside the text part, which may be
    named beside (`choose_tower_targets`). Raises SpecError for a name or pattern that matches
    nothing, or that matches experts or a layer that cannot be adapted, or embedding and head, which
    are trained whole.
    """
    if outer is not None:
        outer.refuse_adapters(wanted, linears)
    chosen = _choose_targets(
        [name for name in linears if name not in not_adapted]
        if wanted == "all-linear"
        else linears,
        experts,
        wanted,
        shared_experts,
        towers,
    )
    for name in chosen:
        if name in not_adapted:
            raise SpecError(
                f"lora.target_modules: {name!r} cannot have an adapter: {not_adapted[name]}. "
                "Leave it out; all-linear does.",
                param="lora.target_modules",
            )
    return chosen


def _choose_targets(
    linears: Sequence[str],
    experts: Sequence[str],
    wanted: str | Sequence[str],
    shared_experts: bool,
    towers: Collection[str],
) -> list[str]:
    barred = [name for name in linears if experts and last_name(name) in EXPERT_WORDS]
    allowed = [name for name in linears if name not in barred] if barred else list(linears)
    if wanted == "all-linear":
        left_out = LEFT_OUT | (ROUTERS if experts and shared_experts else frozenset())
        meant = linears if shared_experts else allowed
        return _matches(
            "all-linear", [name for name in meant if left_out.isdisjoint(name.split("."))], allowed
        )
    beside = choose_tower_targets(towers, wanted, linears)
    if isinstance(wanted, str):
        _refuse_experts(wanted, match_pattern(wanted, [*experts, *barred]))
        if beside and not match_pattern(wanted, allowed):
            raise _towers_alone(wanted)
        return _matches(wanted, match_pattern(wanted, allowed), allowed, is_pattern=True)
    chosen: set[str] = set()
    for word in wanted:
        named = _ending(barred, word) if "." in word else []
        _refuse_experts(
            word, [word] if experts and last_name(word) in EXPERT_WORDS and not named else []
        )
        if not (named or _ending(linears, word)) and _ending(beside, word):
            continue
        chosen.update(named or _matches(word, _ending(allowed, word), allowed))
    if beside and not chosen:
        raise _towers_alone(wanted)
    return [name for name in linears if name in chosen]


def choose_tower_targets(
    towers: Collection[str], wanted: str | Sequence[str], linears: Sequence[str]
) -> list[str]:
    """The linear layers outside the text part that get an adapter, in the model's order: those that
    a pattern matches, or that are named by a name which no layer of the text part ends in.

    `towers`: all of them; `linears`: those of the text part. all-linear means none.
    """
    if wanted == "all-linear":
        return []
    if isinstance(wanted, str):
        return match_pattern(wanted, towers)
    words = [word for word in wanted if not _ending(linears, word)]
    return [name for name in towers if any(_ending([name], word) for word in words)]


def _towers_alone(wanted: str | Sequence[str]) -> SpecError:
    return SpecError(
        f"lora.target_modules: {wanted!r} names layers of the base's tower alone, and those of its "
        "text part are adapted with them. Name some of these too, such as q_proj and v_proj.",
        param="lora.target_modules",
    )


def refuse_with_towers(spec: JobSpec, towers: Sequence[str]) -> None:
    """Raise SpecError for options that adapters on towers cannot have.

    `towers`: as `choose_tower_targets` returns them.
    """
    lora = spec.lora
    given = {
        "lora.use_dora": lora.use_dora,
        "lora.lora_dropout": lora.lora_dropout,
        "lora.target_parameters": lora.target_parameters,
        "precision.served_as": spec.precision.served_as,
        "method": spec.by_commands,
    }
    for option, value in given.items():
        if towers and value:
            raise SpecError(
                f"lora.target_modules names {towers[0]}, a layer of the base's tower, whose adapters "
                f"are trained without {option}. Leave one of the two out.",
                param=option,
            )


def named_apart(chosen: Sequence[str], experts: Sequence[str]) -> list[str]:
    """The adapted linear layers that PEFT would take for experts by their last names, and that are
    named as parameters.
    """
    return [name for name in chosen if experts and last_name(name) in EXPERT_WORDS]


def refuse_dropout(dropout: float, what: Sequence[str]) -> None:
    """Raise SpecError for lora.lora_dropout if there are adapters without dropout in PEFT.

    `what`: their modules.
    """
    if dropout and what:
        raise SpecError(
            f"lora.lora_dropout = {dropout:g}: PEFT has no dropout for adapters on {what[0]}, "
            "parameters to it: set it to 0.",
            param="lora.lora_dropout",
        )


def refuse_dora(use_dora: bool, what: Sequence[str]) -> None:
    """Raise SpecError for lora.use_dora if there are adapters without it in PEFT.

    `what`: their modules.
    """
    if use_dora and what:
        raise SpecError(
            f"lora.use_dora = True: PEFT has no DoRA for adapters on {what[0]}, parameters to it: "
            "leave it out.",
            param="lora.use_dora",
        )


def learned_positions(positions: int, embeddings: Mapping[str, int]) -> str | None:
    """The weight in which a base has learned a vector for each of its positions (GPT-2, OPT); None:
    rotary positions, or the like, have no end. `embeddings`: weights of embeddings other than the
    tokens' → their rows.
    """
    return next(
        (name for name, rows in embeddings.items() if 0 <= rows - positions <= _MORE_POSITIONS),
        None,
    )


def refuse_without_position(
    longest: int, positions: int | None, embeddings: Mapping[str, int]
) -> None:
    """Raise SpecError for samples with more tokens than a base has learned positions: training
    would fail at the first of them.

    `longest`: tokens of the longest sample, once it is cut; `positions`: of the base, None: it does
    not say; `embeddings`: as `learned_positions` takes them.
    """
    if positions is None or longest <= positions:
        return
    learned = learned_positions(positions, embeddings)
    if learned is not None:
        raise SpecError(
            f"training.max_length: the longest sample has {longest} tokens, and the base has "
            f"learned {positions} positions "
            f"({learned}) and can read no more. Set it to {positions}, to which longer samples "
            "are cut.",
            param="training.max_length",
        )


def choose_parameters(
    experts: Sequence[str], wanted: Sequence[str], dropout: float, modules: Sequence[str]
) -> list[str]:
    """The stacks of experts that get an adapter, in the model's order.

    Raises SpecError for a name that matches none.

    `wanted`: lora.target_parameters; `dropout`: lora.lora_dropout; `modules`: the other modules
    with an adapter.
    """
    refuse_dropout(dropout, ["experts"] if wanted else named_apart(modules, experts))
    for word in wanted:
        if not _ending(experts, word):
            named = f"its stacks look like {experts[-1]!r}" if experts else "it has none"
            raise SpecError(
                f"lora.target_parameters: {word!r} matches no stack of experts of this model; "
                f"{named}. Linear layers are named "
                "in lora.target_modules.",
                param="lora.target_parameters",
            )
    return [name for name in experts if any(_ending([name], word) for word in wanted)]


@dataclass(frozen=True)
class OuterModules:
    """Full names of a base's embedding of tokens and of its output head."""

    embedding: str
    head: str
    tied: bool
    """Whether they have one weight."""

    def chosen(self, wanted: Sequence[str], held: Mapping[str, str] = NOTHING) -> list[str]:
        """The modules that are trained whole, in the model's order: of tied ones both.

        `wanted`: lora.modules_to_save; `held`: formats of a base that is published quantised.
        Raises SpecError for a name of neither, or of one that is quantised.
        """
        both = [self.embedding, self.head]
        for word in wanted:
            if not _ending(both, word):
                raise SpecError(
                    f"lora.modules_to_save: {word!r} is neither the base's embedding "
                    f"({self.embedding}) nor its output head "
                    f"({self.head}). No others are trained whole: linear layers get an adapter by "
                    "lora.target_modules.",
                    param="lora.modules_to_save",
                )
        chosen = [name for name in both if any(_ending([name], word) for word in wanted)]
        for name in chosen:
            if name in held:
                raise SpecError(
                    f"lora.modules_to_save: the base holds {name} in {held[name]}, and only plain "
                    "weights are trained whole. "
                    "Take the base's release in bf16.",
                    param="lora.modules_to_save",
                )
        return both if chosen and self.tied else chosen

    def refuse_adapters(self, wanted: str | Sequence[str], linears: Sequence[str]) -> None:
        """Raise SpecError where a name or the pattern in lora.target_modules means embedding or
        head, and none of `linears`.
        """
        kinds = {self.embedding: "embedding", self.head: "output head"}
        if isinstance(wanted, str):
            linear = wanted == "all-linear" or match_pattern(wanted, linears)
            named = [] if linear else [(name, wanted) for name in match_pattern(wanted, kinds)]
        else:
            words = [word for word in wanted if not _ending(linears, word)]
            named = [(name, word) for word in words for name in _ending(kinds, word)]
        for name, word in named:
            both = f": {self.embedding} and {self.head}, which are one weight" if self.tied else ""
            raise SpecError(
                f"lora.target_modules: {word!r} names the base's {kinds[name]} ({name}), which "
                "gets no adapter: the loss is "
                "taken inside the head, a few tokens' logits at a time, by one weight. Leave it "
                "out, and write "
                f"lora.modules_to_save: [{last_name(name)}], which trains it whole{both}.",
                param="lora.target_modules",
            )


def values_by_module(
    chosen: Sequence[str], patterns: Mapping[str, Value], field: str
) -> dict[str, Value]:
    """Module → value of lora.rank_pattern or alpha_pattern; the first matching pattern wins, as in
    PEFT.

    Raises SpecError for a pattern that matches no adapted module.
    """
    values: dict[str, Value] = {}
    for pattern, value in patterns.items():
        matched = match_pattern(rf"(.*\.)?({pattern})", chosen)
        if not matched:
            raise SpecError(
                f"{field}: the pattern {pattern!r} matches no adapted module.", param=field
            )
        for name in matched:
            values.setdefault(name, value)
    return values


def choose_ignored(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """Names of the base's weights that distributed.ignored keeps whole on every rank.

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


def _ending(names: Iterable[str], word: str) -> list[str]:
    """The full names that end in a name, from a dot on."""
    return [name for name in names if f".{name}".endswith(f".{word}")]


def last_name(name: str) -> str:
    return name.rpartition(".")[2]


def _matches(
    wanted: str, matched: list[str], allowed: list[str], *, is_pattern: bool = False
) -> list[str]:
    if matched:
        return matched
    kinds = (
        ", ".join(sorted({last_name(name) for name in allowed})) or "none that can have an adapter"
    )
    whole = (
        f" A pattern has to match a whole name, such as {allowed[0]}."
        if is_pattern and allowed
        else ""
    )
    raise SpecError(
        f"lora.target_modules: {wanted!r} matches no linear layer of this model; it has "
        f"{kinds}.{whole}",
        param="lora.target_modules",
    )


def _refuse_experts(wanted: str, matched: list[str]) -> None:
    if not matched:
        return
    raise SpecError(
        f"lora.target_modules: {wanted!r} names {matched[0]!r}. In a mixture of experts, shared "
        "experts and "
        "dense layers are named with what they lie in (shared_expert.down_proj, mlp.down_proj), "
        "stacks of experts in "
        "lora.target_parameters, and routers have no adapter; all-linear means the former, and "
        "leaves stacks and routers out.",
        param="lora.target_modules",
    )


def refuse_served(
    form: ServedAs | None, widths: Mapping[str, int], adapted: Collection[str], experts: bool
) -> None:
    """Raise SpecError for a precision.served_as that the linear layers of the decoder layers cannot
    be rounded to.

    `widths`: their columns by name; `adapted`: modules with an adapter; `experts`: whether there
    are stacks of experts.
    """
    if form is None:
        return
    group = SERVED_FORMS[form].group
    odd = [name for name, width in widths.items() if group and width % group]
    bare = [name for name in widths if name not in adapted]
    if experts:
        why = (
            "the base is a mixture of experts, whose stacks multiply base and adapter apart, in "
            "kernels that round no sum"
        )
    elif odd:
        fit = [
            other
            for other, its in SERVED_FORMS.items()
            if not its.group or all(width % its.group == 0 for width in widths.values())
        ]
        why = (
            f"{odd[0]} has {widths[odd[0]]} columns, which are not groups of {group}. "
            f"{' and '.join(fit)} would fit"
        )
    elif bare:
        why = f"{bare[0]} is rounded too, and has no adapter of the kinds that this base takes"
    else:
        return
    raise SpecError(
        f"precision.served_as = {form!r}: {why}. Or leave it out.", param="precision.served_as"
    )
