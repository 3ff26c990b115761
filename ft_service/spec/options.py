"""The options that our create body adds to OpenAI's: adapter, precision, training, distribution, checkpoints.

Field docstrings say unit, default, sentinel, and when a field is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ft_service.spec.evaluation import EvaluationOptions
from ft_service.spec.templates import check_template
from ft_service.spec.values import Number, Pattern, Strict, TrainOn, WeightFormat

LEARNING_RATE = 2e-4
"""The learning rate that `learning_rate_multiplier: 1` stands for; the usual one for LoRA with AdamW."""
DPO_LEARNING_RATE = 5e-6
"""The same for direct preference optimisation: a fortieth, as usual with LoRA, since the loss is one of differences."""
DPO_EPOCHS = 1
"""training.n_epochs of direct preference optimisation unless it is given: further passes learn the pairs by heart."""


ColumnName = Annotated[str, Field(min_length=1, max_length=200)]
"""Name of a column or a key of a data file."""

NEVER = 10**12
"""Optimizer steps, of which no job has so many: the most that may be between two of what comes again and again."""

_RANGE = re.compile(r"([0-9]{1,6}):([0-9]{1,6})")


class LoraOptions(Strict):
    """The adapter, in the names of PEFT's LoraConfig."""

    r: Annotated[int, Field(ge=1, le=512)] = 16
    """Rank of the two adapter matrices A [r, in] and B [out, r]."""
    lora_alpha: Annotated[Number, Field(gt=0, le=4096)] = 32.0
    """Numerator of the scaling: alpha / r, or alpha / sqrt(r) with use_rslora."""
    lora_dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that training sets to 0 (the others are scaled up); which ones follows from seed, step and
    sample, so that it is the same on any number of ranks."""
    target_modules: Literal["all-linear"] | Pattern | list[str] = "all-linear"
    """Modules that get an adapter: every linear layer but the output head, or names (suffixes), or one RE2 pattern.

    In a mixture of experts "all-linear" means shared experts and dense feed-forwards too, but not with lora_dropout, which PEFT
    has not for them; routers never. By name they are called with what they lie in (shared_expert.down_proj, mlp.down_proj), and
    stacks of experts in target_parameters. Towers of a base of several models are never adapted."""
    target_parameters: list[str] = []
    """Stacks of experts that get an adapter beside target_modules, by their names or the ends of these, as in PEFT:
    `mlp.experts.gate_up_proj`, `mlp.experts.down_proj`. Each expert has its own two matrices of rank r. Not together with
    lora_dropout. Routers stay as they are, and their balance loss (router_aux_loss_coef) is no part of the loss. For servers
    that know no adapters on experts, merge."""
    rank_pattern: dict[Pattern, Annotated[int, Field(ge=1, le=512)]] = {}
    """RE2 pattern on the end of the module's full name, from a dot on → rank in place of r. The first one that matches wins.
    vLLM reads no patterns: it gets such an adapter padded to its largest rank (`ft export --format vllm`)."""
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
    """The formats in which the frozen weights are stored, sharded and gathered, and the dtype of the arithmetic."""

    default: WeightFormat | Literal["auto"] = "bf16"
    """Format of every linear layer and every stack of experts inside the decoder layers that no override names; the rest,
    routers included, stays bf16. "auto": the most exact of bf16, fp8 and nf4 that fits the machine; it is chosen once, when the
    job is created, since results depend on it. A base that comes in bitsandbytes NF4, or in FP8 by rows or tensors, keeps its
    format. One that comes in FP8 by blocks keeps its blocks, bit for bit, where this is fp8; any other format is made from
    exactly the values that its blocks stand for."""
    overrides: dict[Pattern, WeightFormat] = {}
    """RE2 pattern on the module's full name → format; the last pattern that matches wins. A pattern without a match is an
    error, and so is one that asks for another format than bf16 outside the decoder layers (embeddings, output head)."""
    compute: Annotated[Literal["bf16", "fp32"], BeforeValidator(_one_compute_type)] = "bf16"
    """Element type of activations and matrix products in all modules: FSDP2 has one for all that is gathered together.
    Adapters are fp32 masters either way."""
    fp8_products: Literal["auto", "off"] = "auto"
    """auto: layers stored in fp8 multiply in FP8 where the GPU can and compute is bf16, inputs and gradients rounded to FP8 row
    by row; off: they are always dequantised first, as those with scales of blocks are. The job's events say which it is."""
    compare_served: Literal["auto", "off"] = "auto"
    """auto: once training is over, the validation loss (of up to 64 samples) and the evaluation's answers are also measured
    with the base in bf16 and with the adapter merged into it, which is how adapters are often served; a loss that is higher by
    more than 0.02 nats is told of by a warning. Needs a validation file and, for a base that was quantised, memory for it in
    bf16 beside the model, else it says why it was not done. off: never."""

    @property
    def format(self) -> WeightFormat:
        """`default` where it was chosen."""
        assert self.default != "auto", "precision.default is chosen before anything is built or stored"
        return self.default


class TrainingOptions(Strict):
    """The optimisation, in the names of Transformers' TrainingArguments."""

    n_epochs: Annotated[int, Field(ge=1, le=50)] | Literal["auto"] = 3
    """Passes over the training file; ignored when max_steps is given. "auto": by the number of samples,
    chosen once, when the job is created; OpenAI's n_epochs "auto" is the same."""
    max_steps: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Optimizer steps; None: as many as n_epochs take."""
    batch_size: Annotated[int, Field(ge=1, le=8192)] | Literal["auto"] = 8
    """Samples per optimizer step over all ranks, whatever their number; the last batch of an epoch may be smaller. Of documents
    rows of max_length tokens, where they are packed. "auto": by the number of samples, as n_epochs."""
    per_device_train_batch_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Samples per forward on one rank, at most; None: as many as tokens_per_micro_batch takes. Memory, not mathematics: a step
    runs as many micro-batches as batch_size needs."""
    packing: bool = True
    """Put a micro-batch's samples one behind the other in one row, without padding; no token sees another sample. Results are
    those of padded samples. false, and architectures that cannot: samples of like length are padded to the longest."""
    tokens_per_micro_batch: Annotated[int, Field(ge=8, le=1_048_576)] | Literal["auto"] = "auto"
    """Tokens per forward on one rank, padding included; a longer sample raises it to its length. Memory and speed, not
    mathematics. "auto": enough to keep the machine busy, as far as memory goes: on a GPU up to 16,384, on a CPU about 2,048."""
    max_length: Annotated[int, Field(ge=8, le=1_048_576)] = 2048
    """Tokens kept of a sample; the rest is cut from the end, and counted in a warning. What is learned whole (documents, and
    all with train_on "everything") is split into windows of so many instead. Bounded by the model's own limit."""
    train_on: TrainOn = "all_assistant"
    """What is learned of a conversation: every answer of the assistant's that has not weight 0, only its last one, or
    everything, users' words and system prompts included. "everything" learns the prompts of bare text too; documents are
    always learned whole."""
    learning_rate: Annotated[Number, Field(gt=0, le=1)] | Literal["auto"] = LEARNING_RATE
    """AdamW's peak learning rate. "auto": by the base's width and family and the adapter's scaling,
    chosen once, when the job is created; OpenAI's learning_rate_multiplier "auto" is the same."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "warmup_stable_decay"] = "linear"
    """How the rate falls after the warm-up: to 0 at the last step, not at all, or only in the last decay_ratio of the steps."""
    warmup_ratio: Annotated[Number, Field(ge=0, le=1)] = 0.03
    """Share of all steps in which the rate rises from 0."""
    warmup_steps: Annotated[int, Field(ge=0, le=NEVER)] | None = None
    """The same as a number of steps, in place of warmup_ratio; None: that decides. More than the job's steps, and it only
    rises."""
    decay_ratio: Annotated[Number, Field(gt=0, le=1)] | None = None
    """Share of all steps, the last ones, in which warmup_stable_decay falls to 0, linearly; None: 0.1. Refused with others."""
    weight_decay: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """AdamW's decoupled weight decay on the adapters."""
    loraplus_lr_ratio: Annotated[Number, Field(gt=0, le=1000)] | None = None
    """LoRA+: the matrices B, which start as zeros, learn at learning_rate times this, and A at learning_rate; None: alike. Its
    paper uses 16 and more, with a lower learning_rate."""
    neftune_noise_alpha: Annotated[Number, Field(gt=0, le=1000)] | None = None
    """NEFTune: in training, noise on the embeddings, even between -a and a, where a is this / sqrt(tokens of the sample times
    width); its paper uses 5 to 15. It follows from seed, step and sample, whatever the ranks. None: none."""
    group_by_length: bool = False
    """Batches of samples of like length, so that less is padded; their order stays drawn from the seed. Only with packing
    false: packed rows have no padding."""
    max_grad_norm: Annotated[Number, Field(ge=0)] = 1.0
    """Gradients are scaled down to this global 2-norm; 0: never."""
    optim: Literal["adamw_torch"] = "adamw_torch"
    eval_steps: Annotated[int, Field(ge=1, le=NEVER)] | None = None
    """Optimizer steps between validations; None: at the end of every epoch. Ignored without a validation file."""
    early_stopping_patience: Annotated[int, Field(ge=1, le=NEVER)] | None = None
    """Validations in a row without progress after which training ends, as a success; None: never. Needs a validation file."""
    early_stopping_threshold: Annotated[Number, Field(ge=0)] = 0.0
    """Progress is a validation loss (nats) lower by more than this than the one that last was progress."""
    load_best_model_at_end: bool = False
    """The job's adapter is that of the step with the lowest validation loss, not the last step's. Implies checkpoint.keep_best.
    Needs a validation file."""

    @property
    def rate(self) -> float:
        """`learning_rate` where it was chosen."""
        assert self.learning_rate != "auto", "a learning rate is chosen before a job is stored"
        return self.learning_rate

    @property
    def batch(self) -> int:
        """`batch_size` where it was chosen."""
        assert self.batch_size != "auto", "a batch size is chosen before a job is planned"
        return self.batch_size

    @property
    def epochs(self) -> int:
        """`n_epochs` where it was chosen."""
        assert self.n_epochs != "auto", "a number of epochs is chosen before a job is planned"
        return self.n_epochs


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
    """Hosts (on Kubernetes: pods) that train together, with nproc_per_node ranks each. "MIN:MAX" is short for MIN with MAX as
    max_nnodes."""
    max_nnodes: Annotated[int, Field(ge=1, le=512)] | None = None
    """Each attempt may start on any number of hosts from nnodes to this: on as many as are free in its turn. Further hosts
    come with max_nproc_per_node ranks each. None: nnodes. With Kueue an attempt has the fewest."""
    nproc_per_node: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = "auto"
    """Ranks on each host. "auto": one per GPU of the host; 1 without a GPU. "MIN:MAX" is short for MIN with MAX as
    max_nproc_per_node."""
    max_nproc_per_node: Annotated[int, Field(ge=1, le=64)] | None = None
    """Each attempt may start on any number of ranks a host from nproc_per_node to this: on as many as are free in its turn. On
    other numbers of ranks results differ by rounding. None: nproc_per_node. With Kueue an attempt has the fewest; `ft run`
    takes as many as the host has."""
    replicate: Annotated[int, Field(ge=1, le=4096)] | Literal[-1, "auto"] = "auto"
    """Copies of the model (HSDP), each sharded over ranks / replicate ranks; gradients are averaged over all. Must divide the
    number of ranks. -1: one copy a rank, so nothing is sharded and nothing gathered; "auto": that where the base fits whole on
    every rank and it is faster, else one copy a host, so that weights are gathered within hosts only and what crosses the
    network is the adapters' gradients; one copy over all hosts where a host cannot hold it. A job that says how to shard
    (wrap, ignored, reshard_after_forward, keep_unsharded, prefetch or offload) is sharded."""
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
    activation_checkpointing: Literal["none", "full", "selective", "auto"] = "auto"
    """Compute activations again in backward: "full" keeps only the input of each decoder layer, "selective" also the results of
    matrix products and attention. "auto": the fastest that fits, which is "none" where memory suffices."""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile for each decoder layer. If that fails the job goes on uncompiled, with a warning that says why. "auto": on
    GPUs, for jobs long enough to win back the minute that compiling takes."""
    collective_timeout_seconds: Annotated[int, Field(ge=10, le=1800)] = 600
    """Seconds that a rank waits for the others before it gives up: the attempt ends then, and the next one goes on from the
    last checkpoint. Must exceed what the slowest rank takes longer than the fastest, to read the base or to compile. Ignored
    with one rank."""

    @model_validator(mode="before")
    @classmethod
    def _split_ranges(cls, given: Any) -> Any:
        """Take "MIN:MAX" for the two options that it stands for. What is wrong with either number, their own limits say."""
        if not isinstance(given, Mapping):
            return given
        split = dict(given)
        for name in ("nnodes", "nproc_per_node"):
            match = _RANGE.fullmatch(given[name]) if isinstance(given.get(name), str) else None
            if match and f"max_{name}" not in given:
                split |= {name: int(match[1]), f"max_{name}": int(match[2])}
        return split

    @property
    def checkpointing(self) -> Literal["none", "full", "selective"]:
        """`activation_checkpointing` where it was chosen."""
        assert self.activation_checkpointing != "auto", "activation_checkpointing is chosen before a model is built"
        return self.activation_checkpointing

    @property
    def asks_to_shard(self) -> bool:
        """Whether anything that only sharding has use for is not left as it is."""
        says_how = self.wrap != "layers" or self.reshard_after_forward is not True or self.keep_unsharded
        return says_how or self.offload or bool(self.ignored) or self.prefetch is not None

    @property
    def reshard_size(self) -> int | None:
        """reshard_after_forward where it is a number."""
        return None if isinstance(self.reshard_after_forward, bool) else self.reshard_after_forward


class CheckpointOptions(Strict):
    """When checkpoints are written, and which of them stay."""

    save_steps: Annotated[int, Field(ge=1, le=NEVER)] | None = None
    """Optimizer steps between checkpoints; None: at the end of every epoch. One is always written at the last step."""
    save_total_limit: Annotated[int, Field(ge=1, le=1000)] = 3
    """Complete checkpoints kept; older ones are removed once a newer one is complete, unless keep_every or keep_best keeps
    them."""
    keep_every: Annotated[int, Field(ge=1, le=NEVER)] | None = None
    """Optimizer steps: a checkpoint is written at every multiple, and stays. None: none stays for its step."""
    keep_best: bool = False
    """A checkpoint is written at every validation that is the best so far, and stays until there is a better one. Needs a
    validation file."""
    async_save: bool = True
    """Checkpoints are written while training goes on, which stops only for a copy in the host's memory (as large as adapters
    and optimizer state); one at a time. The last one, and that of a stop, are waited for."""


class DataOptions(Strict):
    """What the data files call the columns of their format (docs/data.md); of JSON lines the keys. None: by its own name."""

    messages: ColumnName | None = None
    """The conversation: a list of messages."""
    role: ColumnName | None = None
    """A message's own key for who speaks. The speakers of ShareGPT (human, gpt) are known too."""
    content: ColumnName | None = None
    """A message's own key for what is said."""
    tools: ColumnName | None = None
    """Definitions of the tools of a conversation."""
    system: ColumnName | None = None
    """The system message of ShareGPT's and Alpaca's records."""
    instruction: ColumnName | None = None
    """With `output`: what the user asks of a conversation of one turn."""
    input: ColumnName | None = None
    """What follows the instruction, or the beginning of OpenAI's preference pairs."""
    output: ColumnName | None = None
    """The answer to an instruction, which is learned."""
    prompt: ColumnName | None = None
    """With `completion`: bare text before what is learned, which no chat template touches; or messages."""
    completion: ColumnName | None = None
    """What is learned after the prompt."""
    text: ColumnName | None = None
    """A document, learned whole."""
    conversations: ColumnName | None = None
    """ShareGPT's turns, which have `from` and `value`."""
    chosen: ColumnName | None = None
    """Of preference pairs, the answer that is preferred."""
    rejected: ColumnName | None = None
    """Of preference pairs, the other answer."""

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(name of the format, name in the files) of each that is given."""
        given = self.model_dump(exclude_none=True)
        return tuple((ours, given[ours]) for ours in sorted(given))

    @model_validator(mode="after")
    def _each_column_once(self) -> DataOptions:
        for places in (("role", "content"), tuple(name for name in type(self).model_fields if name not in ("role", "content"))):
            named: dict[str, str] = {}
            for ours, theirs in self.pairs:
                if ours in places and theirs in named:
                    raise ValueError(f"data.{named[theirs]} and data.{ours} both name {theirs!r}: a column is one thing")
                if ours in places:
                    named[theirs] = ours
        return self


class JobOptions(Strict):
    """The options that our create body adds to OpenAI's: all of a SPEC file beside model and files."""

    lora: LoraOptions = LoraOptions()
    precision: PrecisionOptions = PrecisionOptions()
    training: TrainingOptions = TrainingOptions()
    distributed: DistributedOptions = DistributedOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    data: DataOptions = DataOptions()
    chat_template: Annotated[str, Field(min_length=1, max_length=100_000), AfterValidator(check_template)] | None = None
    """The chat template that writes the conversations, in place of the base's: its text (Jinja), or the name of a standard one
    (TEMPLATES); in a SPEC file also the path of a .jinja file. None: the base's own, and conversations are refused where it has
    none. Saved with the adapter."""
    evaluation: EvaluationOptions | None = None
    """Answers to a few prompts before and after training, in the job's events and at its `evaluation`; None: none."""
    serve: Literal["vllm"] | None = None
    """The inference server that the adapter is meant for: what it would refuse, or ignore without a word, is refused before
    training. None: nothing is asked of the adapter."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Higher starts first; among equal ones the project that has used less lately, and within it the one created first."""
    max_seconds: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Seconds that the job may hold its slots, over all its attempts and their start-up: then it stops at a checkpoint and has
    failed with reason `time_limit`; a job that names that checkpoint as its model goes on from there. None: no limit. With
    `ft run` of each call, which stops at a checkpoint."""

    @model_validator(mode="after")
    def _consistent_distributed(self) -> JobOptions:
        options, formats = self.distributed, {self.precision.default, *self.precision.overrides.values()} - {"bf16", "auto"}
        if options.reshard_size is not None and (options.keep_unsharded or options.wrap == "none"):
            other = "keep_unsharded" if options.keep_unsharded else "wrap 'none'"
            raise ValueError(f"distributed.reshard_after_forward as a number has no effect with {other}: keep one of the two")
        if options.reshard_size is not None and formats:
            raise ValueError(
                f"distributed.reshard_after_forward = {options.reshard_size}: FSDP2 reshards to a number of ranks only plain "
                f"weights, and precision stores some as {' and '.join(sorted(formats))}. Use true or false"
            )
        for name in ("nnodes", "nproc_per_node"):
            least, most = getattr(options, name), getattr(options, f"max_{name}")
            if most is not None and (least == "auto" or most < least):
                raise ValueError(
                    f"distributed.{name} = {least!r} with max_{name} = {most}: the first must be a number, at most the second. "
                    f'Write {name}: "MIN:MAX", or leave max_{name} out'
                )
        if options.prefetch is not None and options.wrap == "none":
            raise ValueError("distributed.prefetch: with wrap 'none' there is only one group; leave one of the two out")
        if options.compile is True and isinstance(options.wrap, WrapBySize):
            raise ValueError("distributed.compile works on whole decoder layers: leave it out, or use wrap 'layers'")
        if options.offload and options.ignored:
            raise ValueError("distributed.offload moves shards only, and distributed.ignored weights have none: keep one")
        return self

    @model_validator(mode="after")
    def _one_warmup(self) -> JobOptions:
        training = self.training
        if training.warmup_steps is not None and "warmup_ratio" in training.model_fields_set:
            raise ValueError("training.warmup_steps and training.warmup_ratio are both given: keep one")
        if training.decay_ratio is not None and training.lr_scheduler_type != "warmup_stable_decay":
            raise ValueError("training.decay_ratio is of lr_scheduler_type warmup_stable_decay only: leave one of the two out")
        if training.group_by_length and training.packing:
            raise ValueError(
                "training.group_by_length saves padding, and packed rows have none: give packing: false, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _something_to_train(self) -> JobOptions:
        if self.lora.target_modules == [] and not self.lora.target_parameters:
            raise ValueError("lora.target_modules = []: nothing would be trained. Name modules, or leave it out (all-linear)")
        return self

    @model_validator(mode="after")
    def _patience_with_its_threshold(self) -> JobOptions:
        if self.training.early_stopping_threshold and self.training.early_stopping_patience is None:
            raise ValueError(
                "training.early_stopping_threshold has no effect without training.early_stopping_patience: give both or neither"
            )
        return self
