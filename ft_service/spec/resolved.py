"""`JobSpec`: a request with every default filled in and every reference turned into a path and a digest."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from ft_service.errors import SpecError
from ft_service.spec.evaluation import EvaluationOptions
from ft_service.spec.mesh import check_reshard_size, mesh_shape
from ft_service.spec.methods import AUTO, DpoOptions
from ft_service.spec.options import CheckpointOptions, DistributedOptions, LoraOptions, PrecisionOptions, TrainingOptions
from ft_service.spec.request import JobRequest
from ft_service.spec.templates import named_template
from ft_service.spec.tuned_name import TunedName


class Resolved(BaseModel):
    """Base class of documents that the service itself writes: none has unknown keys, and unknown ones are ignored when read
    back.
    """

    model_config = ConfigDict(frozen=True)


class BaseModelRef(Resolved):
    """The base of a job."""

    name: str
    """As listed by `GET /v1/models`."""
    path: str
    """Absolute folder in Hugging Face layout, as the worker sees it."""


class DataFileRef(Resolved):
    """A data file of a job."""

    name: str
    """As the user called it; used in messages."""
    path: str
    """Absolute path, as the worker sees it."""
    sha256: str
    """Digest of the bytes at submission: the worker refuses anything else. Of several files, of the digests of each."""
    files: tuple[str, ...] = ()
    """Where `path` is a folder: its data files in their order, named from it. Empty: `path` is a file."""


class AdapterRef(Resolved):
    """A tuned model that a job goes on from."""

    name: str
    """A TunedName."""
    job_id: str
    path: str
    """Absolute folder with PEFT's two files and their manifest, as the worker sees it."""


class JobSpec(Resolved):
    """`spec.json`: everything a worker needs to know, resolved and immutable."""

    version: Literal[1] = 1
    job_id: str
    model: BaseModelRef
    training_data: DataFileRef
    validation_data: DataFileRef | None
    seed: int
    tuned_name: str
    """The outcome's TunedName."""
    lora: LoraOptions
    precision: PrecisionOptions
    training: TrainingOptions
    distributed: DistributedOptions
    """nproc_per_node is a number here."""
    checkpoint: CheckpointOptions
    chat_template: str = ""
    """The text of the chat template to use in place of the base's; empty: the base's."""
    date: str = ""
    """Year, month and day (ISO 8601) for chat templates that write today's date, so that a resume makes the same tokens; empty:
    a job of an earlier version, whose templates write the date of the day."""
    evaluation: EvaluationOptions | None = None
    dpo: DpoOptions | None = None
    """Of direct preference optimisation, whose data files hold pairs of answers; None: training is supervised."""
    parent: AdapterRef | None = None
    """The tuned model whose adapter training starts from; None: a new one. Optimizer, schedule and data are the job's own."""
    chosen: dict[str, str] = {}
    """Options that were "auto" and were chosen for the machine (ft_service/plan/choose.py): dotted name → why."""

    def shapes(self, most_nodes: int, most_per_node: int, gpus: int) -> list[tuple[int, int]]:
        """(hosts, ranks of each) on which it may train, the most ranks first, as far as the machines go; the last is that of
        nnodes and nproc_per_node. Ranks of a host become more before hosts do. `gpus`: as for `check_distributed`."""
        options, fewest = self.distributed, self.world_size // self.distributed.nnodes
        each = range(fewest, min(options.max_nproc_per_node or fewest, most_per_node) + 1)
        top = max(each, default=fewest)
        nodes = range(options.nnodes + 1, min(options.max_nnodes or options.nnodes, most_nodes) + 1)
        found = [(options.nnodes, fewest)]
        for shape in (*((options.nnodes, ranks) for ranks in each), *((number, top) for number in nodes)):
            try:
                check_distributed(options, shape[0] * shape[1], gpus)
            except SpecError:  # replicate or reshard_after_forward does not divide it
                continue
            found.append(shape)
        return sorted(dict.fromkeys(found), key=lambda shape: shape[0] * shape[1], reverse=True)

    def on(self, nodes: int, ranks_of_each: int) -> JobSpec:
        """The spec for one number of hosts and ranks."""
        fixed = {"nnodes": nodes, "nproc_per_node": ranks_of_each, "max_nnodes": None, "max_nproc_per_node": None}
        return self.model_copy(update={"distributed": self.distributed.model_copy(update=fixed)})

    @property
    def world_size(self) -> int:
        """Ranks of one attempt."""
        assert isinstance(self.distributed.nproc_per_node, int), "a resolved spec names a number of ranks"
        return self.distributed.nnodes * self.distributed.nproc_per_node


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
    parent: AdapterRef | None = None,
    date: str = "",
) -> JobSpec:
    """Fill in every default. `gpus`: GPUs of the host that will train, for `nproc_per_node: auto`. What depends on the base and
    the machine's memory stays "auto", for `ft_service.plan.choose`. `date`: JobSpec's.

    Raises SpecError for options that do not fit the number of ranks.
    """
    distributed = _resolve_distributed(request.distributed, gpus)
    name = TunedName.of_job(job_id, base=model.name, organization=organization, suffix=request.suffix)
    return JobSpec(
        job_id=job_id,
        model=model,
        training_data=training_data,
        validation_data=validation_data,
        seed=request.seed if request.seed is not None else seed,
        tuned_name=str(name),
        lora=request.lora,
        precision=request.precision,
        training=request.resolved_training(),
        distributed=distributed,
        checkpoint=request.checkpoint,
        chat_template=named_template(request.chat_template or ""),
        date=date,
        evaluation=request.evaluation,
        dpo=request.method.dpo_options(),
        parent=parent,
    )


def inherit(request: JobRequest, parent: JobSpec, name: str) -> JobRequest:
    """A request that goes on from the adapter `name`, which `parent` trained: the adapter's shape is kept, and so is the base's
    precision and its chat template unless the request says another.

    Raises SpecError naming an option of lora that asks for another shape.
    """
    for field in sorted(request.lora.model_fields_set - {"lora_dropout"}):
        wanted, there = getattr(request.lora, field), getattr(parent.lora, field)
        if wanted != there:
            raise SpecError(
                f"lora.{field} = {wanted!r}: {name} has {there!r}, and a job that goes on from an adapter keeps its shape. "
                "Leave it out, or name a base model to begin anew.",
                param=f"lora.{field}",
            )
    given = request.lora.model_fields_set & {"lora_dropout"}
    lora = parent.lora.model_copy(update={field: getattr(request.lora, field) for field in given})
    precision = request.precision if "precision" in request.model_fields_set else parent.precision
    chat_template = request.chat_template if request.chat_template is not None else parent.chat_template or None
    if precision.default == AUTO:
        precision = precision.model_copy(update={"default": parent.precision.default})
    return request.model_copy(update={"lora": lora, "precision": precision, "chat_template": chat_template})


def _resolve_distributed(options: DistributedOptions, gpus: int) -> DistributedOptions:
    ranks = max(1, gpus) if options.nproc_per_node == AUTO else options.nproc_per_node
    resolved = options.model_copy(update={"nproc_per_node": ranks})
    check_distributed(resolved, options.nnodes * ranks, gpus)
    return resolved


def check_distributed(options: DistributedOptions, ranks: int, gpus: int) -> None:
    """Raises SpecError for options that do not fit the ranks, or the host."""
    _, shards = mesh_shape(options.nnodes if options.replicate == AUTO else options.replicate, ranks)
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
