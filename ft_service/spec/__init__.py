"""A job's options: those of a create request, and the resolved `JobSpec` that a worker reads.

templates             chat templates by name
option_types          types of option values
weight_formats        the storage formats of frozen weights
methods               the loss, as in OpenAI's API
options               our additions to OpenAI's create body
evaluation            prompts and graders that compare the model before and after training
integrations          other places for the metrics
request               the whole create body, or a SPEC file
tuned_name            names of tuned models
resolved              `spec.json`: every default filled in, every reference a path and a digest
auto_hyperparameters  learning rate, batch size and epochs for "auto"
stored_spec           the same in a row of the store
validation_errors     messages for an invalid request
yaml_loader           the YAML of SPEC files, and of files that settings name
"""

from __future__ import annotations

from ft_service.spec.evaluation import AnswerMetric, EvaluationOptions, Prompt, read_prompts
from ft_service.spec.integrations import Integration, Mlflow, Trackio, Wandb
from ft_service.spec.methods import (
    AUTO,
    PAIR_METHODS,
    PREFERENCE_METHODS,
    DistillationOptions,
    DpoHyperparameters,
    DpoOptions,
    Hyperparameters,
    KtoOptions,
    LossOptions,
    Method,
    MethodType,
    OrpoOptions,
    PairOptions,
    SimpoOptions,
    SupervisedMethod,
)
from ft_service.spec.option_types import (
    GREEDY,
    LEAST_EPSILON,
    Number,
    Pattern,
    Strict,
    TrainOn,
    compile_pattern,
    match_pattern,
)
from ft_service.spec.options import (
    LEARNING_RATE,
    CheckpointOptions,
    DistributedOptions,
    JobOptions,
    LoraOptions,
    PrecisionOptions,
    Prefetch,
    TrainingOptions,
    WrapBySize,
)
from ft_service.spec.request import (
    LEARNING_RATES,
    NOT_YET,
    NOT_YET_VALUES,
    JobRequest,
    Metadata,
    Suffix,
    parse_request,
)
from ft_service.spec.resolved import (
    AdapterRef,
    BaseModelRef,
    DataFileRef,
    JobContext,
    JobSpec,
    Resolved,
    by_samples,
    check_distributed,
    inherit,
    resolve,
)
from ft_service.spec.stored_spec import StoredSpec
from ft_service.spec.tuned_name import TunedName, is_tuned
from ft_service.spec.validation_errors import spec_error
from ft_service.spec.weight_formats import (
    AS_PUBLISHED,
    FORMATS,
    SERVED_FORMS,
    FormatChoice,
    Merged,
    ServedAs,
    WeightFormat,
    keeps,
)

__all__ = [
    "AS_PUBLISHED",
    "AUTO",
    "FORMATS",
    "GREEDY",
    "LEARNING_RATE",
    "LEARNING_RATES",
    "LEAST_EPSILON",
    "NOT_YET",
    "NOT_YET_VALUES",
    "PAIR_METHODS",
    "PREFERENCE_METHODS",
    "SERVED_FORMS",
    "AdapterRef",
    "AnswerMetric",
    "BaseModelRef",
    "CheckpointOptions",
    "DataFileRef",
    "DistillationOptions",
    "DistributedOptions",
    "DpoHyperparameters",
    "DpoOptions",
    "EvaluationOptions",
    "FormatChoice",
    "Hyperparameters",
    "Integration",
    "JobContext",
    "JobOptions",
    "JobRequest",
    "JobSpec",
    "KtoOptions",
    "LoraOptions",
    "LossOptions",
    "Merged",
    "Metadata",
    "Method",
    "MethodType",
    "Mlflow",
    "Number",
    "OrpoOptions",
    "PairOptions",
    "Pattern",
    "PrecisionOptions",
    "Prefetch",
    "Prompt",
    "Resolved",
    "ServedAs",
    "SimpoOptions",
    "StoredSpec",
    "Strict",
    "Suffix",
    "SupervisedMethod",
    "Trackio",
    "TrainOn",
    "TrainingOptions",
    "TunedName",
    "Wandb",
    "WeightFormat",
    "WrapBySize",
    "by_samples",
    "check_distributed",
    "compile_pattern",
    "inherit",
    "is_tuned",
    "keeps",
    "match_pattern",
    "parse_request",
    "read_prompts",
    "resolve",
    "spec_error",
]
