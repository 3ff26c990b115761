"""A user's request: the body of a create request, or a SPEC file.

Unknown keys are refused by name. Keys that this version does not support yet (`NOT_YET`) are
refused with an alternative.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, ValidationError, WithJsonSchema, model_validator

from ft_service.errors import SpecError
from ft_service.spec.integrations import Integrations
from ft_service.spec.methods import (
    ANSWER_METHODS,
    AUTO,
    PREFERENCE_METHODS,
    Hyperparameters,
    Method,
    MethodType,
)
from ft_service.spec.option_types import Number
from ft_service.spec.options import (
    DPO_EPOCHS,
    DPO_LEARNING_RATE,
    LEARNING_RATE,
    ORPO_LEARNING_RATE,
    REINFORCEMENT_EPOCHS,
    REINFORCEMENT_LEARNING_RATE,
    JobOptions,
    TrainingOptions,
)
from ft_service.spec.validation_errors import OptionFault, joined, option_faults
from ft_service.wording import kind, shown_value

_OWN_BASE = (
    "it puts what is left of each weight, quantised anew, into the base, and the adapter belongs "
    "to that base alone; here the "
    "base stays as it was published, one for all jobs, and the adapter goes on it with plain PEFT"
)

NOT_YET: Mapping[str, str] = {
    "lora.trainable_token_indices": "use lora.modules_to_save: [embed_tokens], which trains all "
    "rows",
}
"""Options that this version refuses: dotted name → what to do instead."""

NOT_YET_VALUES: Mapping[tuple[str, object], str] = {
    ("lora.init_lora_weights", "gaussian"): "use true",
    **dict.fromkeys(
        (("lora.init_lora_weights", name) for name in ("pissa", "loftq", "olora")),
        f"use true: {_OWN_BASE}",
    ),
    ("method.type", "cpo"): "use simpo or orpo, which need no reference either",
    **dict.fromkeys(
        (("method.type", name) for name in ("ppo", "rloo")), "use reinforcement, which is GRPO"
    ),
    (
        "method.type",
        "tinker",
    ): "a client that runs the training loop creates such jobs by Tinker's wire (docs/tinker.md)",
}
"""Values that this version refuses: (dotted name, value) → what to do instead."""

_NOT_OF_SAMPLED = (
    (
        "training",
        "neftune_noise_alpha",
        "noise would make the trainer another model than the sampler. Leave it out",
    ),
    (
        "lora",
        "lora_dropout",
        "dropout would make the trainer another model than the sampler. Leave it out",
    ),
    (
        "precision",
        "served_as",
        "the sampler puts the adapter on the base without rounding the sum. Leave it out",
    ),
)
_NOT_OF_REINFORCEMENT = (
    *_NOT_OF_SAMPLED,
    ("", "validation_split", "give a validation_file, whose prompts are answered and graded"),
    ("", "evaluation", "a validation_file is answered and graded in its place. Leave it out"),
    ("training", "train_on", "the answers are the model's own. Leave it out"),
    ("training", "group_by_length", "answers have no length before they are sampled. Leave it out"),
    (
        "training",
        "eval_steps",
        "it has method.reinforcement.hyperparameters.eval_interval. Use that",
    ),
    (
        "training",
        "early_stopping_patience",
        "it goes by validation loss. Use load_best_model_at_end, which goes by reward",
    ),
    ("lora", "use_dora", "the sampler takes A and B of LoRA only. Leave it out"),
    ("lora", "target_parameters", "the sampler takes adapters of linear layers only. Leave it out"),
    ("lora", "modules_to_save", "the sampler takes adapters of linear layers only. Leave it out"),
)
_NOT_OF_DISTILLATION = (
    (
        "lora",
        "modules_to_save",
        "the teacher's embedding and head are the base's, and kept beside the student's by no "
        "one. Leave it out",
    ),
    (
        "precision",
        "served_as",
        "the teacher is the base, which it would round too. Leave it out",
    ),
)
_NOT_OF_STUDENT = (
    *_NOT_OF_DISTILLATION,
    *(refused for refused in _NOT_OF_SAMPLED if refused[1] != "served_as"),
    (
        "",
        "validation_file",
        "no answers to it are compared while the student trains. Leave it out, and score the tuned "
        "model afterwards (ft eval)",
    ),
    ("", "validation_split", "no answers to it are compared. Leave it out"),
    ("", "evaluation", "the student answers the training file's prompts alone. Leave it out"),
    ("training", "train_on", "the answers are the student's own. Leave it out"),
    ("training", "group_by_length", "answers have no length before they are sampled. Leave it out"),
    ("training", "eval_steps", "there is no validation. Leave it out"),
    ("lora", "use_dora", "the sampler takes A and B of LoRA only. Leave it out"),
    ("lora", "target_parameters", "the sampler takes adapters of linear layers only. Leave it out"),
)
_NOT_OF_METHOD = {
    "reinforcement": _NOT_OF_REINFORCEMENT,
    "tinker": (
        *_NOT_OF_SAMPLED,
        (
            "training",
            "optim",
            "its clients load the moments of other jobs, which are kept in fp32. Leave it out",
        ),
    ),
    "distillation": _NOT_OF_DISTILLATION,
}
"""Method → section, option, and what to do instead."""


def _not_of(method: Method) -> Sequence[tuple[str, str, str]]:
    if method.type == "distillation" and method.samples_answers:
        return _NOT_OF_STUDENT
    return _NOT_OF_METHOD.get(method.type, ())


SWEEP = "sweep"
"""The key in a body or a SPEC file that requests several jobs
(ft_service/sweeps/search_space.py).
"""

LEARNING_RATES: Mapping[MethodType, float] = {
    "supervised": LEARNING_RATE,
    "dpo": DPO_LEARNING_RATE,
    "simpo": DPO_LEARNING_RATE,
    "kto": DPO_LEARNING_RATE,
    "distillation": LEARNING_RATE,
    "orpo": ORPO_LEARNING_RATE,
    "reinforcement": REINFORCEMENT_LEARNING_RATE,
    "tinker": LEARNING_RATE,
}
"""Method → its learning rate with `learning_rate_multiplier: 1`."""
_EPOCHS: Mapping[MethodType, int] = {
    **dict.fromkeys(PREFERENCE_METHODS, DPO_EPOCHS),
    "reinforcement": REINFORCEMENT_EPOCHS,
}
"""Method → its passes over the training file, where it has its own."""

_FILE_NAME = {"minLength": 1, "maxLength": 4096}
_HYPERPARAMETERS = set(Hyperparameters.model_fields)

Suffix = Annotated[
    str, Field(min_length=1, max_length=64, pattern=r"^[._-]*[A-Za-z0-9][A-Za-z0-9._-]*$")
]
Metadata = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


class JobRequest(JobOptions):
    """The body of `POST /v1/fine_tuning/jobs`, and a SPEC file: OpenAI's fields and ours side by
    side.
    """

    model: Annotated[str, Field(min_length=1, max_length=512)]
    """The base, by its name in `ft models`; or a tuned model or one of its checkpoints, to continue
    from there.
    """
    training_file: Annotated[
        Annotated[str, Field(min_length=1, max_length=4096)] | None,
        WithJsonSchema({"type": "string", **_FILE_NAME}),
    ]
    """REST: a file id. SPEC file: a path, relative to the SPEC file."""
    validation_file: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Samples that are never trained on, for the validation loss; named like training_file.

    None: no validation.
    """
    validation_split: Annotated[Number, Field(gt=0, lt=1)] | None = None
    """Share of the training file's samples that is set aside for validation if there is no
    validation_file. Their tokens and the seed decide which, not their order; equal samples stay
    together. None: no samples.
    """
    method: Method = Method()
    hyperparameters: Hyperparameters = Hyperparameters()
    """OpenAI's older place for method.supervised.hyperparameters."""
    suffix: Suffix | None = None
    """A name for the job, and a part of its tuned model's name."""
    seed: Annotated[int, Field(ge=0, le=2_147_483_647)] | None = None
    """Seed of adapter initialisation and sample order; None: drawn at submission and shown in the
    job.
    """
    metadata: Metadata | None = None
    """Up to 16 pairs of yours, by which jobs can be listed."""
    integrations: Integrations | None = None
    """Other places for the metrics. wandb, mlflow, trackio: for jobs of a server with
    FT_WANDB_API_KEY, FT_MLFLOW_TRACKING_URI or FT_TRACKIO_URL; `ft run` refuses them. tensorboard:
    files in the run directory's `tensorboard/` during training, and with the adapter.
    """

    def integrated(self, kind: str) -> bool:
        """Whether it has an integration of this type."""
        return any(integration.type == kind for integration in self.integrations or ())

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
                    f"{section}.{name} goes by validation loss: give a validation_file or "
                    "validation_split, or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _training_file_unless_the_client_has_the_data(self) -> JobRequest:
        named = self.training_file, self.validation_file, self.validation_split, self.evaluation
        if self.method.type == "tinker" and any(value is not None for value in named):
            raise ValueError(
                "method.type = 'tinker': the client sends all data, and the job has no files and "
                "no evaluation"
            )
        return self

    @model_validator(mode="after")
    def _possible_with_method(self) -> JobRequest:
        whose = (
            "distillation with answers = 'student'"
            if self.method.type == "distillation" and self.method.samples_answers
            else f"method.type = '{self.method.type}'"
        )
        for section, name, why in _not_of(self.method):
            options = getattr(self, section) if section else self
            if name in options.model_fields_set and getattr(options, name) not in (
                None,
                False,
                0,
                [],
            ):
                place = f"{section}.{name}" if section else name
                raise ValueError(f"{place} with {whose}: {why}")
        options = self.method.reinforcement_options()
        length = self.training.max_length
        longest = None if options is None else options.max_completion_length
        if longest is not None and longest >= length:
            raise ValueError(
                f"method.{self.method.type}.hyperparameters.max_completion_length = {longest}: "
                f"training.max_length = {length} is "
                "for prompt and answer together. Raise that, or lower this"
            )
        return self

    @model_validator(mode="after")
    def _only_answers_are_preferred(self) -> JobRequest:
        if self.method.type in ANSWER_METHODS and self.training.train_on == "everything":
            raise ValueError(
                f"training.train_on = 'everything' with method {self.method.type}: only the "
                "answers are compared, and not the text before them. Leave it out"
            )
        return self

    def given_hyperparameters(self) -> dict[str, tuple[str, Any]]:
        """Values in OpenAI's fields without "auto": name → (place, value).

        Raises ValueError for a value in two places.
        """
        places = {
            "hyperparameters": self.hyperparameters,
            f"method.{self.method.type}.hyperparameters": self.method.hyperparameters,
        }
        given: dict[str, tuple[str, Any]] = {}
        for place, values in places.items():
            for name, value in values.model_dump(
                exclude_unset=True, include=_HYPERPARAMETERS
            ).items():
                if value == AUTO:
                    continue
                if name in given:
                    raise ValueError(
                        f"{place}.{name} and {given[name][0]}.{name} are both given: keep one"
                    )
                given[name] = (place, value)
        return given

    _resolved: tuple[tuple[object, ...], TrainingOptions] | None = PrivateAttr(default=None)
    """The parts that `resolved_training` was made of, and its value."""

    def resolved_training(self) -> TrainingOptions:
        """`training` with OpenAI's hyperparameters.

        Raises ValueError for one that is given in both places.
        """
        parts = (self.method, self.hyperparameters, self.training)
        cached = self._resolved
        # Every submission calls it several times. A copy (model_copy) may have other parts.
        if cached is None or any(
            before is not now for before, now in zip(cached[0], parts, strict=True)
        ):
            self._resolved = cached = parts, self._resolve_training()
        return cached[1]

    def _resolve_training(self) -> TrainingOptions:
        unit = LEARNING_RATES[self.method.type]
        epochs = _EPOCHS.get(self.method.type)
        updates: dict[str, Any] = {}
        for name, (place, value) in self.given_hyperparameters().items():
            ours = "learning_rate" if name == "learning_rate_multiplier" else name
            if ours in self.training.model_fields_set:
                raise ValueError(f"{place}.{name} and training.{ours} are both given: keep one")
            updates[ours] = value * unit if name == "learning_rate_multiplier" else value
        usual: dict[str, Any] = (
            {} if epochs is None else {"learning_rate": unit, "n_epochs": epochs}
        )
        for name in ("n_epochs", "batch_size"):
            if self._leaves_open(name):
                usual[name] = AUTO
        if epochs is None and self._leaves_open("learning_rate_multiplier"):
            usual["learning_rate"] = AUTO
        given = self.training.model_dump(exclude_unset=True)
        if epochs is not None and given.get("learning_rate") == AUTO:
            del given["learning_rate"]
        return TrainingOptions(**{**usual, **given, **updates})

    @property
    def counts_samples(self) -> bool:
        """Whether an option depends on how many samples the training file has."""
        training = self.resolved_training()
        return AUTO in (training.n_epochs, training.batch_size)

    def _leaves_open(self, name: str) -> bool:
        """Whether one of OpenAI's hyperparameters is given as "auto"."""
        places = (self.hyperparameters, self.method.hyperparameters)
        given = [place for place in places if name in place.model_fields_set]
        return bool(given) and all(getattr(place, name) == AUTO for place in given)


def parse_request(body: object) -> JobRequest:
    """Validate a create body.

    Raises SpecError naming every invalid field (dotted) with its value and limit.
    """
    if not isinstance(body, Mapping):
        raise SpecError(
            f"The body must be an object with model and training_file, not {kind(body)}."
        )
    request, faults = read_request(body)
    if request is None:
        raise joined(faults)
    return request


def parse_client_loop(body: Mapping[str, Any]) -> tuple[dict[str, Any], JobRequest]:
    """A job without files, whose client runs the training loop: the create body that is stored, and
    the request. `body`: its model and options. Raises SpecError as `parse_request`.
    """
    whole = {**body, "training_file": None, "method": {"type": "tinker"}}
    try:
        return whole, JobRequest.model_validate(whole)
    except ValidationError as error:
        raise joined(list(option_faults(error, JobRequest))) from None


def read_request(body: Mapping[Any, Any]) -> tuple[JobRequest | None, list[OptionFault]]:
    """Validate a create body, of a user, who names a training file.

    Returns the request, or all of its faults.
    """
    faults = [*_not_yet(body), *_sweep(body), *_no_file(body)]
    refused = {fault.place for fault in faults}
    try:
        request = JobRequest.model_validate(dict(body))
    except ValidationError as error:
        found = option_faults(error, JobRequest, NOT_YET_VALUES.keys())
        return None, faults + [fault for fault in found if fault.place not in refused]
    return (None, faults) if faults else (request, [])


def _sweep(body: Mapping[Any, Any]) -> Iterator[OptionFault]:
    if SWEEP in body:
        text = (
            "sweep: makes several jobs, and this is for one job. Submit them to a server with `ft "
            "sweep submit SPEC` (POST "
            "/v1/fine_tuning/sweeps), or leave it out and give each option one value."
        )
        yield OptionFault(SWEEP, text, "not_available")


def _no_file(body: Mapping[Any, Any]) -> Iterator[OptionFault]:
    if "training_file" in body and body["training_file"] is None:
        yield OptionFault("training_file", "training_file = null: must be text.", "invalid_value")


def _not_yet(body: Mapping[Any, Any]) -> Iterator[OptionFault]:
    refused = [(dotted, None, instead) for dotted, instead in NOT_YET.items()]
    refused += [(dotted, value, instead) for (dotted, value), instead in NOT_YET_VALUES.items()]
    for dotted, value, instead in refused:
        section, key = dotted.split(".")
        inner = body.get(section)
        if isinstance(inner, Mapping) and key in inner and value in (None, inner[key]):
            text = (
                f"{dotted} = {shown_value(inner[key])} is not available in this version: {instead}."
            )
            yield OptionFault(dotted, text, "not_available")
