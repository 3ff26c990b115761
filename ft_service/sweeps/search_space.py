"""The `sweep` of a create body: its options, their values, and the bodies of its jobs. Pure.

    sweep:                                        sweep:
      training.learning_rate: [1e-4, 3e-4]          method: random
      lora.r: [8, 32]                               samples: 12
                                                    seed: 1
                                                    training.learning_rate: {min: 1e-5, max: 1e-3,
                                                        log: true}

Every combination is checked like a job's SPEC, and all errors are reported at once. Values drawn at
random are the same for the same ranges and seed, with any version of Python.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from ft_service.errors import SpecError
from ft_service.spec.name_suggestions import name_for, options_of
from ft_service.spec.option_types import Number, Strict
from ft_service.spec.request import SWEEP, JobRequest, read_request
from ft_service.spec.validation_errors import OptionFault, joined, option_faults
from ft_service.sweeps.halving import shares_of
from ft_service.wording import kind, shown_value

_MOST_FAULTS = 1000
"""So many faults are enough: options and combinations behind them are not checked."""
TRIES = 100
"""Draws for each requested combination; if they yield too few different ones, there are no more."""

_MOST = 2**53
"""Whole numbers up to here are exact as fractions too, in which shares of a range are
calculated.
"""


def _within_limits(value: float) -> float:
    if abs(value) > _MOST:
        raise ValueError(f"must be from -{_MOST} to {_MOST}")
    return value


_Bound = Annotated[Annotated[int, Field(strict=True)] | Number, AfterValidator(_within_limits)]


class Range(Strict):
    """Numbers from `min` to `max`, both included; integers if both are."""

    min: _Bound
    max: _Bound
    log: bool = False
    """Distribute evenly in the logarithm: as many between 1e-5 and 1e-4 as between 1e-4 and
    1e-3.
    """

    @model_validator(mode="after")
    def _in_order(self) -> Range:
        if self.min >= self.max:
            raise ValueError(f"min = {self.min:g} must be less than max = {self.max:g}")
        if self.log and self.min <= 0:
            raise ValueError(f"min = {self.min:g}: a logarithmic range is of numbers above 0")
        return self

    def at(self, share: float) -> int | float:
        """The number at a share in [0, 1) of the range; fractions have three significant digits,
        and more in a range that is narrow beside its numbers, as 0.9995 to 0.9999 is.
        """
        if isinstance(self.min, int) and isinstance(self.max, int):
            high = self.max + 1
            value = (
                self.min * (high / self.min) ** share
                if self.log
                else self.min + share * (high - self.min)
            )
            return min(self.max, max(self.min, math.floor(value)))
        value = (
            self.min * (self.max / self.min) ** share
            if self.log
            else self.min + share * (self.max - self.min)
        )
        narrow = max(abs(self.min), abs(self.max)) / (self.max - self.min)
        digits = 2 + max(0, math.floor(math.log10(narrow)))
        return min(self.max, max(self.min, float(f"{value:.{digits}e}")))


Choices = Range | Sequence[Any]
"""The values of one option: a range, or a list."""


def drawn(options: Mapping[str, Choices], samples: int, seed: int) -> list[dict[str, Any]]:
    """Up to `samples` different combinations of values, drawn at random."""
    source = random.Random(seed)
    combinations: list[dict[str, Any]] = []
    for _ in range(samples * TRIES):
        combination = {
            name: _value_at(choices, source.random()) for name, choices in options.items()
        }
        if combination not in combinations:
            combinations.append(combination)
        if len(combinations) == samples:
            break
    return combinations


def _value_at(choices: Choices, share: float) -> Any:
    return (
        choices.at(share)
        if isinstance(choices, Range)
        else choices[math.floor(share * len(choices))]
    )


MOST_JOBS = 64
MOST_VALUES = 256
"""Limit of an option's values."""
_OF_ALL = "it applies to the whole sweep, not to one job: set it outside the sweep"
_OTHER_LOSS = (
    "it changes what the loss measures, so losses could not be compared: give it one value"
)
_ONE_FILE = "all jobs of a sweep use the same files: set it outside the sweep"
_NO_RESULT = (
    "it changes how fast a job runs, not what it learns: give it one value, or let it be "
    "chosen (auto)"
)
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("suffix", "metadata", "integrations", "priority", "max_seconds", "max_cost", "evaluation"),
        _OF_ALL,
    ),
    **dict.fromkeys(("training_file", "validation_file", "validation_split"), _ONE_FILE),
    **dict.fromkeys(
        ("model", "chat_template", "training.max_length", "training.train_on", "method.type"),
        _OTHER_LOSS,
    ),
    **{
        f"method.{place}": _OTHER_LOSS
        for place in (
            "dpo.hyperparameters.beta",
            "dpo.hyperparameters.loss_type",
            "dpo.hyperparameters.label_smoothing",
            "dpo.hyperparameters.rpo_alpha",
            "simpo.hyperparameters.beta",
            "simpo.hyperparameters.gamma",
            "orpo.hyperparameters.beta",
            "kto.hyperparameters.beta",
            "kto.hyperparameters.loss_type",
            "kto.hyperparameters.desirable_weight",
            "kto.hyperparameters.undesirable_weight",
            "distillation.hyperparameters.loss_type",
            "distillation.hyperparameters.beta",
        )
    },
    **dict.fromkeys(
        (
            "training.per_device_train_batch_size",
            "training.tokens_per_micro_batch",
            "training.packing",
            "engine",
        ),
        _NO_RESULT,
    ),
}
"""Options that cannot be swept → the reason."""
REFUSED_SECTIONS: Mapping[str, str] = {
    "distributed": _NO_RESULT,
    "checkpoint": _NO_RESULT,
    "evaluation": _OF_ALL,
    "data": _OTHER_LOSS,
}


class HalvingOptions(Strict):
    """Settings of early stopping (ft_service/sweeps/halving.py)."""

    eta: Annotated[int, Field(ge=2, le=8)] = 2
    """Each rung keeps one of `eta` jobs."""
    min_share: Annotated[Number, Field(ge=0.01, le=0.9)] = 0.25
    """Share of a job's steps at the first rung; each further rung is eta times the one before."""


class SweepOptions(Strict):
    """Settings of a sweep, besides the options and their values."""

    method: Literal["grid", "random"] = "grid"
    """grid: every combination; random: combinations drawn at random."""
    samples: Annotated[int, Field(ge=2, le=MOST_JOBS)] | None = None
    """Number of jobs of a random sweep."""
    seed: Annotated[int, Field(ge=0, le=2_147_483_647)] | None = None
    """Seed of the random values; None: 0.

    A list of numbers is the option `seed` of the jobs instead.
    """
    halving: bool | HalvingOptions = True
    """Stop jobs that cannot become the best: at the default rungs, at others, or never."""

    @model_validator(mode="after")
    def _samples_of_random(self) -> SweepOptions:
        if self.method == "random" and self.samples is None:
            raise ValueError(
                "sweep.samples is required with sweep.method random: the number of jobs, 2 to "
                f"{MOST_JOBS}"
            )
        for name in ("samples", "seed"):
            if self.method == "grid" and getattr(self, name) is not None:
                raise ValueError(
                    f"sweep.{name} is for sweep.method random: leave it out, or give that method"
                )
        return self


class SweepRequest(JobRequest):
    """The body of `POST /v1/fine_tuning/sweeps`, and the SPEC file of a sweep: that of a job, with
    `sweep`.
    """

    sweep: dict[str, Any]
    """Dotted options of a job, each with a list of values or, if `method` is random, a range `{min,
    max, log}`; and the settings method (grid or random), samples and seed (for random), and
    halving: true, false or `{eta, min_share}`.
    """


@dataclass(frozen=True)
class AskedJob:
    """One job of a sweep."""

    body: dict[str, Any]
    """The job's create body."""
    request: JobRequest
    """The body, parsed."""
    values: dict[str, Any]
    """Swept option → the job's value."""


@dataclass(frozen=True)
class AskedSweep:
    """A parsed sweep without errors."""

    jobs: tuple[AskedJob, ...]
    settings: dict[str, Any]
    """JSON: method, samples and seed; the swept options; eta and rungs, which are None and []
    without early stopping.
    """


def parse_sweep(body: object, seed: int = 0) -> AskedSweep:
    """Parse a create body with `sweep`. `seed`: the seed of jobs if it is neither given nor swept.

    Raises SpecError naming every field at fault (dotted) with its value and limit.
    """
    if not isinstance(body, Mapping):
        raise SpecError(
            f"The body must be an object with model, training_file and sweep, not {kind(body)}."
        )
    alone = {name: value for name, value in body.items() if name != SWEEP}
    given = body.get(SWEEP)
    if not isinstance(given, Mapping) or not given:
        _, faults = read_request(alone)
        text = (
            "sweep is required: options with the values to try, such as "
            "training.learning_rate: [1e-4, 3e-4]."
        )
        raise joined([OptionFault(SWEEP, text, "missing_required_parameter"), *faults])
    options, choices, faults = _read(given, alone)
    combinations: list[dict[str, Any]] = []
    if options is not None and not faults:
        combinations, faults = _combined(options, choices)
    jobs, more = _jobs(
        alone if alone.get("seed") is not None or "seed" in choices else {**alone, "seed": seed},
        combinations,
    )
    faults = list(dict.fromkeys([*faults, *more]))
    if faults:
        raise joined(faults)
    assert options is not None, "without faults there are options"
    return AskedSweep(tuple(jobs), _settings(options, list(choices)))


def values_text(values: Mapping[str, Any]) -> str:
    """The values as text: `training.learning_rate = 0.0001, lora.r = 8`."""
    texts = {
        name: f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in values.items()
    }
    return ", ".join(f"{name} = {text}" for name, text in texts.items())


def _settings(options: SweepOptions, names: list[str]) -> dict[str, Any]:
    halving = HalvingOptions() if options.halving is True else options.halving or None
    random = (
        {"samples": options.samples, "seed": options.seed or 0}
        if options.method == "random"
        else {}
    )
    rungs = shares_of(halving.eta, halving.min_share) if halving else ()
    return {
        "method": options.method,
        **random,
        "options": names,
        "eta": halving and halving.eta,
        "rungs": list(rungs),
    }


def _read(
    given: Mapping[Any, Any], alone: Mapping[Any, Any]
) -> tuple[SweepOptions | None, dict[str, Choices], list[OptionFault]]:
    """The sweep's settings (None if they are wrong), the values of each option, and all faults."""
    own = {str(name): value for name, value in given.items() if _is_setting(name, value)}
    options, faults = _parse_settings(own)
    is_random = own.get("method") == "random"
    choices: dict[str, Choices] = {}
    for key, value in given.items():
        name = str(key)
        if name in own:
            continue
        if len(faults) >= _MOST_FAULTS:
            break
        fault = _fault_of_name(name) or _fault_of_both(name, alone)
        found, wrong = (None, [fault]) if fault else _choices(name, value, is_random)
        faults += wrong
        if found is not None:
            choices[name] = found
    if not choices and not faults:
        faults.append(
            OptionFault(
                SWEEP,
                "sweep names no option: give one with the values to try, such as lora.r: [8, 32].",
            )
        )
    if alone.get("validation_file") is None and alone.get("validation_split") is None:
        text = (
            "validation_file (or validation_split) is required for a sweep, which compares its "
            "jobs by their loss on it."
        )
        faults.append(OptionFault("validation_file", text, "missing_required_parameter"))
    elif alone.get("validation_split") is not None and "seed" in choices:
        text = (
            "sweep.seed: with validation_split each seed sets other samples aside: give a "
            "validation_file, or leave it out."
        )
        faults.append(OptionFault("sweep.seed", text))
    method = alone.get("method")
    if isinstance(method, Mapping) and method.get("type") == "reinforcement":
        text = (
            "sweep: a sweep compares jobs by validation loss, which method.type = "
            "'reinforcement' has none of. "
        )
        faults.append(
            OptionFault(
                SWEEP, f"{text}Submit its jobs one by one, and compare their valid_mean_reward."
            )
        )
    return options, choices, faults


def _parse_settings(own: Mapping[str, Any]) -> tuple[SweepOptions | None, list[OptionFault]]:
    halving = own.get("halving")
    try:
        if isinstance(
            halving, Mapping
        ):  # separately first: faults of the union with bool would name both alternatives
            HalvingOptions.model_validate(dict(halving))
    except ValidationError as error:
        return None, [
            _within(f"{SWEEP}.halving", fault) for fault in option_faults(error, HalvingOptions)
        ]
    try:
        return SweepOptions.model_validate(own), []
    except ValidationError as error:
        return None, [_within(SWEEP, fault) for fault in option_faults(error, SweepOptions)]


def _is_setting(name: object, value: object) -> bool:
    """Return whether a name is a setting of the sweep. A list of seeds is an option of its jobs."""
    return name in SweepOptions.model_fields and not (name == "seed" and isinstance(value, list))


def _within(place: str, fault: OptionFault) -> OptionFault:
    """A fault with its place prefixed by the place of the whole."""
    if not fault.place:
        text = fault.text if fault.text.startswith(f"{place}.") else f"{place}: {fault.text}"
        return OptionFault(place, text, fault.code)
    return OptionFault(f"{place}.{fault.place}", f"{place}.{fault.text}", fault.code)


def _fault_of_name(name: str) -> OptionFault | None:
    place = f"{SWEEP}.{name}"
    known = options_of(JobRequest)
    if why := REFUSED.get(name) or REFUSED_SECTIONS.get(name.split(".")[0]):
        return OptionFault(place, f"{place} cannot be swept: {why}.")
    if any(other.startswith(f"{name}.") for other in known):
        example = "training.learning_rate" if name == "training" else f"{name}.…"
        return OptionFault(
            place, f"{place} is a group of options: name one of them with its dots, as {example}."
        )
    if name in known:
        return None
    meant = name_for(name, JobRequest)
    hint = f"; did you mean {meant}?" if meant else ". Check its spelling, or leave it out."
    return OptionFault(place, f"{place}: there is no such option{hint}", "unknown_parameter")


def _fault_of_both(name: str, alone: Mapping[Any, Any]) -> OptionFault | None:
    inner: Any = alone
    for part in name.split("."):
        if not isinstance(inner, Mapping) or part not in inner:
            return None
        inner = inner[part]
    return OptionFault(name, f"{name} and sweep.{name} are both given: keep one.")


def _choices(name: str, value: object, is_random: bool) -> tuple[Choices | None, list[OptionFault]]:
    """The values of an option, or its faults."""
    place = f"{SWEEP}.{name}"
    if isinstance(value, list) and value:
        if len(value) > MOST_VALUES:
            text = f"{place}: {len(value):,} values; at most {MOST_VALUES} are possible."
            return None, [
                OptionFault(
                    place, f"{text} Leave values out{', or give a range' if is_random else ''}."
                )
            ]
        repeated = next((item for number, item in enumerate(value) if item in value[:number]), None)
        if repeated is not None:
            return None, [
                OptionFault(place, f"{place}: {shown_value(repeated)} is there twice: keep one.")
            ]
        return value, []
    if isinstance(value, Mapping) and is_random:
        try:
            return Range.model_validate(dict(value)), []
        except ValidationError as error:
            return None, [_within(place, fault) for fault in option_faults(error, Range)]
    ways = "must be a list of values, such as [8, 32]"
    ways += ", or a range such as {min: 1e-5, max: 1e-3, log: true}" if is_random else ""
    ways += "; ranges are of method: random" if isinstance(value, Mapping) and not is_random else ""
    return None, [OptionFault(place, f"{place} = {shown_value(value)}: {ways}.")]


def _combined(
    options: SweepOptions, choices: Mapping[str, Choices]
) -> tuple[list[dict[str, Any]], list[OptionFault]]:
    """The values of each job, or faults."""
    if options.samples is not None:
        found = drawn(choices, options.samples, options.seed or 0)
        if len(found) < options.samples:
            text = (
                f"sweep.samples = {options.samples}: these values have only {len(found)} "
                "combinations. Ask for fewer."
            )
            return [], [OptionFault("sweep.samples", text)]
        return found, []
    lists = {
        name: list(values) for name, values in choices.items() if not isinstance(values, Range)
    }
    number = math.prod(len(values) for values in lists.values())
    if not 2 <= number <= MOST_JOBS:
        way = (
            "give more values"
            if number < 2
            else "leave values out, or draw some: method: random, samples: 16"
        )
        text = (
            f"sweep makes {number:,} job{'s' * (number != 1)}, and may make 2 to {MOST_JOBS}: "
            f"{way}."
        )
        return [], [OptionFault(SWEEP, text)]
    return [dict(zip(lists, values, strict=True)) for values in product(*lists.values())], []


def _jobs(
    alone: Mapping[Any, Any], combinations: list[dict[str, Any]]
) -> tuple[list[AskedJob], list[OptionFault]]:
    """A job for each combination, and all their faults; without combinations, the faults of the
    other options.
    """
    if not combinations:
        return [], read_request(alone)[1]
    jobs: list[AskedJob] = []
    faults: list[OptionFault] = []
    for values in combinations:
        body = _with_values(alone, values)
        request, found = read_request(body)
        if request is not None:
            jobs.append(
                AskedJob(body, request, {name: _value_of(request, name) for name in values})
            )
        faults += [_named_in_sweep(fault, values) for fault in found]
        if len(faults) >= _MOST_FAULTS:  # the rest of the body's come again with each combination
            break
    return jobs, faults


def _with_values(alone: Mapping[Any, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    body = dict(alone)
    for name, value in values.items():
        inner = body
        *sections, last = name.split(".")
        for section in sections:
            there = inner.get(section)
            if there is not None and not isinstance(there, Mapping):
                break  # the section's own fault is reported
            inner[section] = inner = dict(there or {})
        else:
            inner[last] = value
    return body


def _value_of(request: JobRequest, name: str) -> Any:
    """The option's parsed value, as JSON."""
    inner: Any = request.model_dump(mode="json")
    for part in name.split("."):
        inner = inner[part]
    return inner


def _named_in_sweep(fault: OptionFault, values: Mapping[str, Any]) -> OptionFault:
    """A fault, named within `sweep` if it is a fault of a swept value."""
    if not any(fault.place == name or fault.place.startswith(f"{name}.") for name in values):
        return fault
    return _within(SWEEP, fault)
