"""OpenAI's `method` of a job: its loss, with the hyperparameters of that loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from ft_service.spec.environments import Environment, McpEnvironment
from ft_service.spec.graders import Grader
from ft_service.spec.option_types import GREEDY, NullableSections, Number, Strict
from ft_service.spec.teachers import TeacherRef

AUTO = "auto"

DpoLoss = Literal["sigmoid", "ipo", "sigmoid_norm", "hinge", "robust", "apo_zero", "apo_down"]
Beta = Annotated[Number, Field(gt=0, le=100)]
KtoLoss = Literal["kto", "apo_zero_unpaired"]
DistillationLoss = Literal["forward_kl", "reverse_kl", "jsd"]
ReinforcementLoss = Literal["dapo", "grpo", "dr_grpo", "gspo"]
Weight = Annotated[Number, Field(gt=0, le=100)]
Smoothing = Annotated[Number, Field(ge=0, lt=0.5)]

BETAS: Mapping[DpoLoss, float] = {**dict.fromkeys(get_args(DpoLoss), 0.1), "sigmoid_norm": 5.0}
"""Loss → beta "auto": 0.1 as in the papers of DPO, IPO and APO, 5 where log-probabilities are means
over tokens, as for Tülu 3.
"""
SIMPO_BETA = 2.0
"""beta "auto" of SimPO, the lower end of what its paper used."""
ORPO_BETA = 0.1
"""beta "auto" of ORPO, the weight of its paper's Mistral."""
KTO_BETA = 0.1
"""beta "auto" of KTO, as in its paper."""
JSD_BETA = 0.5
"""beta "auto" of distillation with jsd: neither side weighs more."""
MOST_TOP_K = 1024
"""Words of a teacher that are compared one by one, at most."""
MOST_SERVED_TOP_K = 20
"""The same of a teacher that a server answers for: vLLM tells no more unless it was started with a
higher --max-logprobs.
"""
_OF_SAMPLING = ("num_generations", "max_completion_length", "temperature")
"""Hyperparameters of distillation that the student's own answers alone read."""
SMOOTHED: Sequence[DpoLoss] = ("sigmoid", "robust")
"""Losses that read label_smoothing."""


class Hyperparameters(Strict):
    """OpenAI's three. With "auto" the service chooses: epochs and batch by the number of samples,
    the learning rate by the base (ft_service/spec/auto_hyperparameters.py). Defaults: 3 epochs
    (dpo, simpo, orpo, kto: 1), a batch of 8 and the rate 2e-4 (dpo, simpo, kto: 5e-6; orpo: 5e-5).
    These four have no "auto" learning rate.
    """

    n_epochs: Annotated[int, Field(ge=1, le=50)] | Literal["auto"] = AUTO
    batch_size: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = AUTO
    learning_rate_multiplier: Annotated[Number, Field(gt=0, le=5000)] | Literal["auto"] = AUTO
    """training.learning_rate as a multiple of 2e-4 (dpo, simpo, kto: of 5e-6; orpo: of 5e-5)."""


class SupervisedMethod(NullableSections):
    hyperparameters: Hyperparameters = Hyperparameters()


class DpoHyperparameters(Hyperparameters):
    """OpenAI's four, and three with the names of TRL's DPOConfig. batch_size counts pairs."""

    beta: Beta | Literal["auto"] = AUTO
    """Strength of the penalty for leaving the model that training starts from: the larger, the
    closer the answers stay. "auto": 0.1, with sigmoid_norm 5.
    """
    loss_type: DpoLoss = "sigmoid"
    """sigmoid: that of the paper; ipo: a squared distance from 1 / (2 beta), which stops pushing
    pairs that are already separated; sigmoid_norm: as sigmoid. With ipo and sigmoid_norm
    log-probabilities are means over an answer's tokens, so that longer answers do not count
    more. hinge: no push beyond a margin of 1 / beta (SLiC); robust: without bias although a share
    label_smoothing of the labels is wrong; apo_zero: makes preferred answers likelier and others
    less likely, each against the reference, where answers are better than the model's own;
    apo_down: makes both less likely, where they are worse than its own.
    """
    label_smoothing: Smoothing = 0.0
    """Share of pairs whose label is assumed to be wrong. sigmoid: the loss of both orders, weighted
    (conservative DPO); robust, which requires it: the unbiased estimate. Other losses do not read
    it.
    """
    rpo_alpha: Weight | None = None
    """Weight of an additional term, the cross entropy of the preferred answers as in supervised
    training (TRL's loss_type "sft"): it prevents their probability from falling with that of the
    others. None: off.
    """

    @model_validator(mode="after")
    def _smoothing_is_read(self) -> DpoHyperparameters:
        if self.label_smoothing and self.loss_type not in SMOOTHED:
            raise ValueError(
                f"label_smoothing = {self.label_smoothing:g} with loss_type "
                f"{self.loss_type!r}: only {' and '.join(SMOOTHED)} read it. Leave it out"
            )
        if self.loss_type == "robust" and not self.label_smoothing:
            raise ValueError(
                "loss_type 'robust' needs label_smoothing, the share of labels that is wrong, "
                "above 0 and below 0.5: give it, or use sigmoid, which is the same with 0"
            )
        return self

    def resolved(self) -> DpoOptions:
        return DpoOptions(
            beta=BETAS[self.loss_type] if self.beta == AUTO else self.beta,
            loss_type=self.loss_type,
            label_smoothing=self.label_smoothing,
            rpo_alpha=self.rpo_alpha,
        )


class DpoMethod(NullableSections):
    hyperparameters: DpoHyperparameters = DpoHyperparameters()


class SimpoHyperparameters(Hyperparameters):
    """OpenAI's three, and those of SimPO's paper. batch_size counts pairs."""

    beta: Beta | Literal["auto"] = AUTO
    """Factor of the difference of the answers' mean log-probabilities. "auto": 2."""
    gamma: Annotated[Number, Field(ge=0, le=100)] = 1.0
    """Margin by which beta times the preferred answer's mean log-probability is to exceed that of
    the other; the paper recommends about half of beta.
    """

    def resolved(self) -> SimpoOptions:
        return SimpoOptions(beta=SIMPO_BETA if self.beta == AUTO else self.beta, gamma=self.gamma)


class SimpoMethod(NullableSections):
    hyperparameters: SimpoHyperparameters = SimpoHyperparameters()


class OrpoHyperparameters(Hyperparameters):
    """OpenAI's three, and that of ORPO's paper. batch_size counts pairs."""

    beta: Beta | Literal["auto"] = AUTO
    """Weight of the odds ratio beside the cross entropy of the preferred answers: the paper's
    lambda. "auto": 0.1.
    """

    def resolved(self) -> OrpoOptions:
        return OrpoOptions(beta=ORPO_BETA if self.beta == AUTO else self.beta)


class OrpoMethod(NullableSections):
    hyperparameters: OrpoHyperparameters = OrpoHyperparameters()


class KtoHyperparameters(Hyperparameters):
    """OpenAI's three, and those of KTO's paper with the names of TRL's KTOConfig. batch_size counts
    answers.
    """

    beta: Beta | Literal["auto"] = AUTO
    """Strength of the penalty for leaving the model that training starts from: the larger, the
    closer the answers stay. "auto": 0.1.
    """
    loss_type: KtoLoss = "kto"
    """kto: that of the paper, which measures each answer against z0, how far the model has moved
    on answers to other prompts; apo_zero_unpaired: against 0, which saves a third of a step.
    """
    desirable_weight: Weight = 1.0
    """Weight of the loss of good answers."""
    undesirable_weight: Weight = 1.0
    """Weight of the loss of bad answers. The paper asks for weights by which the good answers'
    number times their weight is 1 to 4/3 times the bad ones' number times theirs.
    """

    def resolved(self) -> KtoOptions:
        return KtoOptions(
            beta=KTO_BETA if self.beta == AUTO else self.beta,
            loss_type=self.loss_type,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )


class KtoMethod(NullableSections):
    hyperparameters: KtoHyperparameters = KtoHyperparameters()


class DistillationHyperparameters(Hyperparameters):
    """OpenAI's three, and how far the student is from its teacher. batch_size counts samples, or
    the prompts that the student answers.
    """

    loss_type: DistillationLoss | Literal["auto"] = AUTO
    """Divergence of the student's probabilities from the teacher's at every token of the answers.
    forward_kl: KL(teacher || student), by which the student covers all that the teacher may say;
    reverse_kl: KL(student || teacher), by which it keeps to what the teacher finds likely; jsd:
    between the two (generalised Jensen-Shannon, arXiv 2306.13649). "auto": forward_kl on answers of
    the file, reverse_kl on the student's own.
    """
    beta: Annotated[Number, Field(gt=0, lt=1)] | Literal["auto"] = AUTO
    """Weight of the teacher in the mixture that jsd compares both with; near 0 the loss is beta
    times forward_kl, near 1 it is 1 - beta times reverse_kl. "auto": 0.5.
    """
    num_generations: Annotated[int, Field(ge=1, le=128)] | Literal["auto"] = AUTO
    """The student's answers to each prompt; only with answers: student. "auto": 1."""
    max_completion_length: Annotated[int, Field(ge=1, le=1_048_576)] | Literal["auto"] = AUTO
    """Tokens of the student's answer at most, where a longer one is cut off; only with answers:
    student. "auto": half of training.max_length, at most 512. Prompts get the rest of
    training.max_length.
    """
    temperature: Annotated[Number, Field(ge=GREEDY, le=10)] | Literal["auto"] = AUTO
    """Temperature at which the student's answers are sampled; only with answers: student. Student
    and teacher are compared at temperature 1, whatever it is. "auto": 1.
    """

    @model_validator(mode="after")
    def _beta_is_read(self) -> DistillationHyperparameters:
        if self.beta != AUTO and self.loss_type != "jsd":
            raise ValueError(
                f"beta = {self.beta:g} with loss_type {self.loss_type!r}: only jsd reads it. "
                "Leave it out"
            )
        return self


class DistillationMethod(NullableSections):
    hyperparameters: DistillationHyperparameters = DistillationHyperparameters()
    teacher: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """The model whose probabilities are learned: a tuned model on the job's base, whose adapter
    lies on the ranks beside the student's; or another base with the same tokenizer, which the ranks
    hold as a second model, sharded. None, or the name of the job's base: the base without adapter.
    """
    with_context: Annotated[str, Field(min_length=1, max_length=1_000_000)] | None = None
    """Text that the teacher reads and the student does not: a system prompt, or demonstrations. It
    begins the system message of chats, or is one; it stands before the prompt of bare text.
    """
    answers: Literal["data", "student"] = "data"
    """Whose answers are learned on. data: those of the training file. student: the student's own,
    sampled while it trains as in reinforcement learning; the training file holds prompts.
    """
    top_k: Annotated[int, Field(ge=1, le=MOST_TOP_K)] | None = None
    """How many of the words that the teacher finds likeliest are compared one by one; all others
    are one word more, with the sum of their probabilities. None: each of the vocabulary is.
    """
    teacher_at: Literal["ranks", "server"] = "ranks"
    """Who computes the teacher. ranks: the job's own, which hold it beside the student. server: an
    inference server of the operator's (FT_TEACHER_URL), which is asked about the student's answers
    by their token ids; ranks hold no second model. It needs answers: student, another base as
    teacher, whose tokenizer is in FT_MODELS, and top_k of at most 20.
    """

    @model_validator(mode="after")
    def _is_possible(self) -> DistillationMethod:
        if self.teacher_at == "server":
            self._refuse_what_no_server_answers()
        if self.answers == "student":
            return self
        for name in _OF_SAMPLING:
            given = getattr(self.hyperparameters, name)
            if given != AUTO:
                raise ValueError(
                    f"hyperparameters.{name} = {given:g} with answers = 'data': only the "
                    "student's own answers read it. Leave it out, or give answers = 'student'"
                )
        return self

    def _refuse_what_no_server_answers(self) -> None:
        if self.answers != "student":
            raise ValueError(
                "teacher_at = 'server' with answers = 'data': servers are asked about the student's "
                "answers alone. Give answers = 'student', or leave teacher_at out"
            )
        if self.teacher is None:
            raise ValueError(
                "teacher_at = 'server' without teacher: give the name of the base that the server "
                "answers for, or leave teacher_at out"
            )
        if self.top_k is None or self.top_k > MOST_SERVED_TOP_K:
            raise ValueError(
                f"top_k = {self.top_k} with teacher_at = 'server': servers tell the likeliest words "
                f"alone. Give 1 to {MOST_SERVED_TOP_K}, and start vLLM with --max-logprobs of at "
                "least so many"
            )

    def resolved(self) -> DistillationOptions:
        given = self.hyperparameters
        usual: DistillationLoss = "reverse_kl" if self.answers == "student" else "forward_kl"
        return DistillationOptions(
            loss_type=usual if given.loss_type == AUTO else given.loss_type,
            beta=JSD_BETA if given.beta == AUTO else given.beta,
            with_context=self.with_context or "",
            top_k=self.top_k,
        )

    def sampling(self) -> ReinforcementOptions | None:
        """How the student's answers are sampled. None: they are the file's."""
        if self.answers == "data":
            return None
        given = self.hyperparameters
        usual = ReinforcementHyperparameters()
        length = given.max_completion_length
        own = {
            "num_generations": 1 if given.num_generations == AUTO else given.num_generations,
            "max_completion_length": None if length == AUTO else length,
            "temperature": 1.0 if given.temperature == AUTO else given.temperature,
        }
        shared = {name: getattr(usual, name) for name in SHARED_OPTIONS}
        return ReinforcementOptions(
            grader=None, eval_interval=None, eval_samples=1, **{**shared, **own}
        )


class ReinforcementHyperparameters(Hyperparameters):
    """OpenAI's seven, and others with the names of TRL's GRPOConfig. batch_size counts prompts.

    "auto" for batch_size and n_epochs as in supervised training, with 1 epoch; for
    learning_rate_multiplier: 1.
    """

    compute_multiplier: Annotated[Number, Field(gt=0, le=16)] | Literal["auto"] = AUTO
    """num_generations as a multiple of 8. "auto": 1."""
    eval_interval: Annotated[int, Field(ge=1, le=1_000_000)] | Literal["auto"] = AUTO
    """Optimizer steps between two evaluations on the validation file.

    "auto": the steps of an epoch, at most 20.
    """
    eval_samples: Annotated[int, Field(ge=1, le=128)] | Literal["auto"] = AUTO
    """Answers to each prompt of the validation file at an evaluation. "auto": 1."""
    reasoning_effort: Literal["default"] = "default"
    """Must be "default": prompts are written by the base's chat template as it is."""
    num_generations: Annotated[int, Field(ge=2, le=128)] | Literal["auto"] = AUTO
    """Answers to each prompt, its group: an answer's advantage is its reward less the group's mean.

    "auto": 8 times compute_multiplier.
    """
    max_completion_length: Annotated[int, Field(ge=1, le=1_048_576)] | Literal["auto"] = AUTO
    """Tokens of an answer at most; a longer one is cut off, and graded as it is.  "auto": half
    of training.max_length, at most 512. Prompts get the rest of training.max_length.
    """
    temperature: Annotated[Number, Field(ge=GREEDY, le=10)] = 1.0
    """Temperature of sampling, and of the log-probabilities that are trained on: logits are divided
    by it in both. Inference servers must tell theirs at it (vLLM: --logprobs-mode
    processed_logprobs), and do so not with beta.
    """
    scale_rewards: Literal["none", "group"] = "none"
    """group: advantages are divided by the standard deviation of the group's rewards, as in
    DeepSeekMath. none: they are not, since that favours prompts that are nearly always, or nearly
    never, answered well (Dr. GRPO).
    """
    loss_type: ReinforcementLoss = "dapo"
    """What a step's loss is the mean over. dapo: all tokens of its answers. grpo: the answers, each
    the mean over its tokens, which favours short good ones. dr_grpo: the answers, each the sum over
    its tokens divided by max_completion_length. gspo: as grpo, with one ratio of probabilities for
    a whole answer, the geometric mean over its tokens, in place of one for each token (arXiv
    2507.18071), clipped to importance_sampling_cap and its inverse.
    """
    importance_sampling_cap: Annotated[Number, Field(ge=1, le=1000)] = 2.0
    """Highest ratio of a token's probability by the trainer to that by the sampler; larger ones are
    cut to it (truncated importance sampling).
    """
    beta: Annotated[Number, Field(ge=0, le=100)] = 0.0
    """Weight of the KL divergence from the model that training starts from, subtracted from each
    token's advantage. 0: off.
    """
    mask_truncated_completions: bool = False
    """Whether answers that were cut off are left out of the loss (DAPO's overlong filtering).

    They stay in the group's mean and in the number of answers that the loss is the mean over; with
    loss_type dapo it is the mean over the other answers' tokens. So it is in TRL.
    """
    steps_ahead: Annotated[int, Field(ge=0, le=1)] = 0
    """1: the answers of a step are sampled while the step before is trained, from weights that are
    one step older.
    """
    keep_rollouts: Annotated[int, Field(ge=2, le=1_000_000)] = 100
    """Steps whose answers stay in the run directory (rollouts/), the newest ones."""
    max_error_share: Annotated[Number, Field(gt=0, le=1)] = 0.5
    """Share of a step's answers without a grade from which the job is paused instead of training on
    the rest.
    """


class ReinforcementMethod(NullableSections):
    grader: Grader | None = None
    """What gives rewards. Only with an environment whose agent or steps give them it may be left
    out.
    """
    environment: Environment | None = None
    """Not in OpenAI's API. Where the model acts for several turns; None: it answers each prompt
    once.
    """
    hyperparameters: ReinforcementHyperparameters = ReinforcementHyperparameters()
    response_format: None = None
    """Must be left out: the sampler draws from all tokens.

    A grader can give answers of another form reward 0.
    """

    @field_validator("response_format", mode="before")
    @classmethod
    def _free_answers(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError(
                "response_format is not available: the sampler draws from all tokens. Leave it "
                "out, and have the grader give "
                "answers of another form reward 0 (`{{ sample.output_json }}` exists for JSON only)"
            )
        return value

    @model_validator(mode="after")
    def _is_rewarded(self) -> ReinforcementMethod:
        if self.grader is None and self.environment is None:
            raise ValueError("grader is required, unless an environment gives the rewards")
        if self.grader is None and isinstance(self.environment, McpEnvironment):
            raise ValueError(
                "grader is required with an environment of type 'mcp': an MCP server gives no rewards"
            )
        if getattr(self.environment, "supervision", "outcome") == "process":
            self._require_rewards_of_calls()
        return self

    def _require_rewards_of_calls(self) -> None:
        """Raises ValueError for what knows rewards of whole rollouts alone."""
        if self.grader is not None:
            raise ValueError(
                "grader is given and environment.supervision = 'process': a grader rewards whole "
                "rollouts. Leave it out, and have the environment reward each call; or leave "
                "supervision out"
            )
        if self.hyperparameters.loss_type == "gspo":
            raise ValueError(
                "hyperparameters.loss_type = 'gspo' with environment.supervision = 'process': gspo "
                "has one advantage for a whole answer. Use dapo, grpo or dr_grpo"
            )


MethodType = Literal[
    "supervised", "dpo", "simpo", "orpo", "kto", "distillation", "reinforcement", "tinker"
]
"""tinker: a job without data files, whose client runs the training loop.

Tinker's wire alone creates it.
"""
OfferedMethod = Literal[
    "supervised", "dpo", "simpo", "orpo", "kto", "distillation", "reinforcement"
]
"""Types that a request may name, each with a section of its own."""
PAIR_METHODS: Sequence[MethodType] = ("dpo", "simpo", "orpo")
"""Types whose data files hold pairs of answers."""
PREFERENCE_METHODS: Sequence[MethodType] = (*PAIR_METHODS, "kto")
"""Types that learn which answers are better."""
ANSWER_METHODS: Sequence[MethodType] = (*PREFERENCE_METHODS, "distillation")
"""Types whose loss is of answers alone."""
_OFFERED = WithJsonSchema({"type": "string", "enum": list(get_args(OfferedMethod))})


class Method(NullableSections):
    """The loss. supervised: cross entropy of the assistant's tokens. dpo: direct preference
    optimisation on pairs of answers. simpo, orpo: losses on pairs that need no reference. kto:
    good answers become likelier than the reference has them, and bad ones less likely, each by its
    label. distillation: a student learns the probabilities of a teacher, which may read a context
    that the student does not.
    reinforcement: the model answers prompts, a grader gives rewards, and answers that are better
    than others to their prompt become likelier.
    """

    type: Annotated[MethodType, _OFFERED] = "supervised"
    supervised: SupervisedMethod = SupervisedMethod()
    dpo: DpoMethod = DpoMethod()
    simpo: SimpoMethod = SimpoMethod()
    orpo: OrpoMethod = OrpoMethod()
    kto: KtoMethod = KtoMethod()
    distillation: DistillationMethod = DistillationMethod()
    reinforcement: ReinforcementMethod | None = None

    @model_validator(mode="after")
    def _own_section_only(self) -> Method:
        for other in get_args(OfferedMethod):
            if (
                other != self.type
                and other in self.model_fields_set
                and getattr(self, other) is not None
            ):
                raise ValueError(
                    f"method.{other} is given and method.type is {self.type!r}: give "
                    f"method.{self.type} instead"
                )
        if self.type == "reinforcement" and self.reinforcement is None:
            raise ValueError(
                "method.type is 'reinforcement': give method.reinforcement with a grader"
            )
        given = self.distillation
        if self.type == "distillation" and given.with_context is None and given.teacher is None:
            raise ValueError(
                "method.type is 'distillation': give method.distillation.teacher, a tuned model or "
                "another base, or method.distillation.with_context, what the teacher reads and the "
                "student does not"
            )
        return self

    @property
    def samples_answers(self) -> bool:
        """Whether answers are sampled to the prompts that its data files hold."""
        by_student = self.type == "distillation" and self.distillation.answers == "student"
        return by_student or self.type == "reinforcement"

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Hyperparameters of the type."""
        if self.reinforcement is not None:
            return self.reinforcement.hyperparameters
        if self.type == "dpo":
            return self.dpo.hyperparameters
        if self.type == "simpo":
            return self.simpo.hyperparameters
        if self.type == "kto":
            return self.kto.hyperparameters
        if self.type == "distillation":
            return self.distillation.hyperparameters
        return (self.orpo if self.type == "orpo" else self.supervised).hyperparameters

    def reinforcement_options(self) -> ReinforcementOptions | None:
        """The resolved options of answers that are sampled. None: the job has a file of them."""
        if self.type == "distillation":
            return self.distillation.sampling()
        if self.reinforcement is None:
            return None
        given = self.reinforcement.hyperparameters
        multiplier = 1.0 if given.compute_multiplier == AUTO else given.compute_multiplier
        group = (
            round(GROUP * multiplier) if given.num_generations == AUTO else given.num_generations
        )
        return ReinforcementOptions(
            grader=self.reinforcement.grader,
            environment=self.reinforcement.environment,
            num_generations=min(128, max(2, group)),
            max_completion_length=None
            if given.max_completion_length == AUTO
            else given.max_completion_length,
            eval_interval=None if given.eval_interval == AUTO else given.eval_interval,
            eval_samples=1 if given.eval_samples == AUTO else given.eval_samples,
            **{name: getattr(given, name) for name in SHARED_OPTIONS},
        )

    def loss_options(self) -> LossOptions | None:
        """The resolved options of its loss. None: cross entropy, or the loss of answers that are
        sampled.
        """
        match self.type:
            case "dpo":
                return self.dpo.hyperparameters.resolved()
            case "simpo":
                return self.simpo.hyperparameters.resolved()
            case "orpo":
                return self.orpo.hyperparameters.resolved()
            case "kto":
                return self.kto.hyperparameters.resolved()
            case "distillation":
                return self.distillation.resolved()
            case _:
                return None


class DpoOptions(Strict):
    """`DpoHyperparameters` resolved for a worker."""

    type: Literal["dpo"] = "dpo"
    beta: Beta
    loss_type: DpoLoss
    label_smoothing: Smoothing = 0.0
    rpo_alpha: Weight | None = None


class SimpoOptions(Strict):
    """`SimpoHyperparameters` resolved for a worker."""

    type: Literal["simpo"] = "simpo"
    beta: Beta
    gamma: float


class OrpoOptions(Strict):
    """`OrpoHyperparameters` resolved for a worker."""

    type: Literal["orpo"] = "orpo"
    beta: Beta


class KtoOptions(Strict):
    """`KtoHyperparameters` resolved for a worker."""

    type: Literal["kto"] = "kto"
    beta: Beta
    loss_type: KtoLoss
    desirable_weight: Weight
    undesirable_weight: Weight


class DistillationOptions(Strict):
    """`DistillationMethod` resolved for a worker."""

    type: Literal["distillation"] = "distillation"
    loss_type: DistillationLoss
    beta: float
    """Read with jsd alone."""
    with_context: str
    """What the teacher reads and the student does not."""
    top_k: int | None = None
    teacher: TeacherRef | None = None
    """None: the base without adapter."""


PairOptions = DpoOptions | SimpoOptions | OrpoOptions
"""Options of a loss on pairs of answers."""
LossOptions = PairOptions | KtoOptions | DistillationOptions
"""Options of a method whose loss is another one than cross entropy, by their `type`."""


GROUP = 8
"""num_generations "auto", as TRL's default."""
SHARED_OPTIONS = (
    *(
        "temperature",
        "scale_rewards",
        "loss_type",
        "importance_sampling_cap",
        "beta",
        "mask_truncated_completions",
    ),
    *("steps_ahead", "keep_rollouts", "max_error_share"),
)
"""Options that are resolved as they are."""


class ReinforcementOptions(Strict):
    """`ReinforcementMethod` resolved; of distillation, how the student's answers are sampled."""

    grader: Grader | None
    environment: Environment | None = None
    num_generations: int
    max_completion_length: int | None
    """None: JobSpec.longest_answer goes by training.max_length."""
    eval_interval: int | None
    """None: the schedule goes by the steps of an epoch."""
    eval_samples: int
    temperature: float
    scale_rewards: Literal["none", "group"]
    loss_type: ReinforcementLoss
    importance_sampling_cap: float
    beta: float
    mask_truncated_completions: bool
    steps_ahead: int
    keep_rollouts: int
    max_error_share: float
