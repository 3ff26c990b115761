"""`JobSpec`: a request with every default filled in and every reference turned into a path and a
digest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, model_validator

from ft_service.errors import SpecError
from ft_service.spec.auto_hyperparameters import COUNTED, batch_for, epochs_for
from ft_service.spec.environments import Environment
from ft_service.spec.evaluation import EvaluationOptions
from ft_service.spec.mesh import check_reshard_size, mesh_shape
from ft_service.spec.methods import (
    AUTO,
    PREFERENCE_METHODS,
    DistillationOptions,
    DpoOptions,
    KtoOptions,
    LossOptions,
    Method,
    MethodType,
    PairOptions,
    ReinforcementOptions,
)
from ft_service.spec.options import (
    CheckpointOptions,
    DataOptions,
    DistributedOptions,
    LoraOptions,
    PrecisionOptions,
    TrainingOptions,
    served_fault,
)
from ft_service.spec.request import JobRequest
from ft_service.spec.teachers import TeacherRef, adapter_fault, refused_teacher
from ft_service.spec.templates import named_template
from ft_service.spec.tuned_name import TunedName
from ft_service.wording import shown_value

MOST_ANSWERED = 512
"""Tokens of an answer with max_completion_length "auto", unless max_length has less room."""


class Resolved(BaseModel):
    """Base class of documents that the service writes.

    Unknown keys are ignored when a document is read.
    """

    model_config = ConfigDict(frozen=True)


class BaseModelRef(Resolved):
    """The base of a job."""

    name: str
    """Name in `GET /v1/models`."""
    path: str
    """Absolute folder in Hugging Face layout, as the worker sees it."""


class DataFileRef(Resolved):
    """A data file of a job."""

    name: str
    """The user's name for it, for messages."""
    path: str
    """Absolute path, as the worker sees it."""
    sha256: str
    """Digest of the bytes at submission; the worker refuses other bytes.

    With several files, the digest of their digests.
    """
    files: tuple[str, ...] = ()
    """Paths of the data files in the folder `path`, in their order. Empty: `path` is a file."""


class AdapterRef(Resolved):
    """A tuned model that a job continues."""

    name: str
    """A TunedName."""
    job_id: str
    path: str
    """Absolute folder with PEFT's two files and their manifest, as the worker sees it."""
    shared_experts: bool = False
    """`shared_experts` in the JobSpec that trained it."""


class JobSpec(Resolved):
    """`spec.json`: everything that a worker needs, resolved and immutable."""

    version: Literal[1, 2] = 1
    """2: it has a `loss`, which version 0.2 would not see and therefore refuses by this number."""
    job_id: str
    model: BaseModelRef
    training_data: DataFileRef | None
    """None: the job's client runs the training loop and sends the data (ft_service/tinker)."""
    validation_data: DataFileRef | None
    validation_split: float | None = None
    """Share of the training samples that is set aside for validation
    (ft_service/data/tokens/training_set/split.py).
    """
    seed: int
    tuned_name: str
    """The outcome's TunedName."""
    lora: LoraOptions
    precision: PrecisionOptions
    training: TrainingOptions
    distributed: DistributedOptions
    """Options with a number as nproc_per_node."""
    checkpoint: CheckpointOptions
    data: DataOptions = DataOptions()
    chat_template: str = ""
    """Text of the chat template, with the variables that are set in it; empty: the base's."""
    chat_template_kwargs: dict[str, bool | int | float | str] = {}
    """These variables, for people."""
    date: str = ""
    """Date (ISO 8601) for chat templates that write today's date, so that a resume makes the same
    tokens; empty: today.
    """
    evaluation: EvaluationOptions | None = None
    shared_experts: bool = False
    """Whether "all-linear" includes shared experts and dense feed-forwards of a mixture of experts.

    False with lora_dropout, which PEFT does not have for them.
    """
    loss: Annotated[LossOptions, Field(discriminator="type")] | None = None
    """Options of a method whose loss is another one than cross entropy; None: the job has another
    method.
    """
    reinforcement: ReinforcementOptions | None = None
    """How answers are sampled, of jobs whose data files hold prompts; what for says `sampled_for`.
    None: the answers are in the files.
    """
    parent: AdapterRef | None = None
    """The tuned model whose adapter training starts from; None: a new one.

    Optimizer, schedule and data are the job's own.
    """
    tensorboard: bool = False
    """Whether event files for TensorBoard are written."""
    chosen: dict[str, str] = {}
    """Options that were "auto" and were chosen, mostly by ft_service/plan/auto_options.py: dotted
    name → reason.
    """
    engine: Literal["auto", "off"] = "auto"
    """Whether the job may be trained in an engine, beside other jobs on the same base
    (rundir/engine.py).
    """
    rungs: tuple[float, ...] = ()
    """Shares of the steps, ascending, below 1, after which a sweep's job is also validated, so that
    the sweep can compare it (ft_service/sweeps/halving.py).
    """

    @model_validator(mode="before")
    @classmethod
    def _loss_of_earlier_versions(cls, document: Any) -> Any:
        """Version 0.2 wrote options of direct preference optimisation as `dpo`, its only loss."""
        if not isinstance(document, Mapping) or document.get("dpo") is None:
            return document
        return {**document, "loss": {"type": "dpo", **document["dpo"]}}

    @field_serializer("loss", mode="wrap")
    def _named_loss(self, loss: LossOptions | None, write: Any) -> Any:
        """With its type, also where only what is given is written."""
        return None if loss is None else {"type": loss.type, **write(loss)}

    @property
    def preferences(self) -> PairOptions | None:
        """Options of the loss on pairs of answers; None: its data are no pairs."""
        return self.loss if isinstance(self.loss, PairOptions) else None

    @property
    def context(self) -> str:
        """What a teacher reads before each sample, and the student does not; empty: nothing."""
        return self.loss.with_context if isinstance(self.loss, DistillationOptions) else ""

    @property
    def in_pairs(self) -> bool:
        """Whether samples 2i and 2i + 1 of its token sets belong together: the answers of a pair,
        or a sample as the student reads it and as its teacher does.
        """
        return self.preferences is not None or bool(self.context)

    @property
    def has_reference(self) -> bool:
        """Whether its loss compares with the model that training starts from."""
        return isinstance(self.loss, DpoOptions | KtoOptions)

    @property
    def method(self) -> MethodType:
        """Type of its method."""
        if self.training_data is None:
            return "tinker"
        if self.loss is not None:
            return self.loss.type
        return "supervised" if self.reinforcement is None else "reinforcement"

    @property
    def sampled_for(self) -> Literal["rewards", "teacher"] | None:
        """What comes of its sampled answers: they get rewards, in reinforcement learning, or a
        teacher says how likely their words are, in distillation. None: none are sampled.
        """
        if self.reinforcement is None:
            return None
        return "rewards" if self.loss is None else "teacher"

    @property
    def teacher(self) -> TeacherRef | None:
        """The teacher that its ranks hold beside the base, or that servers are asked about; None:
        the base without adapter, or none.
        """
        return self.loss.teacher if isinstance(self.loss, DistillationOptions) else None

    @property
    def served_teacher(self) -> TeacherRef | None:
        """The teacher that servers are asked about; None: there is none, or ranks compute it."""
        teacher = self.teacher
        return teacher if teacher is not None and teacher.kind == "server" else None

    @property
    def adapters_read(self) -> tuple[AdapterRef, ...]:
        """Adapters of other jobs that its ranks read: the parent's, and the teacher's."""
        found = [] if self.parent is None else [self.parent]
        if (teacher := self.teacher) is not None and teacher.job_id is not None:
            found.append(AdapterRef(name=teacher.name, job_id=teacher.job_id, path=teacher.path))
        return tuple(found)

    @property
    def bases_read(self) -> tuple[str, ...]:
        """Folders of the bases that its ranks read: its own, and a teacher's."""
        teacher = self.teacher
        other = () if teacher is None or teacher.kind != "base" else (teacher.path,)
        return (self.model.path, *other)

    @property
    def by_commands(self) -> bool:
        """Whether the ranks carry out commands (ft_service/tinker/commands.py): a client's, or
        those that follow from sampled answers.
        """
        return self.training_data is None or self.reinforcement is not None

    @property
    def wants_fused_kernels(self) -> bool:
        """Whether fused kernels compute what they can of its layers, on GPUs that have them: they
        are for bf16, and compiled layers do without.
        """
        wanted = self.precision.fused_kernels == "auto" and self.precision.compute == "bf16"
        return wanted and self.distributed.compile is not True

    @property
    def longest_sample(self) -> int:
        """Tokens of a data file's sample that are used: training.max_length, of prompts without the
        room for an answer.
        """
        return max(
            1, self.training.max_length - (0 if self.reinforcement is None else self.longest_answer)
        )

    @property
    def longest_answer(self) -> int:
        """Tokens of an answer of reinforcement learning at most."""
        given = None if self.reinforcement is None else self.reinforcement.max_completion_length
        return min(MOST_ANSWERED, max(1, self.training.max_length // 2)) if given is None else given

    @property
    def environment(self) -> Environment | None:
        """Where a model of reinforcement learning acts; None: it answers each prompt once."""
        return None if self.reinforcement is None else self.reinforcement.environment

    @property
    def longest_rollout(self) -> int:
        """Tokens that the model answers a prompt with at most: one answer, or all of a rollout."""
        environment = self.environment
        if environment is None:
            return self.longest_answer
        return min(environment.max_tokens, environment.max_turns * self.longest_answer)

    @property
    def samples_of_item(self) -> int:
        """Samples to train on for each unit of training.batch_size: both answers of a pair, all
        answers to a prompt.
        """
        if self.reinforcement is not None:
            return self.reinforcement.num_generations
        return 1 if self.preferences is None else 2

    @property
    def data_files(self) -> tuple[DataFileRef, ...]:
        """Its data files: none, that for training, or that and the one for validation."""
        return tuple(
            data for data in (self.training_data, self.validation_data) if data is not None
        )

    @property
    def validates(self) -> bool:
        """Whether there are samples for validation."""
        return self.validation_data is not None or self.validation_split is not None

    def shapes(self, most_nodes: int, most_per_node: int, gpus: int) -> list[tuple[int, int]]:
        """(hosts, ranks per host) on which it may train, the most ranks first; the last is nnodes
        and nproc_per_node. Ranks per host are raised before hosts. `most_nodes`, `most_per_node`:
        limits of the machines; `gpus`: as for `check_distributed`.
        """
        options = self.distributed
        fewest = self.world_size // self.distributed.nnodes
        per_host = range(fewest, min(options.max_nproc_per_node or fewest, most_per_node) + 1)
        most = max(per_host, default=fewest)
        nodes = range(options.nnodes + 1, min(options.max_nnodes or options.nnodes, most_nodes) + 1)
        found = [(options.nnodes, fewest)]
        for shape in (
            *((options.nnodes, ranks) for ranks in per_host),
            *((number, most) for number in nodes),
        ):
            if shape[1] % options.ranks_per_sample:
                continue
            try:
                check_distributed(options, shape[0] * shape[1], gpus)
            except SpecError:  # replicate or reshard_after_forward does not divide it
                continue
            found.append(shape)
        return sorted(dict.fromkeys(found), key=lambda shape: shape[0] * shape[1], reverse=True)

    def on(self, nodes: int, ranks_per_host: int) -> JobSpec:
        """The spec for a number of hosts and of ranks per host."""
        fixed = {
            "nnodes": nodes,
            "nproc_per_node": ranks_per_host,
            "max_nnodes": None,
            "max_nproc_per_node": None,
        }
        return self.model_copy(update={"distributed": self.distributed.model_copy(update=fixed)})

    @property
    def world_size(self) -> int:
        """Ranks of an attempt."""
        assert isinstance(self.distributed.nproc_per_node, int), (
            "a resolved spec names a number of ranks"
        )
        return self.distributed.nnodes * self.distributed.nproc_per_node

    def rung_steps(self, total_steps: int) -> tuple[int, ...]:
        """Steps, counted from 1, at which it reaches its rungs."""
        return tuple(max(1, math.ceil(share * total_steps)) for share in self.rungs)


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """The facts that a request is resolved with."""

    job_id: str
    organization: str
    model: BaseModelRef
    training_data: DataFileRef | None
    validation_data: DataFileRef | None
    seed: int
    """Seed of a job whose request has none."""
    gpus: int
    """GPUs of the host that will train, for `nproc_per_node: auto`."""
    parent: AdapterRef | None = None
    teacher: TeacherRef | None = None
    """What method.distillation.teacher names, unless that is the base."""
    date: str = ""
    """`JobSpec.date`."""
    samples: int | None = None
    """Samples of the training file, of more than COUNTED about how many, for batch_size and
    n_epochs "auto"; None: not known, and these get usual values.
    """


def resolve(request: JobRequest, context: JobContext) -> JobSpec:
    """Fill in every default. Options that depend on the base and the machine stay "auto", for
    `ft_service.plan.auto_options`.

    Raises SpecError for options that do not fit the number of ranks.
    """
    check_served(request.serve, request.lora, request.precision)
    _check_pixels(request)
    _check_teacher(request.method, context)
    if request.precision.served_from_step and request.precision.served_as is None:
        raise SpecError(
            f"precision.served_from_step = {request.precision.served_from_step} without "
            "precision.served_as: nothing is rounded that could begin late. Give both or neither.",
            param="precision.served_from_step",
        )
    distributed = _resolve_distributed(request.distributed, context.gpus)
    _check_method_shares(distributed, request.method.type)
    name = TunedName.of_job(
        context.job_id,
        base=context.model.name,
        organization=context.organization,
        suffix=request.suffix,
    )
    ranks = distributed.nnodes * int(distributed.nproc_per_node)
    samples = context.samples
    parent = context.parent
    if samples is not None and request.validation_split is not None:
        samples = round(samples * (1 - request.validation_split))
    counted = None if samples is None else min(samples, COUNTED)
    training, chosen = by_samples(request.resolved_training(), counted, ranks, request.method.type)
    loss = request.method.loss_options()
    if isinstance(loss, DistillationOptions):
        loss = loss.model_copy(update={"teacher": context.teacher})
    return JobSpec(
        version=1 if loss is None else 2,
        job_id=context.job_id,
        model=context.model,
        training_data=context.training_data,
        validation_data=context.validation_data,
        validation_split=request.validation_split,
        seed=request.seed if request.seed is not None else context.seed,
        tuned_name=str(name),
        lora=request.lora,
        precision=request.precision,
        training=training,
        distributed=distributed,
        checkpoint=request.checkpoint,
        data=request.data,
        chat_template=named_template(request.chat_template or ""),
        chat_template_kwargs=request.chat_template_kwargs or {},
        date=context.date,
        shared_experts=not (request.lora.lora_dropout or request.lora.use_dora)
        if parent is None
        else parent.shared_experts,
        evaluation=request.evaluation,
        loss=loss,
        reinforcement=request.method.reinforcement_options(),
        parent=parent,
        chosen=chosen,
        tensorboard=request.integrated("tensorboard"),
        engine=request.engine,
    )


def _check_pixels(request: JobRequest) -> None:
    """Raise SpecError for bounds of pictures that nobody would keep."""
    given = request.data.bounds
    if not given:
        return
    name, value = next(iter(given.items()))
    method = request.method.type
    why = None
    if method in ("reinforcement", "tinker"):
        why = f"data of method.type = {shown_value(method)} show no images. Leave it out."
    elif request.serve is not None:
        why = (
            f"{request.serve} shows pictures to all adapters by the base's own bounds. Leave it out, or "
            f"{_MERGE}, which keeps them."
        )
    if why is not None:
        raise SpecError(f"data.{name} = {value:,}: {why}", param=f"data.{name}")


def _check_teacher(method: Method, context: JobContext) -> None:
    """Raise SpecError for a teacher that was not found, or from which nothing is learned."""
    if method.type != "distillation":
        return
    given = method.distillation
    base = context.model.name
    if given.teacher_at == "server" and given.teacher == base:
        raise refused_teacher(
            base,
            "it is the job's base, which the ranks hold: leave method.distillation.teacher_at out, "
            "or name another base that the server answers for",
        )
    if given.teacher not in (None, base):
        if context.teacher is None:
            raise refused_teacher(given.teacher, "teachers are models of a server or of FT_HOME")
        return
    if given.with_context is None and context.parent is None:
        raise SpecError(
            f"method.distillation.teacher = {shown_value(given.teacher)}: student and teacher begin "
            "as the same model that reads the same, so there is nothing to learn. Give "
            "method.distillation.with_context, or a tuned model or another base as teacher.",
            param="method.distillation.with_context",
        )


def named_teacher(request: JobRequest, base: str) -> str | None:
    """The teacher that a request names, unless it is the job's base, of this name."""
    method = request.method
    given = method.distillation.teacher if method.type == "distillation" else None
    return None if given == base else given


def teaching_adapter(
    trained: JobSpec, adapter: AdapterRef, own: LoraOptions, base: str
) -> TeacherRef:
    """A tuned model as teacher. `trained`: its spec; `own`: the job's options; `base`: the name of
    the job's base.

    Raises SpecError for one that ranks cannot hold beside the student's adapter.
    """
    if trained.model.name != base:
        raise refused_teacher(
            adapter.name,
            f"it is on the base {trained.model.name}, and the job's is {base}, on which its "
            "adapter does not lie",
        )
    if (fault := adapter_fault(trained.lora, trained.precision, own)) is not None:
        raise refused_teacher(adapter.name, fault)
    return TeacherRef(
        kind="adapter",
        name=adapter.name,
        path=adapter.path,
        job_id=adapter.job_id,
        lora=trained.lora,
    )


def teaching_base(
    found: BaseModelRef, own: BaseModelRef, kind: Literal["base", "server"] = "base"
) -> TeacherRef:
    """Another base as teacher. Raises SpecError if it is the job's, under another name."""
    if found.path == own.path:
        raise refused_teacher(
            found.name, f"it is the job's base; name it as the job does: {own.name}"
        )
    return TeacherRef(kind=kind, name=found.name, path=found.path)


def by_samples(
    training: TrainingOptions, samples: int | None, ranks: int, method: MethodType
) -> tuple[TrainingOptions, dict[str, str]]:
    """The options with batch_size and n_epochs as numbers, and dotted name → reason for those that
    were "auto".
    """
    found: dict[str, tuple[int, str]] = {}
    usual = TrainingOptions()
    unknown = "the usual one; the number of samples is not known"
    if training.n_epochs == AUTO:
        known = samples is not None or method in (*PREFERENCE_METHODS, "reinforcement")
        found["n_epochs"] = epochs_for(samples or 0, method) if known else (usual.epochs, unknown)
    if training.batch_size == AUTO:
        found["batch_size"] = (
            batch_for(samples, ranks) if samples is not None else (usual.batch, unknown)
        )
    values = {name: value for name, (value, _) in found.items()}
    return training.model_copy(update=values), {
        f"training.{name}": why for name, (_, why) in found.items()
    }


def inherit(request: JobRequest, parent: JobSpec, name: str) -> JobRequest:
    """A request that continues the adapter `name`, which `parent` trained.

    It keeps the adapter's shape, and the options of precision, the chat template and the bounds of
    images' pixels that it does not set. Raises SpecError naming an option of lora that changes the
    shape.
    """
    for field in sorted(request.lora.model_fields_set - {"lora_dropout"}):
        wanted = getattr(request.lora, field)
        there = getattr(parent.lora, field)
        if wanted != there:
            raise SpecError(
                f"lora.{field} = {shown_value(wanted)}: {name} has {shown_value(there)}, and a "
                "job that continues from an "
                "adapter keeps its shape. Leave it out, or name a base model to start from.",
                param=f"lora.{field}",
            )
    given = request.lora.model_fields_set & {"lora_dropout"}
    lora = parent.lora.model_copy(update={field: getattr(request.lora, field) for field in given})
    precision = _inherited_precision(request.precision, parent.precision)
    _refuse_inherited_form(precision, lora, request.method.type, name)
    chat_template = (
        request.chat_template if request.chat_template is not None else parent.chat_template or None
    )
    variables = request.chat_template_kwargs or {}
    if request.chat_template is None:
        variables = {**parent.chat_template_kwargs, **variables}
    changed = {"chat_template": chat_template, "chat_template_kwargs": variables or None}
    if not request.data.bounds:
        changed["data"] = request.data.model_copy(update=parent.data.bounds)
    return request.model_copy(update={"lora": lora, "precision": precision, **changed})


def _refuse_inherited_form(
    precision: PrecisionOptions, lora: LoraOptions, method: MethodType, name: str
) -> None:
    """Raise SpecError for a precision.served_as, given or of the parent `name`, that does not fit
    the rest.
    """
    fault = served_fault(precision, lora)
    if fault is None and precision.served_as is not None and method in ("reinforcement", "tinker"):
        fault = (
            f"precision.served_as = {precision.served_as!r} of {name} with method.type = "
            f"'{method}': the sampler puts the adapter on the base without rounding the sum. "
            "Continue it with another method"
        )
    if fault is not None:
        raise SpecError(f"{fault}.", param="precision.served_as")


def _inherited_precision(given: PrecisionOptions, parent: PrecisionOptions) -> PrecisionOptions:
    """The parent's options with those that are given.

    Formats belong together: a new default also replaces the overrides.
    """
    named = given.model_fields_set
    if given.default == AUTO:
        named = named - {"default"}
    if "default" in named:
        named = named | {"overrides"}
    # What was trained rounded goes on so from its first step, unless it is asked for.
    given_values = {name: getattr(given, name) for name in named}
    return parent.model_copy(update={"served_from_step": 0.0, **given_values})


def _resolve_distributed(options: DistributedOptions, gpus: int) -> DistributedOptions:
    ranks = max(1, gpus) if options.nproc_per_node == AUTO else options.nproc_per_node
    resolved = options.model_copy(update={"nproc_per_node": ranks})
    check_distributed(resolved, options.nnodes * ranks, gpus)
    if ranks % options.ranks_per_sample:
        raise SpecError(
            f"distributed.context_parallel = {options.ranks_per_sample}: it must divide the ranks "
            f"of a host, and distributed.nproc_per_node is {ranks}. Set that to a multiple of "
            f"{options.ranks_per_sample}, or context_parallel to a divisor of {ranks} or auto.",
            param="distributed.context_parallel",
        )
    return resolved


def not_shared_by_method(method: MethodType) -> str | None:
    """Why ranks cannot share the samples of a job with this method, as the end of a sentence; None:
    they can.
    """
    if method == "reinforcement":
        return "in reinforcement learning every rank takes whole answers"
    if method == "distillation":
        return "a teacher reads whole samples"
    if method == "tinker":
        return "every rank takes whole samples from the client of method.type = 'tinker'"
    return None


def _check_method_shares(options: DistributedOptions, method: MethodType) -> None:
    why = not_shared_by_method(method)
    if options.ranks_per_sample > 1 and why is not None:
        raise SpecError(
            f"distributed.context_parallel = {options.ranks_per_sample}: {why}. Leave it out; if "
            "samples do not fit, lower training.max_length.",
            param="distributed.context_parallel",
        )


def check_distributed(options: DistributedOptions, ranks: int, gpus: int) -> None:
    """Raise SpecError for options that do not fit the ranks or the host."""
    _, shards = mesh_shape(
        options.nnodes if options.replicate == AUTO else options.replicate, ranks
    )
    if options.reshard_size is not None:
        check_reshard_size(options.reshard_size, shards)
    if options.offload and gpus == 0:
        raise SpecError(
            "distributed.offload = True: this host has no GPU, and what is in its memory already "
            "cannot be moved there. "
            "Leave it out.",
            param="distributed.offload",
        )
    if options.activation_checkpointing == "offload" and gpus == 0:
        raise SpecError(
            "distributed.activation_checkpointing = 'offload': this host has no GPU, and layers' "
            "inputs in its memory already cannot be moved there. Use 'tiled', or 'auto'.",
            param="distributed.activation_checkpointing",
        )
    if options.offload and shards == 1:
        raise SpecError(
            "distributed.offload = True: with one rank to a copy nothing is sharded, and only "
            "shards are moved. Leave it out, "
            "or use more ranks (distributed.nproc_per_node) or fewer copies "
            "(distributed.replicate).",
            param="distributed.offload",
        )


_RANK_STEPS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for --max-lora-rank."""
_MERGE = "leave serve out and merge the tuned model (ft merge)"


def check_served(serve: str | None, lora: LoraOptions, precision: PrecisionOptions) -> None:
    """Raise SpecError naming the option that the inference server would refuse or silently
    ignore.
    """
    if serve is None:
        return
    if lora.target_parameters:
        raise _refused(
            "target_parameters",
            lora.target_parameters,
            "it computes adapters on stacks of experts on GPUs only, where none was tried (ft "
            "export --format vllm writes "
            "them). Leave them out, or",
        )
    for name in ("use_dora", "modules_to_save"):
        if given := getattr(lora, name, None):
            raise _refused(name, given, "it loads only A and B of LoRA. Leave it out, or")
    if precision.served_as is not None:
        raise SpecError(
            f"precision.served_as = {shown_value(precision.served_as)} with serve = 'vllm': it "
            "puts adapters on the base without rounding the sum, which such a job is trained on. "
            f"Leave one of the two out, or {_MERGE}.",
            param="precision.served_as",
            code="not_served",
        )


def _refused(name: str, given: object, why: str) -> SpecError:
    return SpecError(
        f"lora.{name} = {shown_value(given)} with serve = 'vllm': {why} {_MERGE}.",
        param=f"lora.{name}",
        code="not_served",
    )


def vllm_rank(*ranks: int) -> int:
    """The least --max-lora-rank of vLLM with which it takes an adapter of these ranks, at most 512
    each.
    """
    return next(step for step in _RANK_STEPS if step >= max(ranks))


def note_served(lora: LoraOptions) -> str:
    """A sentence for the operator of the inference server."""
    rank = max([lora.r, *lora.rank_pattern.values()])
    step = vllm_rank(rank)
    text = f"vLLM serves it with --enable-lora --max-lora-rank {step} or more."
    if lora.rank_pattern or lora.alpha_pattern:
        text += (
            " Older than 0.32 it may read no patterns: it gets the adapter padded to rank "
            f"{rank}, each scale folded in."
        )
    return text
