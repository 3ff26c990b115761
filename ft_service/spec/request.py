"""A user's request: the body of a create request, or a SPEC file.

Unknown keys are refused by name; keys that the design names but this version cannot honour are refused by name too, with
an alternative (`NOT_YET`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from ft_service.errors import SpecError
from ft_service.spec.faults import OptionFault, joined, option_faults
from ft_service.spec.integrations import Integrations
from ft_service.spec.methods import AUTO, Hyperparameters, Method
from ft_service.spec.options import DPO_EPOCHS, DPO_LEARNING_RATE, LEARNING_RATE, JobOptions, TrainingOptions
from ft_service.spec.values import Number

NOT_YET: Mapping[str, str] = {
    "lora.use_dora": "leave it out; plain LoRA and rsLoRA (lora.use_rslora) work",
    "lora.modules_to_save": "leave it out; only LoRA matrices train",
}
"""Options that the design names and this version refuses: dotted name → what to do instead."""

NOT_YET_VALUES: Mapping[tuple[str, object], str] = {
    ("lora.init_lora_weights", "gaussian"): "use true",
    ("method.type", "reinforcement"): "use 'supervised' or 'dpo'",
}
"""Values that the design names and this version refuses."""

SWEEP = "sweep"
"""The key of a body or a SPEC file that asks for several jobs (ft_service/sweeps/asked.py)."""

_HYPERPARAMETERS = set(Hyperparameters.model_fields)

Suffix = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
Metadata = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class JobRequest(JobOptions):
    """The body of `POST /v1/fine_tuning/jobs`, and a SPEC file: OpenAI's fields and ours side by side."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    training_file: Annotated[str, Field(min_length=1, max_length=4096)]
    """REST: a file id. SPEC file: a path, relative to the SPEC file."""
    validation_file: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    validation_split: Annotated[Number, Field(gt=0, lt=1)] | None = None
    """Share of the training file's samples that is set aside for validation, where there is no validation_file. Which ones
    follows from their tokens and the seed, whatever their order; equal samples stay together. None: none."""
    method: Method = Method()
    hyperparameters: Hyperparameters = Hyperparameters()
    """OpenAI's older place for method.supervised.hyperparameters."""
    suffix: Suffix | None = None
    seed: Annotated[int, Field(ge=0, le=2_147_483_647)] | None = None
    """Decides adapter initialisation and sample order; None: drawn at submission and shown in the job."""
    metadata: Metadata | None = None
    integrations: Integrations | None = None
    """Where else the metrics go. wandb, mlflow, trackio: for jobs of a server that has FT_WANDB_API_KEY,
    FT_MLFLOW_TRACKING_URI or FT_TRACKIO_URL; `ft run` refuses them. tensorboard: files in the run directory's `tensorboard/`
    while it trains, and with the adapter."""

    def integrated(self, kind: str) -> bool:
        """Whether an integration of this type is asked for."""
        return any(one.type == kind for one in self.integrations or ())

    @model_validator(mode="after")
    def _one_place_per_value(self) -> JobRequest:
        self.resolved_training()
        return self

    @model_validator(mode="after")
    def _validation_file_where_needed(self) -> JobRequest:
        if self.validation_file is not None and self.validation_split is not None:
            raise ValueError("validation_file and validation_split are both given: keep one")
        if self.validation_file is not None or self.validation_split is not None:
            return self
        for section, name in (
            ("training", "early_stopping_patience"),
            ("training", "load_best_model_at_end"),
            ("checkpoint", "keep_best"),
        ):
            if getattr(getattr(self, section), name):
                raise ValueError(
                    f"{section}.{name} goes by validation loss: give a validation_file or validation_split, or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _only_answers_are_preferred(self) -> JobRequest:
        if self.method.type == "dpo" and self.training.train_on == "everything":
            raise ValueError(
                "training.train_on = 'everything' with method dpo: of a pair only the answers are compared, and what "
                "stands before them is the same. Leave it out"
            )
        return self

    def given_hyperparameters(self) -> dict[str, tuple[str, Any]]:
        """Values in OpenAI's fields: name → (where it was given, value), "auto" left out. Given twice is a ValueError."""
        places = {
            "hyperparameters": self.hyperparameters,
            f"method.{self.method.type}.hyperparameters": self.method.hyperparameters,
        }
        given: dict[str, tuple[str, Any]] = {}
        for place, values in places.items():
            for name, value in values.model_dump(exclude_unset=True, include=_HYPERPARAMETERS).items():
                if value == AUTO:
                    continue
                if name in given:
                    raise ValueError(f"{place}.{name} and {given[name][0]}.{name} are both given: keep one")
                given[name] = (place, value)
        return given

    _resolved: tuple[tuple[object, ...], TrainingOptions] | None = PrivateAttr(default=None)
    """What `resolved_training` was made of, and what it is."""

    def resolved_training(self) -> TrainingOptions:
        """`training` with OpenAI's hyperparameters folded in. Raises ValueError when one is given in both places."""
        parts, made = (self.method, self.hyperparameters, self.training), self._resolved
        # Asked for several times by every submit. A copy (model_copy) may have other parts.
        if made is None or any(one is not other for one, other in zip(made[0], parts, strict=True)):
            self._resolved = made = parts, self._resolve_training()
        return made[1]

    def _resolve_training(self) -> TrainingOptions:
        dpo = self.method.type == "dpo"
        of_one = DPO_LEARNING_RATE if dpo else LEARNING_RATE
        updates: dict[str, Any] = {}
        for name, (place, value) in self.given_hyperparameters().items():
            ours = "learning_rate" if name == "learning_rate_multiplier" else name
            if ours in self.training.model_fields_set:
                raise ValueError(f"{place}.{name} and training.{ours} are both given: keep one")
            updates[ours] = value * of_one if name == "learning_rate_multiplier" else value
        usual: dict[str, Any] = {"learning_rate": DPO_LEARNING_RATE, "n_epochs": DPO_EPOCHS} if dpo else {}
        for name in ("n_epochs", "batch_size"):
            if self._leaves_open(name):
                usual[name] = AUTO
        if not dpo and self._leaves_open("learning_rate_multiplier"):
            usual["learning_rate"] = AUTO
        given = self.training.model_dump(exclude_unset=True)
        if dpo and given.get("learning_rate") == AUTO:
            del given["learning_rate"]
        return TrainingOptions(**{**usual, **given, **updates})

    @property
    def counts_samples(self) -> bool:
        """Whether an option depends on how many samples the training file has."""
        training = self.resolved_training()
        return AUTO in (training.n_epochs, training.batch_size)

    def _leaves_open(self, name: str) -> bool:
        """Whether one of OpenAI's hyperparameters is given as "auto", which leaves the choice to the service."""
        places = (self.hyperparameters, self.method.hyperparameters)
        given = [place for place in places if name in place.model_fields_set]
        return bool(given) and all(getattr(place, name) == AUTO for place in given)


def parse_request(body: object) -> JobRequest:
    """Validate a create body. Raises SpecError naming every field at fault (dotted) with its value and limit."""
    if not isinstance(body, Mapping):
        raise SpecError(f"The body must be an object with model and training_file, not {type(body).__name__}.")
    request, faults = read_request(body)
    if request is None:
        raise joined(faults)
    return request


def read_request(body: Mapping[Any, Any]) -> tuple[JobRequest | None, list[OptionFault]]:
    """A create body, or all that is wrong with it."""
    faults = [*_not_yet(body), *_sweep(body)]
    refused = {fault.place for fault in faults}
    try:
        request = JobRequest.model_validate(dict(body))
    except ValidationError as error:
        return None, faults + [fault for fault in option_faults(error, JobRequest) if fault.place not in refused]
    return (None, faults) if faults else (request, [])


def _sweep(body: Mapping[Any, Any]) -> Iterator[OptionFault]:
    if SWEEP in body:
        text = (
            "sweep: makes several jobs, and this is for one. Submit them to a server with `ft sweep submit SPEC` (POST "
            "/v1/fine_tuning/sweeps), or leave it out and give each option one value."
        )
        yield OptionFault(SWEEP, text, "not_available")


def _not_yet(body: Mapping[Any, Any]) -> Iterator[OptionFault]:
    refused = [(dotted, None, instead) for dotted, instead in NOT_YET.items()]
    refused += [(dotted, value, instead) for (dotted, value), instead in NOT_YET_VALUES.items()]
    for dotted, value, instead in refused:
        section, key = dotted.split(".")
        inner = body.get(section)
        if isinstance(inner, Mapping) and key in inner and value in (None, inner[key]):
            text = f"{dotted} = {inner[key]!r} is not available in this version: {instead}."
            yield OptionFault(dotted, text, "not_available")
