"""What a job is asked to do: the options of a create request, and the resolved `JobSpec` that a worker reads.

Two models share their parts. `JobOptions` is what a user sends (REST body or YAML file) beyond model and files; `JobSpec` is
the same with every default filled in and every reference turned into a path and a digest. Unknown keys are refused by name;
keys that design names but this version cannot honour are refused by name too, with what to do instead (`NOT_YET`).

Field docstrings say unit, default, sentinel, and when a field is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import re2
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ft_service.errors import SpecError
from ft_service.mesh import check_reshard_size, mesh_shape

WeightFormat = Literal["bf16", "fp8", "nf4"]

LEARNING_RATE = 2e-4
"""The learning rate that `learning_rate_multiplier: 1` stands for; the usual one for LoRA with AdamW."""

NOT_YET: Mapping[str, str] = {
    "lora.use_dora": "leave it out; plain LoRA and rsLoRA (lora.use_rslora) work",
    "lora.modules_to_save": "leave it out; only LoRA matrices train",
    "training.packing": "leave it out; samples are padded to the longest of their micro-batch",
    "training.early_stopping_patience": "leave it out and cancel the job when validation loss stops falling",
    "checkpoint.keep_best": "leave it out; the newest checkpoint.save_total_limit are kept",
    "checkpoint.async_save": "leave it out; a checkpoint holds only adapters and optimizer and takes a moment",
}
"""Options that the design names and this version refuses: dotted name → what to do instead."""

NOT_YET_VALUES: Mapping[tuple[str, object], str] = {
    ("lora.init_lora_weights", "gaussian"): "use true",
    ("method.type", "dpo"): "use 'supervised'",
    ("method.type", "reinforcement"): "use 'supervised'",
}
"""Values that the design names and this version refuses."""


def compile_pattern(pattern: str) -> Any:
    """An RE2 pattern (linear time, whatever the pattern). Raises re2.error."""
    options = re2.Options()
    options.log_errors = False
    return re2.compile(pattern, options)


class Strict(BaseModel):
    """Base of everything a user writes: unknown keys are errors, values are not coerced across types, instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


def _check_pattern(value: object) -> object:
    if isinstance(value, str):
        try:
            compile_pattern(value)
        except re2.error as error:
            raise ValueError(f"not a pattern that RE2 accepts: {error}") from None
    return value


Pattern = Annotated[str, BeforeValidator(_check_pattern)]
"""A regular expression in RE2's syntax (linear time), matched against the whole module name."""


def _number(value: object) -> object:
    """JSON and YAML write 1 for 1.0, and YAML 1.1 reads `2e-4` as a string: take both as the number they mean."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]


class LoraOptions(Strict):
    """The adapter, in the names of PEFT's LoraConfig."""

    r: Annotated[int, Field(ge=1, le=512)] = 16
    """Rank of the two adapter matrices A [r, in] and B [out, r]."""
    lora_alpha: Annotated[Number, Field(gt=0, le=4096)] = 32.0
    """Numerator of the scaling: alpha / r, or alpha / sqrt(r) with use_rslora."""
    lora_dropout: Annotated[Number, Field(ge=0, le=0)] = 0.0
    """Only 0: masks that survive a resume on another world size are not implemented yet."""
    target_modules: Literal["all-linear"] | Pattern | list[str] = "all-linear"
    """Modules that get an adapter: every linear layer but the output head, or names (suffixes), or one RE2 pattern.

    In a mixture of experts neither experts, nor routers, nor dense layers with an expert's name (gate_proj, down_proj, ..) can
    have one: "all-linear" leaves them out, naming them is an error."""
    rank_pattern: dict[Pattern, Annotated[int, Field(ge=1, le=512)]] = {}
    """RE2 pattern on the end of the module's full name, from a dot on → rank in place of r. The first one that matches wins."""
    alpha_pattern: dict[Pattern, Annotated[Number, Field(gt=0, le=4096)]] = {}
    """As rank_pattern, in place of lora_alpha."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead of alpha / r."""
    init_lora_weights: Literal[True] = True
    """A from Kaiming uniform, B zero: the tuned model starts as the base."""


def _one_compute_type(value: object) -> object:
    if isinstance(value, Mapping):
        raise ValueError(
            "one type for the whole job, not one by module: a decoder layer is gathered as one group, and FSDP2 converts a "
            "group to one type. Norms compute in fp32 inside whatever it is"
        )
    return value


class PrecisionOptions(Strict):
    """In which format the frozen weights are stored, sharded and gathered, and in which the arithmetic runs."""

    default: WeightFormat = "bf16"
    """Format of every linear layer and every stack of experts inside the decoder layers that no override names; the rest,
    routers included, stays bf16."""
    overrides: dict[Pattern, WeightFormat] = {}
    """RE2 pattern on the module's full name → format; the last pattern that matches wins. A pattern without a match is an
    error, and so is one that asks for another format than bf16 outside the decoder layers (embeddings, output head)."""
    compute: Annotated[Literal["bf16", "fp32"], BeforeValidator(_one_compute_type)] = "bf16"
    """Element type of activations and matrix products in all modules: FSDP2 has one for all that is gathered together.
    Adapters are fp32 masters either way."""


class TrainingOptions(Strict):
    """The optimisation, in the names of Transformers' TrainingArguments."""

    n_epochs: Annotated[int, Field(ge=1, le=50)] = 3
    """Passes over the training file; ignored when max_steps is given."""
    max_steps: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Optimizer steps; None: as many as n_epochs take."""
    batch_size: Annotated[int, Field(ge=1, le=8192)] = 8
    """Samples per optimizer step over all ranks, whatever their number; the last batch of an epoch may be smaller."""
    per_device_train_batch_size: Annotated[int, Field(ge=1, le=1024)] = 4
    """Samples per forward on one rank: memory, not mathematics. A step runs as many micro-batches as batch_size needs."""
    max_length: Annotated[int, Field(ge=8, le=1_048_576)] = 2048
    """Tokens kept of a sample; the rest is cut from the end, and counted in a warning. Bounded by the model's own limit."""
    learning_rate: Annotated[Number, Field(gt=0, le=1)] = LEARNING_RATE
    """AdamW's peak learning rate."""
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    """How the rate falls after the warm-up: to 0 at the last step, or not at all."""
    warmup_ratio: Annotated[Number, Field(ge=0, le=1)] = 0.03
    """Share of all steps in which the rate rises from 0."""
    weight_decay: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """AdamW's decoupled weight decay on the adapters."""
    max_grad_norm: Annotated[Number, Field(ge=0)] = 1.0
    """Gradients are scaled down to this global 2-norm; 0: never."""
    optim: Literal["adamw_torch"] = "adamw_torch"
    eval_steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps between validations; None: at the end of every epoch. Ignored without a validation file."""


class Prefetch(Strict):
    """How many groups ahead weights are gathered while a group computes; each holds its gathered weights meanwhile."""

    forward: Annotated[int, Field(ge=1, le=8)] = 1
    backward: Annotated[int, Field(ge=1, le=8)] = 1


class WrapBySize(Strict):
    """Group by size."""

    min_params: Annotated[int, Field(ge=1)]
    """Parameters: the smallest modules that hold at least so many, beside what is a group inside them, become groups."""


class DistributedOptions(Strict):
    """How many processes train, and how they keep the base. Where nothing is sharded (one rank, or replicate -1), what says
    how to shard or gather is ignored."""

    nnodes: Annotated[int, Field(ge=1, le=512)] = 1
    """Hosts (on Kubernetes: pods) that train together, with nproc_per_node ranks each."""
    nproc_per_node: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = "auto"
    """Ranks on each host. "auto": one per GPU of the host; 1 without a GPU."""
    replicate: Annotated[int, Field(ge=1, le=4096)] | Literal[-1, "auto"] = "auto"
    """Copies of the model (HSDP), each sharded over ranks / replicate ranks; gradients are averaged over all. Must divide the
    number of ranks. -1: one copy a rank, so nothing is sharded; "auto": one copy a host, so that weights are gathered within
    hosts only and what crosses the network is the adapters' gradients."""
    wrap: Literal["layers", "none"] | WrapBySize = "layers"
    """What is gathered together. "layers": every decoder layer, the embedding, norm with head; "none": everything at once, held
    for the whole step; or by size."""
    ignored: list[Pattern] = []
    """RE2 patterns on names of base weights, as in the checkpoint: these are not sharded, every rank holds them whole. A
    pattern without a match is an error."""
    reshard_after_forward: bool | Annotated[int, Field(ge=2, le=4096)] = True
    """Free a layer's gathered weights after its forward and gather again for its backward: less memory, twice the traffic. A
    number: after forward keep them sharded over groups of so many ranks; must divide the ranks that share a copy, and needs a
    base that is all bf16. Ignored with keep_unsharded, and with wrap "none"."""
    keep_unsharded: bool = False
    """Gather once an optimizer step and keep all weights until the last micro-batch's backward: least traffic, most memory."""
    prefetch: Prefetch | None = None
    """Gather explicitly ahead, and the first group before the batch is put together. None: FSDP2's own, one group ahead."""
    offload: bool = False
    """Keep shards, gradients and optimizer state in the host's memory. Needs GPUs and at least two ranks that share a copy."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Compute activations again in backward: "full" keeps only the input of each decoder layer, "selective" also the results of
    matrix products and attention."""
    compile: bool = False
    """torch.compile for each decoder layer. If that fails the job goes on uncompiled, with a warning that says why."""

    @property
    def reshard_size(self) -> int | None:
        """reshard_after_forward where it is a number."""
        return None if isinstance(self.reshard_after_forward, bool) else self.reshard_after_forward


class CheckpointOptions(Strict):
    """When a job can be resumed from where."""

    save_steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps between checkpoints; None: at the end of every epoch. One is always written at the last step."""
    save_total_limit: Annotated[int, Field(ge=1, le=1000)] = 3
    """Complete checkpoints kept; older ones are removed once a newer one is complete."""


class JobOptions(Strict):
    """What our create body adds to OpenAI's, and the whole of what a SPEC file may say beside model and files."""

    lora: LoraOptions = LoraOptions()
    precision: PrecisionOptions = PrecisionOptions()
    training: TrainingOptions = TrainingOptions()
    distributed: DistributedOptions = DistributedOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Higher starts first; equal ones in the order of their creation."""

    @model_validator(mode="after")
    def _consistent_distributed(self) -> JobOptions:
        options, formats = self.distributed, {self.precision.default, *self.precision.overrides.values()} - {"bf16"}
        if options.reshard_size is not None and (options.keep_unsharded or options.wrap == "none"):
            other = "keep_unsharded" if options.keep_unsharded else "wrap 'none'"
            raise ValueError(f"distributed.reshard_after_forward as a number has no effect with {other}: keep one of the two")
        if options.reshard_size is not None and formats:
            raise ValueError(
                f"distributed.reshard_after_forward = {options.reshard_size}: FSDP2 reshards to a number of ranks only plain "
                f"weights, and precision stores some as {' and '.join(sorted(formats))}. Use true or false"
            )
        if options.prefetch is not None and options.wrap == "none":
            raise ValueError("distributed.prefetch: with wrap 'none' there is only one group; leave one of the two out")
        if options.compile and isinstance(options.wrap, WrapBySize):
            raise ValueError("distributed.compile works on whole decoder layers: leave it out, or use wrap 'layers'")
        if options.offload and options.ignored:
            raise ValueError("distributed.offload moves shards only, and distributed.ignored weights have none: keep one")
        return self


AUTO = "auto"


class Hyperparameters(Strict):
    """OpenAI's three. "auto" leaves the choice to the service: n_epochs 3, batch_size 8, learning_rate_multiplier 1."""

    n_epochs: Annotated[int, Field(ge=1, le=50)] | Literal["auto"] = AUTO
    batch_size: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = AUTO
    learning_rate_multiplier: Annotated[Number, Field(gt=0, le=5000)] | Literal["auto"] = AUTO
    """Times LEARNING_RATE gives training.learning_rate."""


class SupervisedMethod(Strict):
    hyperparameters: Hyperparameters = Hyperparameters()


class Method(Strict):
    type: Literal["supervised"] = "supervised"
    supervised: SupervisedMethod = SupervisedMethod()


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
    method: Method = Method()
    hyperparameters: Hyperparameters = Hyperparameters()
    """OpenAI's older place for method.supervised.hyperparameters."""
    suffix: Suffix | None = None
    seed: Annotated[int, Field(ge=0, le=2_147_483_647)] | None = None
    """Decides adapter initialisation and sample order; None: drawn at submission and shown in the job."""
    metadata: Metadata | None = None
    integrations: Annotated[list[Any], Field(max_length=0)] | None = None
    """OpenAI's field; refused when not empty, since no integration is implemented yet."""

    @model_validator(mode="after")
    def _one_place_per_value(self) -> JobRequest:
        self.resolved_training()
        return self

    def given_hyperparameters(self) -> dict[str, tuple[str, Any]]:
        """What OpenAI's fields say: name → (where it was said, value), "auto" left out. Said twice is a ValueError."""
        places = {
            "hyperparameters": self.hyperparameters,
            "method.supervised.hyperparameters": self.method.supervised.hyperparameters,
        }
        found: dict[str, tuple[str, Any]] = {}
        for place, values in places.items():
            for name, value in values.model_dump(exclude_unset=True).items():
                if value == AUTO:
                    continue
                if name in found:
                    raise ValueError(f"{place}.{name} and {found[name][0]}.{name} are both given: keep one")
                found[name] = (place, value)
        return found

    def resolved_training(self) -> TrainingOptions:
        """`training` with OpenAI's hyperparameters folded in. Raises ValueError when one is given in both places."""
        updates: dict[str, Any] = {}
        for name, (place, value) in self.given_hyperparameters().items():
            ours = "learning_rate" if name == "learning_rate_multiplier" else name
            if ours in self.training.model_fields_set:
                raise ValueError(f"{place}.{name} and training.{ours} are both given: keep one")
            updates[ours] = value * LEARNING_RATE if name == "learning_rate_multiplier" else value
        return TrainingOptions(**{**self.training.model_dump(exclude_unset=True), **updates})


class Resolved(BaseModel):
    """Base of what the service itself writes: unknown keys are kept out by construction, and ignored when read back."""

    model_config = ConfigDict(frozen=True)


class BaseModelRef(Resolved):
    name: str
    """As listed by `GET /v1/models`."""
    path: str
    """Absolute folder in Hugging Face layout, as the worker sees it."""


class DataFileRef(Resolved):
    name: str
    """As the user called it; used in messages."""
    path: str
    """Absolute path, as the worker sees it."""
    sha256: str
    """Of the bytes at submission: the worker refuses anything else."""


class JobSpec(Resolved):
    """`spec.json`: everything a worker needs to know, resolved and immutable."""

    version: Literal[1] = 1
    job_id: str
    model: BaseModelRef
    training_data: DataFileRef
    validation_data: DataFileRef | None
    seed: int
    tuned_name: str
    """Name of the outcome: `ft:<base>:<organisation>:<suffix>:<id>`."""
    lora: LoraOptions
    precision: PrecisionOptions
    training: TrainingOptions
    distributed: DistributedOptions
    """nproc_per_node and replicate are numbers here."""
    checkpoint: CheckpointOptions

    @property
    def world_size(self) -> int:
        """Ranks of one attempt, over all hosts."""
        assert isinstance(self.distributed.nproc_per_node, int), "a resolved spec names a number of ranks"
        return self.distributed.nnodes * self.distributed.nproc_per_node


def parse_request(body: object) -> JobRequest:
    """Validate a create body. Raises SpecError naming the field (dotted), the value and the limit."""
    if not isinstance(body, Mapping):
        raise SpecError(f"The body must be an object with model and training_file, not {type(body).__name__}.")
    _refuse_not_yet(body)
    _refuse_integrations(body.get("integrations"))
    try:
        return JobRequest.model_validate(dict(body))
    except ValidationError as error:
        raise spec_error(error, JobRequest) from None


def resolve(
    request: JobRequest,
    *,
    job_id: str,
    organization: str,
    model: BaseModelRef,
    training_data: DataFileRef,
    validation_data: DataFileRef | None,
    seed: int,
    gpus: int,
) -> JobSpec:
    """Fill in every default. `gpus`: GPUs of the host that will train, for `nproc_per_node: auto`.

    Raises SpecError for options that do not fit the number of ranks.
    """
    distributed = _resolve_distributed(request.distributed, gpus)
    base = model.name.rsplit("/", 1)[-1]
    return JobSpec(
        job_id=job_id,
        model=model,
        training_data=training_data,
        validation_data=validation_data,
        seed=request.seed if request.seed is not None else seed,
        tuned_name=f"ft:{base}:{organization}:{request.suffix or ''}:{job_id.removeprefix('ftjob-')}",
        lora=request.lora,
        precision=request.precision,
        training=request.resolved_training(),
        distributed=distributed,
        checkpoint=request.checkpoint,
    )


def _resolve_distributed(options: DistributedOptions, gpus: int) -> DistributedOptions:
    ranks = max(1, gpus) if options.nproc_per_node == AUTO else options.nproc_per_node
    replicate = options.nnodes if options.replicate == AUTO else options.replicate
    resolved = options.model_copy(update={"nproc_per_node": ranks, "replicate": replicate})
    check_distributed(resolved, options.nnodes * ranks, gpus)
    return resolved


def check_distributed(options: DistributedOptions, ranks: int, gpus: int) -> None:
    """Raises SpecError for options that do not fit the ranks, or the host."""
    _, shards = mesh_shape(options.replicate, ranks)
    if options.reshard_size is not None:
        check_reshard_size(options.reshard_size, shards)
    if options.offload and gpus == 0:
        raise SpecError(
            "distributed.offload = True: this host has no GPU, and what is in its memory already cannot be moved there. "
            "Leave it out.",
            param="distributed.offload",
        )
    if options.offload and shards == 1:
        raise SpecError(
            "distributed.offload = True: with one rank to a copy nothing is sharded, and only shards are moved. Leave it out, "
            "or use more ranks (distributed.nproc_per_node) or fewer copies (distributed.replicate).",
            param="distributed.offload",
        )


def match_pattern(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that an RE2 pattern matches as a whole, in their order."""
    compiled = compile_pattern(pattern)
    return [name for name in names if compiled.fullmatch(name)]


def _refuse_not_yet(body: Mapping[Any, Any]) -> None:
    for dotted, instead in NOT_YET.items():
        section, key = dotted.split(".")
        inner = body.get(section)
        if isinstance(inner, Mapping) and key in inner:
            raise SpecError(
                f"{dotted} = {inner[key]!r} is not available in this version: {instead}.", param=dotted, code="not_available"
            )
    for (dotted, value), instead in NOT_YET_VALUES.items():
        section, key = dotted.split(".")
        inner = body.get(section)
        if isinstance(inner, Mapping) and inner.get(key) == value:
            raise SpecError(
                f"{dotted} = {value!r} is not available in this version: {instead}.", param=dotted, code="not_available"
            )


def _refuse_integrations(given: Any) -> None:
    if not isinstance(given, list) or not given:
        return
    kinds = [entry.get("type") if isinstance(entry, Mapping) else entry for entry in given[:5]]
    raise SpecError(
        f"integrations = {', '.join(f'{kind!r:.40}' for kind in kinds)}: not available in this version: leave them out; "
        "the job's metrics are in its events and in its result file.",
        param="integrations",
        code="not_available",
    )


def spec_error(error: ValidationError, model: type[BaseModel]) -> SpecError:
    """The first fault of a pydantic error, as one sentence that names field, value and limit; the rest are counted."""
    faults = error.errors(include_url=False, include_context=False)
    fault = faults[0]
    place = _place(fault["loc"], model)
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        message = f"{place}: there is no such option. Check its spelling, or leave it out."
        return SpecError(message, param=place, code="unknown_parameter")
    if fault["type"] == "missing":
        return SpecError(f"{place} is required.", param=place, code="missing_required_parameter")
    shown = repr(fault["input"])
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    text = f"{place} = {shown}: {message}." if place else f"{message}."
    more = len({_place(f["loc"], model) for f in faults}) - 1
    if more > 0:
        text += f" ({more} more field{'s' if more > 1 else ''} at fault.)"
    return SpecError(text, param=place or _first_name(message))


def _place(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """A dotted field name from pydantic's location, without the names of union branches and validators."""
    parts: list[str] = []
    current: type[BaseModel] | None = model
    keyed = False
    for part in loc:
        if isinstance(part, int):
            parts.append(str(part))
        elif keyed:
            parts.append(part[:80])
            keyed = False
        elif current is not None and part in current.model_fields:
            parts.append(part)
            annotation = current.model_fields[part].annotation
            current = _model_of(annotation)
            keyed = _is_mapping(annotation)
        elif current is not None:
            parts.append(part[:80])
            current = None
    return ".".join(parts)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds (or none); None if it holds something else."""
    union = get_origin(annotation) in (Union, UnionType)
    inner = [part for part in get_args(annotation) if part is not NoneType] if union else [annotation]
    found = inner[0] if len(inner) == 1 else None
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def _is_mapping(annotation: Any) -> bool:
    """Whether a field holds an object with keys of the user's choice (or none)."""
    union = get_origin(annotation) in (Union, UnionType)
    inner = [part for part in get_args(annotation) if part is not NoneType] if union else [annotation]
    bare = get_args(inner[0])[0] if get_origin(inner[0]) is Annotated else inner[0]
    return len(inner) == 1 and get_origin(bare) is dict


def _first_name(message: str) -> str | None:
    word = message.split(" ", 1)[0]
    return word if "." in word else None
