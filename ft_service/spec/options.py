"""The options that our create body adds to OpenAI's: adapter, precision, training, distribution,
checkpoints.

Field docstrings give unit, default and sentinel, and say when a field is ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ft_service.spec.evaluation import EvaluationOptions
from ft_service.spec.option_types import (
    LEAST_EPSILON,
    AutoOrOff,
    FewPatterns,
    Names,
    NullableSections,
    Number,
    Pattern,
    Strict,
    TrainOn,
)
from ft_service.spec.template_variables import Variables
from ft_service.spec.templates import check_template
from ft_service.spec.weight_formats import AS_PUBLISHED, FormatChoice, ServedAs

LEARNING_RATE = 2e-4
"""Learning rate for `learning_rate_multiplier: 1`; the usual one for LoRA with AdamW."""
DPO_LEARNING_RATE = 5e-6
"""The same for direct preference optimisation: a fortieth, as usual with LoRA, since its loss
compares differences.
"""
ORPO_LEARNING_RATE = 5e-5
"""The same for ORPO, most of whose loss is that of supervised training: its paper's rate of all
weights is ten times that of DPO's.
"""
DPO_EPOCHS = 1
"""Default of training.n_epochs for losses on pairs: further passes memorise the pairs."""


REINFORCEMENT_LEARNING_RATE = 4e-5
"""The same for reinforcement learning: that of tinker-cookbook's recipe for mathematics."""
REINFORCEMENT_EPOCHS = 1
"""Default of training.n_epochs for reinforcement learning."""

ColumnName = Annotated[str, Field(min_length=1, max_length=200)]
"""Name of a column or a key of a data file."""

NEVER = 10**12
"""Optimizer steps: more than any job has. The upper limit of every interval."""

Checkpointing = Literal["none", "full", "selective", "tiled", "offload"]
"""Values of distributed.activation_checkpointing that a model is built with."""
FOR_LONG_SAMPLES: tuple[Checkpointing, ...] = ("tiled", "offload")
"""Those that compute feed-forwards by tiles of tokens, from the fastest to the smallest."""

_RANGE = re.compile(r"([0-9]{1,6}):([0-9]{1,6})")


class LoraOptions(Strict):
    """The adapter, in the names of PEFT's LoraConfig."""

    r: Annotated[int, Field(ge=1, le=512)] = 16
    """Rank of the two adapter matrices A [r, in] and B [out, r]."""
    lora_alpha: Annotated[Number, Field(gt=0, le=4096)] = 32.0
    """Numerator of the scaling: alpha / r, or alpha / sqrt(r) with use_rslora."""
    lora_dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that training sets to 0 (the others are scaled up).

    Seed, step and sample decide which, so that they are the same on any number of ranks.
    """
    target_modules: Literal["all-linear"] | Pattern | Names = "all-linear"
    """Modules that get an adapter: every linear layer except the output head, or names (suffixes),
    or one RE2 pattern.

    In a mixture of experts "all-linear" includes shared experts and dense feed-forwards, but not
    with lora_dropout, which PEFT does not have for them, and never routers. Such layers are named
    with their parent (shared_expert.down_proj, mlp.down_proj), and stacks of experts in
    target_parameters. "all-linear" means the text part alone. In jobs whose samples have images, a
    pattern that matches linear layers of the base's tower or connector adapts these too, as in
    PEFT, and so does a name that no layer of the text part ends in; the tower is then trained on
    every rank, with lora.r, and not with use_dora, lora_dropout, target_parameters, served_as, in
    an engine, or by commands. Serve such an adapter with vLLM's --enable-tower-connector-lora, or
    merge it."""
    target_parameters: Names = []
    """Stacks of experts that get an adapter in addition to target_modules, by their names or the
    ends of these, as in PEFT: `mlp.experts.gate_up_proj`, `mlp.experts.down_proj`. Each expert has
    its own two matrices of rank r. Not together with lora_dropout. Routers are not trained, and
    their balance loss (router_aux_loss_coef) is not part of the loss. `ft export --format vllm`
    writes them as vLLM reads them; for other servers merge the tuned model.
    """
    rank_pattern: Annotated[dict[Pattern, Annotated[int, Field(ge=1, le=512)]], FewPatterns] = {}
    """RE2 pattern on the end of the module's full name, from a dot on → rank in place of r.

    The first matching pattern wins. vLLM does not read patterns: `ft export --format vllm` pads
    such an adapter to its largest rank.
    """
    alpha_pattern: Annotated[
        dict[Pattern, Annotated[Number, Field(gt=0, le=4096)]], FewPatterns
    ] = {}
    """The same, in place of lora_alpha."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead of alpha / r."""
    use_dora: bool = False
    """Weight-decomposed adapters (DoRA): each output row of an adapted weight also learns its
    magnitude, as in PEFT. Steps take longer, since the norms of the rows change with the adapter.
    Not with lora_dropout or target_parameters, and not in an engine. Inference servers and GGUF do
    not take such an adapter, but `ft merge` does.
    """
    modules_to_save: Names = []
    """Modules that are trained whole beside the adapters, for tokens that the base has not learned:
    the base's embedding and its output head, by their names or the ends of these, as in PEFT:
    `[embed_tokens, lm_head]`. Tokens need rows that the embedding has already. Masters are fp32,
    start as the base's values, and are saved in the adapter as PEFT saves them. If the base ties
    the two, they are one weight, named by either. A parameter takes 16 bytes, shared by the ranks,
    and such a job runs in no engine. Inference servers, the preview and GGUF adapters do not take
    such modules; `ft merge` does.
    """
    init_lora_weights: Literal[True] = True
    """A from Kaiming uniform, B zero: the tuned model starts as the base.

    Not PiSSA, LoftQ or OLoRA: they put what is left of each weight into the base, which here stays
    as it was published, and an adapter would belong to that changed base alone.
    """


def _one_compute_type(value: object) -> object:
    if isinstance(value, Mapping):
        raise ValueError(
            "one type for the whole job, not one for each module: a decoder layer is gathered as "
            "one group, and FSDP2 converts "
            "a group to one type. Norms compute in fp32 with either type"
        )
    return value


class PrecisionOptions(Strict):
    """The formats in which the frozen weights are stored, sharded and gathered, and the dtype of
    the arithmetic.
    """

    default: FormatChoice | Literal["auto"] = "bf16"
    """Format of every linear layer and every stack of experts inside the decoder layers that no
    override matches; the rest, also routers, stays bf16. "as_published": every weight stays as the
    base's files hold it, bit for bit: in NVFP4, MXFP4, FP8 or bitsandbytes NF4; plain ones, and
    those in a layout that no format holds (INT4), are bf16. "auto": the most exact of bf16,
    as_published, fp8 and nf4 that fits the machine, chosen once, when the job is created, since
    results depend on it. So is what is not given, where the machine's memory is known. Whatever is
    given, a base published in bitsandbytes NF4, or in FP8 by rows or tensors, keeps its format, and
    one in FP8 by blocks keeps its blocks with fp8. All else is made from the exact values of the
    published weights; the plan says what that costs.
    """
    overrides: Annotated[dict[Pattern, FormatChoice], FewPatterns] = {}
    """RE2 pattern on the module's full name → format, or as_published; the last matching pattern
    wins. A pattern without a match is an error, and so is a format other than bf16 outside the
    decoder layers (embeddings, output head).
    """
    compute: Annotated[Literal["bf16", "fp32"], BeforeValidator(_one_compute_type)] = "bf16"
    """Element type of activations and matrix products in all modules: FSDP2 has one type per group.

    Adapters are fp32 masters in either case. If it is not given, jobs on this host's processor get
    fp32 where that is slower in bf16.
    """
    fp8_products: AutoOrOff = "auto"
    """auto: layers stored in fp8 multiply in FP8 if the GPU supports it and compute is bf16; inputs
    and gradients are rounded to FP8 row by row. off: they are always dequantised first, as
    fp8_blocks are. The job's events say which applies.
    """
    fused_kernels: AutoOrOff = "auto"
    """auto: on GPUs, RMS norms, rotary positions and gated feed-forwards in bf16 are computed by
    Triton kernels that round where the model's own operations do, and the rows of experts by some
    that round a sum once, if they give the same results on the GPU when the job starts, and no
    layer is compiled. They need less memory, which the plan counts on NVIDIA's GPUs that it knows.
    off: the model's own operations. The job's events say which applies.
    """
    deterministic_attention: bool = True
    """On GPUs, gradients of attention of packed samples are added up in one order, so that a job
    that is resumed or repeated on as many ranks ends with the same bits. Where attention is
    PyTorch's kernel it takes 3 to 6 % of an 8B model's time on an H200; false: in the order in
    which they come, which changes from run to run. cuDNN's attention and processors always keep to
    one order.
    """
    compare_served: AutoOrOff = "auto"
    """auto: after training, the validation loss (of up to 64 samples) and the evaluation's answers
    are also measured with the base in bf16 and with the adapter merged into it, as adapters are
    often served; a warning tells if the loss is higher by more than 0.02 nats. Needs a validation
    file and, for a quantised base, memory for the base in bf16 in addition to the model. Beside
    reading that base it may take a quarter of the job's time, or a minute. An event says what was
    left out, and why. off: never.
    """
    served_as: ServedAs | None = None
    """The form in which the tuned model will be served merged: int4_g128, int4_g64, int4_g32 (INT4
    with a scale for every 128, 64 or 32 columns of a row), fp8, int8 (a scale for each row), nvfp4,
    mxfp4, or 8da4w (INT4 by 32 columns, and inputs of the layers rounded to INT8 token by token, as
    phones compute). Layers then multiply by what base and adapter give together once that is
    rounded to this form, in training as in validation, and `ft merge` or `ft export` writes exactly
    these codes. It needs an adapter on every linear layer of the decoder layers, and is not for
    mixtures of experts, use_dora, lora_dropout, sampling by method reinforcement or Tinker's
    clients, or engines: such a job is trained alone. The adapter is for that form alone: other
    exports are refused. None: layers compute with base and adapter as they are.
    """
    served_from_step: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Share of the training steps that train base and adapter as they are, before layers are
    rounded as `served_as` says; validations and answers are rounded from the first. It is given
    with `served_as` only.
    """

    @property
    def format(self) -> FormatChoice:
        """`default` after it was chosen."""
        assert self.default != "auto", (
            "precision.default is chosen before anything is built or stored"
        )
        return self.default


def served_fault(precision: PrecisionOptions, lora: LoraOptions) -> str | None:
    """Return what keeps such adapters from being rounded with their base, as precision.served_as
    says; None: nothing.
    """
    if precision.served_as is None:
        return None
    everywhere = (
        "all linear layers of the decoder layers are rounded, and each needs an adapter: all-linear"
    )
    found = (
        ("use_dora", lora.use_dora, "its magnitudes would multiply rows that are rounded"),
        (
            "lora_dropout",
            lora.lora_dropout > 0,
            "what is served is one weight, of which no part can be dropped",
        ),
        ("target_parameters", lora.target_parameters != [], "mixtures are not merged to it"),
        ("target_modules", lora.target_modules != "all-linear", everywhere),
    )
    for name, given, why in found:
        if given:
            return (
                f"precision.served_as = {precision.served_as!r} with lora.{name}: {why}. Leave one "
                "of the two out"
            )
    return None


CHOSEN_UNLESS_GIVEN = ("precision.default", "precision.compute")
"""Options that are chosen for the machine unless they are given, whatever their default."""


class TrainingOptions(Strict):
    """The optimisation, in the names of Transformers' TrainingArguments."""

    n_epochs: Annotated[int, Field(ge=1, le=50)] | Literal["auto"] = 3
    """Passes over the training file; ignored with max_steps.

    "auto": chosen by the number of samples, once, when the job is created; the same as OpenAI's
    n_epochs "auto".
    """
    max_steps: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Optimizer steps; None: those of n_epochs."""
    batch_size: Annotated[int, Field(ge=1, le=8192)] | Literal["auto"] = 8
    """Samples per optimizer step, summed over all ranks; the last batch of an epoch may be smaller.

    Packed documents count as rows of max_length tokens. "auto": chosen by the number of samples, as
    n_epochs.
    """
    per_device_train_batch_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Most samples per forward on a rank; None: limited only by tokens_per_micro_batch.

    It affects memory, not results: a step runs as many micro-batches as batch_size needs.
    """
    packing: bool = True
    """Put the samples of a micro-batch into one row without padding; tokens never attend to other
    samples. Results are those of padded samples. false, and architectures that cannot pack: samples
    of similar length are padded to the longest.
    """
    tokens_per_micro_batch: Annotated[int, Field(ge=8, le=1_048_576)] | Literal["auto"] = "auto"
    """Tokens per forward on a rank, with padding; a longer sample raises it to its length.

    It affects memory and speed, not results. "auto": enough to keep the machine busy, if memory
    suffices: on a GPU up to 16,384, on a CPU about 2,048.
    """
    max_length: Annotated[int, Field(ge=8, le=1_048_576)] = 2048
    """Tokens kept of a sample; the rest is cut from the end, and counted in a warning.

    Documents, and everything with train_on "everything", are split into windows of this length
    instead. Limited by the model's own context.
    """
    train_on: TrainOn = "all_assistant"
    """The learned part of a conversation: every answer of the assistant without weight 0, only the
    last one, or everything, also users' messages and system prompts. "everything" also learns the
    prompts of bare text; documents are always learned as a whole.
    """
    learning_rate: Annotated[Number, Field(gt=0, le=1)] | Literal["auto"] = LEARNING_RATE
    """AdamW's peak learning rate.

    "auto": chosen by the base's width and family and the adapter's scaling, once, when the job is
    created; the same as OpenAI's learning_rate_multiplier "auto". With method dpo, simpo or kto it
    is 5e-6, with orpo 5e-5, with reinforcement 4e-5.
    """
    lr_scheduler_type: Literal["linear", "cosine", "constant", "warmup_stable_decay"] = "linear"
    """Decay of the rate after the warm-up: to 0, or to min_lr_ratio, behind the last step, not at
    all, or only in the last decay_ratio of the steps.
    """
    min_lr_ratio: Annotated[Number, Field(ge=0, lt=1)] | None = None
    """Share of learning_rate to which the rate falls; None: it falls to 0.

    Refused with constant.
    """
    warmup_ratio: Annotated[Number, Field(ge=0, le=1)] = 0.03
    """Share of all steps in which the rate rises from 0."""
    warmup_steps: Annotated[int, Field(ge=0, le=NEVER)] | None = None
    """Number of steps in which the rate rises from 0, in place of warmup_ratio; None: warmup_ratio
    decides. With more than the job's steps the rate only rises.
    """
    decay_ratio: Annotated[Number, Field(gt=0, le=1)] | None = None
    """Share of all steps, at the end, in which warmup_stable_decay falls to 0 linearly, behind the
    warm-up at the earliest; None: 0.1. Refused with other types.
    """
    weight_decay: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """AdamW's decoupled weight decay on the adapters."""
    adam_beta1: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    """AdamW's weight of the past in the moving mean of gradients."""
    adam_beta2: Annotated[Number, Field(ge=0, lt=1)] = 0.999
    """AdamW's weight of the past in the moving mean of their squares.

    A lower one, such as 0.95, follows changes sooner.
    """
    adam_epsilon: Annotated[Number, Field(ge=LEAST_EPSILON, le=1)] = 1e-8
    """What AdamW adds to the root of the mean of squares, by which it divides: gradients below it
    make small steps.
    """
    loraplus_lr_ratio: Annotated[Number, Field(gt=0, le=1000)] | None = None
    """LoRA+: learning rate of the matrices B, which start as zeros, and of DoRA's magnitudes, as a
    multiple of A's; None: 1. Its paper uses 16 and more, with a lower learning_rate.
    """
    neftune_noise_alpha: Annotated[Number, Field(gt=0, le=1000)] | None = None
    """NEFTune: uniform noise on the embeddings during training, between -a and a, with a = this /
    sqrt(tokens of the sample times width); its paper uses 5 to 15. Seed, step and sample decide it,
    on any number of ranks. None: off.
    """
    group_by_length: bool = False
    """Batch samples of similar length, so that there is less padding; the order of batches is still
    random. Only with packing false, since packed rows have no padding.
    """
    max_grad_norm: Annotated[Number, Field(ge=0)] = 1.0
    """Gradients are scaled down to this global 2-norm; 0: never."""
    optim: Literal["adamw_torch", "adamw_8bit"] = "adamw_torch"
    """adamw_torch: AdamW with both moments in fp32. adamw_8bit: the same with the moments of
    matrices kept in 8 bits, by dynamic codes with a scale for every 128 columns of a row: a quarter
    of the memory, for modules_to_save and large ranks. Blocks lie within rows, so that the same
    gradients give the same bits on any number of ranks. Not with Tinker's clients.
    """
    eval_steps: Annotated[int, Field(ge=1, le=NEVER)] | None = None
    """Optimizer steps between validations; None: at the end of every epoch.

    Ignored without a validation file.
    """
    early_stopping_patience: Annotated[int, Field(ge=1, le=NEVER)] | None = None
    """Validations in a row without progress after which training ends, as a success; None: never.

    Needs a validation file.
    """
    early_stopping_threshold: Annotated[Number, Field(ge=0)] = 0.0
    """Least decrease of the validation loss (nats), compared with the last progress, that counts as
    progress.
    """
    load_best_model_at_end: bool = False
    """Publish the adapter of the step with the lowest validation loss, not the last step's.

    Implies checkpoint.keep_best. Needs a validation file.
    """

    @property
    def rate(self) -> float:
        """`learning_rate` after it was chosen."""
        assert self.learning_rate != "auto", "a learning rate is chosen before a job is stored"
        return self.learning_rate

    @property
    def batch(self) -> int:
        """`batch_size` after it was chosen."""
        assert self.batch_size != "auto", "a batch size is chosen before a job is planned"
        return self.batch_size

    @property
    def epochs(self) -> int:
        """`n_epochs` after it was chosen."""
        assert self.n_epochs != "auto", "a number of epochs is chosen before a job is planned"
        return self.n_epochs


class Prefetch(Strict):
    """Number of groups whose weights are gathered ahead while a group computes; each holds its
    gathered weights.
    """

    forward: Annotated[int, Field(ge=1, le=8)] = 1
    backward: Annotated[int, Field(ge=1, le=8)] = 1


class WrapBySize(Strict):
    """Grouping by size."""

    min_params: Annotated[int, Field(ge=1)]
    """Parameters: the smallest modules with at least this number, not counting groups inside them,
    become groups.
    """


class DistributedOptions(Strict):
    """The number of processes that train, and how they store the base.  Options of sharding and
    gathering are ignored if nothing is sharded (one rank, or replicate -1).
    """

    nnodes: Annotated[int, Field(ge=1, le=512)] = 1
    """Hosts (on Kubernetes: pods) that train together, with nproc_per_node ranks each.

    "MIN:MAX" is short for MIN with MAX as max_nnodes.
    """
    max_nnodes: Annotated[int, Field(ge=1, le=512)] | None = None
    """Each attempt may start on any number of hosts from nnodes to this, as many as are free.

    Additional hosts run max_nproc_per_node ranks each. None: nnodes. With Kueue an attempt has
    nnodes.
    """
    nproc_per_node: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = "auto"
    """Ranks on each host. "auto": one per GPU of the host; 1 without a GPU.

    "MIN:MAX" is short for MIN with MAX as max_nproc_per_node.
    """
    max_nproc_per_node: Annotated[int, Field(ge=1, le=64)] | None = None
    """Each attempt may start on any number of ranks per host from nproc_per_node to this, as many
    as are free. With another number of ranks results differ by rounding. None: nproc_per_node. With
    Kueue an attempt has nproc_per_node; `ft run` takes as many as the host has.
    """
    profile: Annotated[str, Field(max_length=40)] | None = None
    """Kind of pods, or of Slurm's batch jobs, that the operator of a cluster offers under this
    name: a type of GPU, a pool, spot nodes, an account. None: the first one that the project may
    use. On one host there is none; ignored by `ft run`.
    """
    replicate: Annotated[int, Field(ge=1, le=4096)] | Literal[-1, "auto"] = "auto"
    """Copies of the model (HSDP), each sharded over ranks / replicate ranks; gradients are averaged
    over all. Must divide the number of ranks. -1: one copy per rank, so that nothing is sharded or
    gathered. "auto": -1 if the base fits whole on every rank and that is faster, else one copy per
    host, so that only the adapters' gradients cross the network, or one copy over all hosts if a
    host cannot hold it. A job with an option of sharding (wrap, ignored, reshard_after_forward,
    keep_unsharded, prefetch or offload) is sharded.
    """
    wrap: Literal["layers", "none"] | WrapBySize = "layers"
    """Groups that are gathered together.

    "layers": every decoder layer, the embedding, norm with head; "none": everything at once, held
    for the whole step; or groups by size.
    """
    ignored: Annotated[list[Pattern], FewPatterns] = []
    """RE2 patterns on names of base weights, as in the checkpoint, that are not sharded: every rank
    holds them whole. A pattern without a match is an error.
    """
    reshard_after_forward: bool | Annotated[int, Field(ge=2, le=4096)] = True
    """Free a layer's gathered weights after its forward and gather them again for its backward:
    less memory, twice the traffic. A number: keep them sharded over groups of this many ranks after
    forward; it must divide the ranks that share a copy, and needs a base that is all bf16. Ignored
    with keep_unsharded, and with wrap "none".
    """
    keep_unsharded: bool = False
    """Gather once per optimizer step and keep all weights until the last micro-batch's backward:
    least traffic, most memory.
    """
    prefetch: Prefetch | None = None
    """Gather groups ahead, and the first group before the batch is put together.

    None: FSDP2's default, one group ahead.
    """
    context_parallel: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = "auto"
    """Ranks that share each sample, or packed row: each has a part of its tokens, and for attention
    all tokens of some heads (Ulysses). For samples that do not fit on one rank. Must divide
    nproc_per_node. Results are the same but for rounding. Bases whose layers scan a state space or
    choose keys by an indexer, images, reinforcement, distillation and jobs of Tinker's clients need
    1; a job with more shares no engine. "auto": 1, or if the longest
    sample does not fit so, the fewest ranks with which it does.
    """
    offload: bool = False
    """Keep shards, gradients and optimizer state in the host's memory.

    Needs GPUs and at least two ranks that share a copy.
    """
    activation_checkpointing: Literal[Checkpointing, "auto"] = "auto"
    """Recompute activations in backward: "full" keeps only the input of each decoder layer,
    "selective" also the results of matrix products and attention. For long samples: "tiled" is
    "full" with feed-forwards computed 8,192 tokens at a time, "offload" is "tiled" with the inputs
    in pinned host memory, 2 bytes x hidden size x layers a token; it needs GPUs. "auto": the
    fastest that fits, which is "none" if memory suffices, and the last two only where no format
    fits without them.
    """
    compile: bool | Literal["auto"] = "auto"
    """torch.compile for each decoder layer.  If it fails, the job continues uncompiled, with a
    warning that says why. "auto": on GPUs, for jobs that save more than the minute that
    compiling takes, where precision.fused_kernels is off.
    """
    collective_timeout_seconds: Annotated[int, Field(ge=10, le=1800)] = 600
    """Seconds that a rank waits for the others.

    Then the attempt ends, and the next one continues from the last checkpoint. Must exceed the
    difference between the slowest and the fastest rank in reading the base or compiling. Ignored
    with one rank.
    """

    @model_validator(mode="before")
    @classmethod
    def _split_ranges(cls, given: Any) -> Any:
        """Split "MIN:MAX" into two options, whose own limits then check the numbers."""
        if not isinstance(given, Mapping):
            return given
        split = dict(given)
        for name in ("nnodes", "nproc_per_node"):
            match = _RANGE.fullmatch(given[name]) if isinstance(given.get(name), str) else None
            if match and f"max_{name}" not in given:
                split |= {name: int(match[1]), f"max_{name}": int(match[2])}
        return split

    @property
    def checkpointing(self) -> Checkpointing:
        """`activation_checkpointing` after it was chosen."""
        assert self.activation_checkpointing != "auto", (
            "activation_checkpointing is chosen before a model is built"
        )
        return self.activation_checkpointing

    @property
    def ranks_per_sample(self) -> int:
        """`context_parallel`; 1 as long as it is not chosen."""
        return 1 if self.context_parallel == "auto" else self.context_parallel

    @property
    def asks_to_shard(self) -> bool:
        """Whether an option that only affects sharding has another value than its default."""
        grouped = (
            self.wrap != "layers" or self.reshard_after_forward is not True or self.keep_unsharded
        )
        return grouped or self.offload or bool(self.ignored) or self.prefetch is not None

    @property
    def reshard_size(self) -> int | None:
        """reshard_after_forward if it is a number."""
        return None if isinstance(self.reshard_after_forward, bool) else self.reshard_after_forward


MOST_CHECKPOINTS = 10
"""Checkpoints of a job that does not say how many steps lie between them."""


class CheckpointOptions(Strict):
    """The steps of checkpoints, and which checkpoints are kept."""

    save_steps: Annotated[int, Field(ge=1, le=NEVER)] | None = None
    """Optimizer steps between checkpoints; None: at the end of every epoch, or with more than 10
    epochs of every second, third … one, so that there are at most 10. A checkpoint is always
    written at the last step.
    """
    save_total_limit: Annotated[int, Field(ge=1, le=1000)] = 3
    """Complete checkpoints that are kept; older ones are removed when a newer one is complete,
    unless keep_every or keep_best keeps them.
    """
    keep_every: Annotated[int, Field(ge=1, le=NEVER)] | None = None
    """Optimizer steps: a checkpoint is written at every multiple, and kept. None: off."""
    keep_best: bool = False
    """Write a checkpoint at every validation that is the best so far, and keep it until there is a
    better one. Needs a validation file.
    """
    async_save: bool = True
    """Write checkpoints while training continues.

    It pauses only for a copy in the host's memory (the size of adapters and optimizer state). Only
    the last checkpoint, and that of a stop, are waited for.
    """

    def interval(self, steps_per_epoch: int, total_steps: int) -> int:
        """Optimizer steps between checkpoints, of a job of so many steps."""
        epochs = math.ceil(total_steps / steps_per_epoch)
        return self.save_steps or steps_per_epoch * math.ceil(epochs / MOST_CHECKPOINTS)


Applied = bool | Literal["auto"]
"""Whether prompts with completions are conversations (DataOptions.apply_chat_template)."""
PIXELS = ("min_pixels", "max_pixels")
"""Fields of DataOptions that bound pictures."""
_NO_COLUMNS = {"apply_chat_template", "images", *PIXELS}
"""Fields of DataOptions that name no column."""
MOST_PIXELS = 64_000_000
"""Pixels of a picture, at most: as much as large cameras make, and 192 MB."""
LEAST_MOST_PIXELS = 1024
"""The least value of data.max_pixels: towers take squares of up to 32 pixels a side."""


class DataOptions(Strict):
    """Names in the data files for the columns, or keys of JSON lines, of their format
    (docs/data.md). None: the format's name.
    """

    apply_chat_template: Applied = False
    """Whether prompts with completions that are strings become conversations, which the base's chat
    template writes: true, false, or auto: where the base has one, but for records with an empty
    prompt.
    """
    messages: ColumnName | None = None
    """The conversation: a list of messages."""
    role: ColumnName | None = None
    """The key of a message for its speaker. The speakers of ShareGPT (human, gpt) are known too."""
    content: ColumnName | None = None
    """The key of a message for its text."""
    tools: ColumnName | None = None
    """Definitions of the tools of a conversation."""
    system: ColumnName | None = None
    """The system message of ShareGPT's and Alpaca's records."""
    instruction: ColumnName | None = None
    """The user's message in a conversation of one turn; with `output`."""
    input: ColumnName | None = None
    """Text that follows the instruction, or the beginning of OpenAI's preference pairs."""
    output: ColumnName | None = None
    """The answer to an instruction, which is learned."""
    prompt: ColumnName | None = None
    """Bare text before the learned text, which no chat template touches, or messages; with
    `completion`.
    """
    completion: ColumnName | None = None
    """The learned text after the prompt."""
    text: ColumnName | None = None
    """A document, learned as a whole."""
    conversations: ColumnName | None = None
    """ShareGPT's turns, which have `from` and `value`."""
    chosen: ColumnName | None = None
    """The preferred answer of a preference pair."""
    rejected: ColumnName | None = None
    """The other answer of a preference pair."""
    label: ColumnName | None = None
    """Whether an answer is good, of method kto: true or false."""
    images: Literal["skip", "strict"] = "skip"
    """What a picture does that is damaged, too large, of another type or not to be had: skip: its
    line is left out, named and counted, as at OpenAI; strict: the file is refused. Of a file at
    most half of the lines are skipped, and more than 200 only up to a tenth.
    """
    min_pixels: Annotated[int, Field(ge=1, le=MOST_PIXELS)] | None = None
    """Pixels of a picture, at least, as the base's towers see it: a smaller one is enlarged. Only
    for bases whose image processor has such a bound. None: the base's own.
    """
    max_pixels: Annotated[int, Field(ge=LEAST_MOST_PIXELS, le=MOST_PIXELS)] | None = None
    """Pixels of a picture, at most, likewise: a larger one is made smaller, and takes fewer
    tokens. The bounds are written into the adapter's folder, and used wherever the service answers
    with it.
    """

    @property
    def bounds(self) -> dict[str, int]:
        """Those of min_pixels and max_pixels that are given."""
        return self.model_dump(include=set(PIXELS), exclude_none=True)

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(name in the format, name in the files) of each given column."""
        given = self.model_dump(exclude_none=True, exclude=_NO_COLUMNS)
        return tuple((ours, given[ours]) for ours in sorted(given))

    @model_validator(mode="after")
    def _least_below_most(self) -> DataOptions:
        least, most = self.min_pixels, self.max_pixels
        if least is not None and most is not None and least > most:
            raise ValueError(
                f"data.min_pixels = {least:,} is more than data.max_pixels = {most:,}: give bounds "
                "between which pictures can be"
            )
        return self

    @model_validator(mode="after")
    def _each_column_once(self) -> DataOptions:
        for of_message in (True, False):
            named: dict[str, str] = {}
            for ours, theirs in self.pairs:
                if (ours in ("role", "content")) is of_message and ours != named.setdefault(
                    theirs, ours
                ):
                    raise ValueError(
                        f"data.{named[theirs]} and data.{ours} both name {theirs!r}: a column is "
                        "one thing"
                    )
        return self


class JobOptions(NullableSections):
    """The options that our create body adds to OpenAI's: a SPEC file without model and files."""

    lora: LoraOptions = LoraOptions()
    precision: PrecisionOptions = PrecisionOptions()
    training: TrainingOptions = TrainingOptions()
    distributed: DistributedOptions = DistributedOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    data: DataOptions = DataOptions()
    chat_template: (
        Annotated[str, Field(min_length=1, max_length=100_000), AfterValidator(check_template)]
        | None
    ) = None
    """The chat template for conversations, in place of the base's: its text (Jinja), or the name of
    a standard one (docs/data.md); in a SPEC file also the path of a .jinja file. None: the base's;
    without one, conversations are refused. Saved with the adapter.
    """
    chat_template_kwargs: Variables | None = None
    """Variables that the chat template reads, such as enable_thinking, thinking or
    reasoning_effort: name → true, false, a number or a text. They become defaults in the template's
    text, in training, evaluation, preview, hand-off and exports alike. None: the template's own
    defaults.
    """
    evaluation: EvaluationOptions | None = None
    """Answers to a few prompts before and after training, in the job's events and at its
    `evaluation`; None: off.
    """
    serve: Literal["vllm"] | None = None
    """The inference server for the adapter: options that it would refuse or silently ignore are
    refused before training. None: any server.
    """
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Jobs with a higher priority start first; then those of the project with less recent use; then
    the older job.
    """
    max_seconds: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Seconds that the job may hold its slots, over all its attempts and their start-up.

    Then it stops at a checkpoint and fails with reason `time_limit`; a job with that checkpoint as
    its model continues there. None: no limit. With `ft run` the limit of each call, which stops at
    a checkpoint.
    """
    max_cost: Annotated[Number, Field(gt=0, le=1_000_000_000)] | None = None
    """What the job may cost, in the currency of the service's prices, over all its attempts: its
    slot-seconds times the price of a slot-hour, in an engine its share of them. Then it pauses at a
    checkpoint with reason `cost_limit`, and continues once it is resumed with a higher max_cost.
    None: no limit. Refused where slots have no price, and by `ft run`.
    """
    engine: AutoOrOff = "auto"
    """auto: the job may be trained in an engine, where jobs of its project on the same base, with
    the same precision and ranks, share the base's weights where slots are short and they gain by
    it. Its results are those of training alone. off: the job has ranks of its own. `ft run` always
    trains alone.
    """

    @model_validator(mode="after")
    def _consistent_distributed(self) -> JobOptions:
        options = self.distributed
        formats = {self.precision.default, *self.precision.overrides.values()} - {
            "bf16",
            "auto",
            AS_PUBLISHED,
        }
        if options.reshard_size is not None and (options.keep_unsharded or options.wrap == "none"):
            other = "keep_unsharded" if options.keep_unsharded else "wrap 'none'"
            raise ValueError(
                f"distributed.reshard_after_forward as a number has no effect with {other}: keep "
                "one of the two"
            )
        if options.reshard_size is not None and formats:
            raise ValueError(
                f"distributed.reshard_after_forward = {options.reshard_size}: FSDP2 reshards to a "
                "number of ranks only plain "
                f"weights, and precision stores some as {' and '.join(sorted(formats))}. Use true "
                "or false"
            )
        for name in ("nnodes", "nproc_per_node"):
            least = getattr(options, name)
            most = getattr(options, f"max_{name}")
            if most is not None and (least == "auto" or most < least):
                raise ValueError(
                    f"distributed.{name} = {least!r} with max_{name} = {most}: the first must be "
                    "a number, at most the second. "
                    f'Write {name}: "MIN:MAX", or leave max_{name} out'
                )
        if options.prefetch is not None and options.wrap == "none":
            raise ValueError(
                "distributed.prefetch: with wrap 'none' there is only one group; leave one of the "
                "two out"
            )
        if options.compile is True and isinstance(options.wrap, WrapBySize):
            raise ValueError(
                "distributed.compile works on whole decoder layers: leave it out, or use wrap "
                "'layers'"
            )
        if options.activation_checkpointing in FOR_LONG_SAMPLES:
            self._refuse_beside_tiles()
        if options.offload and options.ignored:
            raise ValueError(
                "distributed.offload moves shards only, and distributed.ignored weights have "
                "none: keep one"
            )
        return self

    def _refuse_beside_tiles(self) -> None:
        """Raise ValueError for what cannot be combined with layers that are computed by tiles."""
        options = self.distributed
        beside = {
            "distributed.compile: true": options.compile is True,
            "distributed.wrap by size": isinstance(options.wrap, WrapBySize),
            "precision.served_as": self.precision.served_as is not None,
        }
        for name in (name for name, given in beside.items() if given):
            raise ValueError(
                f"distributed.activation_checkpointing = {options.activation_checkpointing!r} "
                f"computes feed-forwards by tiles, and cannot be combined with {name}: leave it "
                "out, or use 'full'"
            )

    @model_validator(mode="after")
    def _one_warmup(self) -> JobOptions:
        training = self.training
        if training.warmup_steps is not None and "warmup_ratio" in training.model_fields_set:
            raise ValueError(
                "training.warmup_steps and training.warmup_ratio are both given: keep one"
            )
        if training.decay_ratio is not None and training.lr_scheduler_type != "warmup_stable_decay":
            raise ValueError(
                "training.decay_ratio is of lr_scheduler_type warmup_stable_decay only: leave one "
                "of the two out"
            )
        if training.min_lr_ratio and training.lr_scheduler_type == "constant":
            raise ValueError(
                "training.min_lr_ratio is of rates that fall, not of lr_scheduler_type constant: "
                "leave one of the two out"
            )
        if training.group_by_length and training.packing:
            raise ValueError(
                "training.group_by_length saves padding, and packed rows have none: give packing: "
                "false, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _something_to_train(self) -> JobOptions:
        if self.lora.target_modules == [] and not self.lora.target_parameters:
            raise ValueError(
                "lora.target_modules = []: nothing would be trained. Name modules, or leave it "
                "out (all-linear)"
            )
        return self

    @model_validator(mode="after")
    def _dora_as_peft_has_it(self) -> JobOptions:
        if self.lora.use_dora and self.lora.lora_dropout:
            raise ValueError(
                "lora.use_dora with lora.lora_dropout: it would take the frozen product twice, of "
                "the input with and without "
                "dropout. Leave one of the two out"
            )
        if self.lora.use_dora and self.lora.target_parameters:
            raise ValueError(
                "lora.use_dora with lora.target_parameters: PEFT has no DoRA for stacks of "
                "experts. Leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _served_as_it_is_merged(self) -> JobOptions:
        fault = served_fault(self.precision, self.lora)
        if fault is not None:
            raise ValueError(fault)
        return self

    @model_validator(mode="after")
    def _patience_with_its_threshold(self) -> JobOptions:
        if self.training.early_stopping_threshold and self.training.early_stopping_patience is None:
            raise ValueError(
                "training.early_stopping_threshold has no effect without "
                "training.early_stopping_patience: give both or neither"
            )
        return self
