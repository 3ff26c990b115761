"""A job and its evaluations on the wire. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from api.wire.views import EnergyView, MoneyView, Seconds, View, money_view, whole_seconds
from ft_service.jobs.forecast import QueuePosition
from ft_service.jobs.states import Job, Phase, State
from ft_service.money import amount
from ft_service.reinforcement.step_texts import PromptTexts, StepTexts, TrajectoryTexts
from ft_service.rundir.evaluations import (
    EvaluatedPrompt,
    Evaluation,
    Forgetting,
    ServedQuality,
    Suites,
    SuiteTask,
)
from ft_service.rundir.events import Metrics
from ft_service.spec import (
    LEARNING_RATES,
    DistillationOptions,
    Integration,
    JobSpec,
    MethodType,
    Strict,
)
from ft_service.spec.methods import GROUP
from ft_service.spec.option_types import Number

_JOB_FIELDS = (
    "id",
    "created_at",
    "name",
    "note",
    "finished_at",
    "trained_tokens",
    "attempt",
    "priority",
    "max_seconds",
    "engine_id",
)
_REQUEST_FIELDS = ("training_file", "validation_file", "metadata", "suffix", "serve")
_SECTIONS = ("lora", "precision", "training", "distributed", "checkpoint")


class ResumeRanks(Strict):
    nproc_per_node: Annotated[int, Field(ge=1, le=64)]


class ResumeBody(Strict):
    """Changes to a paused job. Not in OpenAI's API."""

    distributed: ResumeRanks | None = None
    """A new number of ranks per node; the job trains on the same samples in the same order."""
    max_cost: Annotated[Number, Field(gt=0, le=1_000_000_000)] | None = None
    """A new limit of what the job may cost; also for one that runs."""


class JobUpdate(Strict):
    """What a job is called by its users. What is left out stays as it is. Not in OpenAI's API."""

    name: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """Shown in place of the suffix, by which its tuned model stays named; null: none."""
    note: Annotated[str, Field(min_length=1, max_length=2000)] | None = None
    """null: none."""


class HyperparametersView(View):
    """Hyperparameters as resolved, without "auto"."""

    n_epochs: int | None
    """null: training.max_steps decides instead."""
    batch_size: int
    learning_rate_multiplier: float


class DpoHyperparametersView(HyperparametersView):
    """Hyperparameters of direct preference optimisation; learning_rate_multiplier refers to its own
    default rate.
    """

    beta: float
    loss_type: str
    label_smoothing: float
    rpo_alpha: float | None


class SimpoHyperparametersView(HyperparametersView):
    """Hyperparameters of SimPO; its default rate is that of dpo."""

    beta: float
    gamma: float


class OrpoHyperparametersView(HyperparametersView):
    """Hyperparameters of ORPO; learning_rate_multiplier refers to its own default rate."""

    beta: float


class KtoHyperparametersView(HyperparametersView):
    """Hyperparameters of KTO; its default rate is that of dpo."""

    beta: float
    loss_type: str
    desirable_weight: float
    undesirable_weight: float


class DistillationHyperparametersView(HyperparametersView):
    """Hyperparameters of distillation; beta is read with jsd alone, the last three where the
    student answers.
    """

    loss_type: str
    beta: float
    num_generations: int | None = None
    max_completion_length: int | None = None
    temperature: float | None = None


class SupervisedView(View):
    hyperparameters: HyperparametersView


class DpoView(View):
    hyperparameters: DpoHyperparametersView


class SimpoView(View):
    hyperparameters: SimpoHyperparametersView


class OrpoView(View):
    hyperparameters: OrpoHyperparametersView


class KtoView(View):
    hyperparameters: KtoHyperparametersView


class DistillationView(View):
    hyperparameters: DistillationHyperparametersView
    teacher: str
    """A tuned model, or a base; the job's own: the base without adapter."""
    teacher_at: Literal["ranks", "server"] = "ranks"
    with_context: str | None
    answers: Literal["data", "student"] = "data"
    top_k: int | None = None


class ReinforcementHyperparametersView(HyperparametersView):
    """OpenAI's, and ours (docs/reinforcement.md)."""

    compute_multiplier: float
    eval_interval: int | Literal["auto"]
    eval_samples: int
    reasoning_effort: Literal["default"] = "default"
    num_generations: int
    max_completion_length: int
    temperature: float
    scale_rewards: str
    loss_type: str
    importance_sampling_cap: float
    beta: float
    mask_truncated_completions: bool
    steps_ahead: int
    keep_rollouts: int
    max_error_share: float


class ReinforcementView(View):
    grader: dict[str, Any] | None
    """null: the environment's agent gives the rewards."""
    environment: dict[str, Any] | None
    """Not in OpenAI's API. null: each prompt is answered once."""
    hyperparameters: ReinforcementHyperparametersView


class MethodView(View):
    type: MethodType = "supervised"
    supervised: SupervisedView | None = None
    dpo: DpoView | None = None
    simpo: SimpoView | None = None
    orpo: OrpoView | None = None
    kto: KtoView | None = None
    distillation: DistillationView | None = None
    reinforcement: ReinforcementView | None = None


class JobErrorView(View):
    code: str
    message: str
    param: str | None


class ProgressView(View):
    """The newest numbers that training reported; `valid_loss` is that of the last validation.

    `train_mean_reward`: of reinforcement learning.
    """

    step: int
    total_steps: int
    epoch: float | None
    train_loss: float | None
    valid_loss: float | None
    learning_rate: float | None
    grad_norm: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    trained_tokens: int | None
    train_mean_reward: float | None


class QueueView(View):
    """The place of a waiting job."""

    position: int
    """1: no other waiting job is expected to start before it."""
    reason: str
    """Why it does not run yet."""
    estimated_start: Seconds | None
    """Seconds since the epoch, estimated from the durations of jobs here; null: not known yet."""
    share: float
    """Its project's share, from 0 to 1, of the recent use of all projects (with a half-life of
    three days). Of jobs with the same priority, those of the project with the smaller share start
    first.
    """


class MembershipView(View):
    """A job's part in a sweep."""

    id: str
    values: dict[str, Any]
    """The options that this job has of its own: dotted name → value."""
    stopped: str | None
    """Why the sweep stopped it; null: the sweep did not."""


class ForgettingView(View):
    """What the tuned model has lost of what its base knew, compared with the base alone."""

    tokens: int
    """Tokens of the general text."""
    base_perplexity: float | None
    perplexity: float | None
    """Perplexity on the general text, as tuned; null: left out."""
    answer_tokens: int
    """Tokens of the base's own answers to general prompts."""
    divergence: float | None
    """Mean KL(base || tuned) of the next token over these answers, in nats; null: left out."""
    agreement: float | None
    """Share of these tokens that are the tuned model's likeliest too."""
    seconds: float
    """Time that measuring took."""
    left_out: str | None
    """What was not measured, and why."""
    warnings: list[str]
    """A sentence for each figure beyond its threshold."""


class SuitesBody(Suites, Strict):
    """Results of tasks, by name; newer ones replace those of the same name."""


class JobView(View):
    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: Seconds
    error: JobErrorView | None
    fine_tuned_model: str | None
    """Name of the tuned model, once the job has succeeded."""
    finished_at: Seconds | None
    hyperparameters: HyperparametersView
    model: str
    """The base, or the tuned model that the job continues."""
    organization_id: str
    result_files: list[str]
    seed: int
    status: str
    trained_tokens: int | None
    training_file: str | None
    """null: the job's client runs the training loop and sends the data."""
    validation_file: str | None
    validation_split: float | None
    """Share of the training file's samples that is held out for validation."""
    estimated_finish: Seconds | None
    integrations: list[Integration]
    metadata: dict[str, str] | None
    method: MethodView

    phase: str | None
    """While running: launching, training or stopping; while cancelled: stopping, until the
    processes are gone.
    """
    reason: str | None
    """Why the job is in its final state, or why its last attempt ended."""
    attempt: int
    """Runs of the workers so far; 0: none yet."""
    progress: ProgressView | None
    pending_reason: str | None
    """Why a job does not start although its turn has come, or why its state is not known now; null:
    it waits for its turn, or runs.
    """
    queue: QueueView | None
    """Set while the job is queued."""
    suffix: str | None
    name: str | None
    """How its users call it; null: by its suffix."""
    note: str | None
    """What its users have noted about it."""
    data: dict[str, str | bool | int]
    """Column of the format → its name in the data files, and what else of `data` is not at its
    default; empty: the files use the format's names.
    """
    chat_template: str | None
    """The text of the chat template that replaces the base's; null: the base's is used."""
    chat_template_kwargs: dict[str, Any]
    """The variables that the chat template's text sets; empty: none."""
    serve: str | None
    """The inference server that the adapter is made for; null: not named."""
    priority: int
    max_seconds: int | None
    max_cost: float | None
    """What it may cost, in the currency of `cost`; null: no limit."""
    cost: MoneyView | None
    """What its slots have cost until now: slot-seconds times the price of a slot-hour when each
    attempt began; in an engine its share of them. null: they have no price.
    """
    planned_cost: MoneyView | None
    """The same of the planned training, by the price when it was created or last started; null: not
    known.
    """
    energy: EnergyView | None
    """What its attempts have taken, up to the last checkpoint or their end; null: not measured."""
    lora: dict[str, Any]
    precision: dict[str, Any]
    training: dict[str, Any]
    distributed: dict[str, Any]
    checkpoint: dict[str, Any]
    evaluation: dict[str, Any] | None
    chosen: dict[str, str]
    """Option that was "auto" → the reason for its value."""
    engine: Literal["auto", "off"]
    """Whether it may be trained in an engine."""
    engine_id: str | None
    """The engine that trains it beside other jobs on its base; null: it does not run, or has ranks
    of its own.
    """
    sweep: MembershipView | None
    """Its sweep; null: it belongs to none."""
    forgetting: ForgettingView | None
    """Whether the model forgets, once the job has succeeded; null: not measured."""
    suites: dict[str, SuiteTask]
    """Task of `ft eval --suite` → accuracies of the base and of the tuned model."""


class AnsweredView(View):
    prompt: str
    """The whole input of the model, as text."""
    messages: list[dict[str, Any]] | None
    """The prompt as a conversation; null: it is plain text, or only its tokens are known."""
    reference: str | None
    """The expected answer; null: not known."""
    base: str
    """The answer of the model before training."""
    tuned: str | None
    """The answer at this step; null at step 0."""
    scores: dict[str, float]
    """Scores of `tuned`, at step 0 of `base`: name of the metric → score."""
    base_scores: dict[str, float]
    served: dict[str, str]
    """Way of serving the adapter (adapter_on_bf16_base, merged) → answer, where that was
    compared.
    """


class ServedView(View):
    """Quality of the adapter for each way of serving it: as_trained, adapter_on_bf16_base,
    merged.
    """

    loss: dict[str, float]
    """Validation loss."""
    samples: int
    """Samples of the validation file, the same for each way."""
    bound: float
    """The largest increase over as_trained that rounding explains."""
    beyond: list[str]
    """The ways whose loss increased by more."""
    metrics: dict[str, dict[str, float]]


class EvaluationView(View):
    id: str
    object: Literal["fine_tuning.job.evaluation"] = "fine_tuning.job.evaluation"
    created_at: Seconds
    step: int
    """0: before training."""
    metrics: dict[str, float]
    """Means over the samples."""
    base_metrics: dict[str, float]
    samples: list[AnsweredView]
    served: ServedView | None
    """Set at the step of the job's adapter, where serving was compared."""


class GradedAnswerView(View):
    text: str
    """Cut after 16,384 characters."""
    tool_calls: list[dict[str, Any]]
    """Name and arguments of each call that the model has written."""
    tokens: int
    truncated: bool
    """Whether it was cut off at its longest length."""
    reward: float | None
    """null: the grader has failed."""
    errors: dict[str, str]
    """Kind of the grader's error → what happened."""
    scores: dict[str, float]
    """Name → score of each single grader."""
    trajectory: TrajectoryView | None
    """null: the job has no environment."""


class RowTextView(View):
    """A part of a row that is trained on, with special tokens."""

    text: str
    learned: bool
    """Whether the model has answered it, so that it is learned."""


class TrajectoryView(View):
    """A rollout with an environment."""

    messages: list[dict[str, Any]]
    """The conversation of the last call with its answer, as the agent has sent it: its beginning
    and its last message, up to 65,536 characters.
    """
    calls: list[dict[str, Any]]
    """finish_reason, prompt_tokens and completion_tokens of each call of the model."""
    rewards: list[float]
    """With environment.supervision = process: the reward of each call; else empty."""
    turns: int
    rows: int
    """Rows that are trained on: 1 unless the agent, or the chat template, has written its history
    anew.
    """
    row_texts: list[list[RowTextView]]
    """Of each row its parts, up to 65,536 characters in all; empty where they were not kept."""
    rewritten: int
    """Calls behind the first that began another row."""
    refused: dict[str, int]
    """Code → refused calls."""
    seconds: float


class GradedPromptView(View):
    prompt: int
    """Its number in the file, from 0."""
    text: str
    """Its last message."""
    answers: list[GradedAnswerView]


class RolloutView(View):
    """The answers that were sampled and graded for a step."""

    id: str
    object: Literal["fine_tuning.job.rollout"] = "fine_tuning.job.rollout"
    created_at: Seconds
    step: int
    """The optimizer step that was trained on them; behind the last one, those of the end."""
    sampled_from: int
    """Number of steps after which the weights were saved that they were sampled from."""
    mean_reward: float | None
    valid_mean_reward: float | None
    """Of the weights after step - 1; null: not evaluated here."""
    prompts: list[GradedPromptView]
    """The first of the step's prompts: as many as asked for, at most 100, and of long texts those
    of the first 4 MiB.
    """
    prompts_total: int
    validation: list[GradedPromptView]
    """The first prompts of the validation file."""
    validation_total: int


def rollout_view(job_id: str, texts: StepTexts) -> RolloutView:
    head = texts.head
    return RolloutView.of(
        texts,
        id=rollout_id(job_id, head.step),
        created_at=int(head.time),
        step=head.step,
        sampled_from=head.sampled_from,
        prompts=[_graded_prompt(own) for own in texts.prompts],
        validation=[_graded_prompt(own) for own in texts.validation],
    )


def rollout_id(job_id: str, step: int) -> str:
    return f"{job_id}:rollout-{step}"


def _trajectory(way: TrajectoryTexts) -> TrajectoryView:
    texts = [
        [RowTextView(text=text, learned=learned) for text, learned in row] for row in way.row_texts
    ]
    return TrajectoryView.of(way, turns=len(way.calls), row_texts=texts)


def _graded_prompt(own: PromptTexts) -> GradedPromptView:
    answers = [
        GradedAnswerView.of(
            answer,
            tool_calls=[dict(call) for call in answer.calls],
            trajectory=None if (way := answer.trajectory) is None else _trajectory(way),
        )
        for answer in own.answers
    ]
    return GradedPromptView(prompt=own.prompt, text=own.text, answers=answers)


@dataclass(frozen=True)
class LiveProgress:
    """What the service knows of a job's progress besides its record."""

    metrics: Metrics | None = None
    """The newest metrics."""
    valid_loss: float | None = None
    """The last validation's loss."""
    ends_at: float | None = None
    """The likely end, in seconds since the epoch."""
    place: QueuePosition | None = None
    """Its place in the queue."""
    forgetting: Forgetting | None = None
    """What was measured at its end."""
    suites: Suites | None = None
    """What lm-eval has measured since."""
    cost: int | None = None
    """What it has cost until now (ft_service/control/jobs/costs.py); None: no attempt of it
    runs.
    """


def job_view(job: Job, organization: str, known: LiveProgress = LiveProgress()) -> JobView:
    spec = job.known_spec
    hyperparameters = _hyperparameters(spec)
    return JobView(
        **{name: getattr(job, name) for name in _JOB_FIELDS},
        **{name: job.request.get(name) for name in _REQUEST_FIELDS},
        **{name: getattr(spec, name).model_dump() for name in _SECTIONS},
        error=JobErrorView.model_validate(job.error) if job.error else None,
        fine_tuned_model=spec.tuned_name if job.state is State.SUCCEEDED else None,
        hyperparameters=hyperparameters,
        model=spec.parent.name if spec.parent else spec.model.name,
        organization_id=organization,
        result_files=[job.result_file] if job.result_file else [],
        seed=spec.seed,
        status=status_text(job),
        validation_split=spec.validation_split,
        estimated_finish=whole_seconds(known.ends_at),
        integrations=[
            Integration.model_validate(given) for given in job.request.get("integrations") or ()
        ],
        method=_method(spec, hyperparameters),
        max_cost=None if job.max_cost is None else amount(job.max_cost),
        cost=money_view(job.cost if known.cost is None else known.cost, job.currency),
        planned_cost=money_view(job.planned_cost, job.currency),
        energy=energy_view(job),
        phase=job.phase.value if job.phase else None,
        reason=job.reason.value if job.reason else None,
        progress=_progress(known.metrics, known.valid_loss) if known.metrics else None,
        pending_reason=job.pending
        if job.state in (State.VALIDATING, State.QUEUED, State.RUNNING)
        else None,
        queue=_queue(known.place) if known.place and job.state is State.QUEUED else None,
        data=spec.data.model_dump(exclude_defaults=True),
        chat_template=spec.chat_template or None,
        chat_template_kwargs=dict(spec.chat_template_kwargs),
        evaluation={**spec.evaluation.model_dump(), "prompts": spec.evaluation.count}
        if spec.evaluation
        else None,
        chosen=spec.chosen,
        engine=spec.engine,
        sweep=_membership(job),
        forgetting=_forgetting(known.forgetting) if known.forgetting else None,
        suites=dict(known.suites.tasks) if known.suites else {},
    )


def energy_view(job: Job) -> EnergyView | None:
    """Return the energy of a job; None: it was not measured."""
    return None if job.joules is None else EnergyView.of(job)


def status_text(job: Job) -> str:
    """Return the `status` of a job; one that waits for its slots again is shown as queued."""
    return State.QUEUED.value if job.phase is Phase.WAITING else job.state.value


def _forgetting(found: Forgetting) -> ForgettingView:
    return ForgettingView(**found.model_dump(exclude={"step"}), warnings=found.warnings)


def _membership(job: Job) -> MembershipView | None:
    if job.sweep_id is None:
        return None
    return MembershipView(id=job.sweep_id, values=job.sweep_values or {}, stopped=job.stopped)


def _method(spec: JobSpec, hyperparameters: HyperparametersView) -> MethodView:
    if spec.training_data is None:
        return MethodView(type="tinker")
    options = spec.reinforcement
    if options is not None and spec.sampled_for == "rewards":
        outside = options.model_dump(
            mode="json", include={"grader", "environment"}, exclude_none=True
        )
        given = options.model_dump(exclude={"grader", "environment", "max_completion_length"})
        more = {
            "compute_multiplier": options.num_generations / GROUP,
            "max_completion_length": spec.longest_answer,
        }
        given["eval_interval"] = given["eval_interval"] or "auto"
        values = ReinforcementHyperparametersView(**hyperparameters.model_dump(), **given, **more)
        return MethodView(
            type="reinforcement",
            reinforcement=ReinforcementView(
                grader=outside.get("grader"),
                environment=outside.get("environment"),
                hyperparameters=values,
            ),
        )
    if (loss := spec.loss) is None:
        return MethodView(supervised=SupervisedView(hyperparameters=hyperparameters))
    outer = {"type", "with_context", "teacher", "top_k"}
    values = {**hyperparameters.model_dump(), **loss.model_dump(exclude=outer)}
    section: dict[str, Any] = {"hyperparameters": values}
    if isinstance(loss, DistillationOptions):
        section |= {
            "teacher": loss.teacher.name if loss.teacher else spec.model.name,
            "teacher_at": "ranks" if spec.served_teacher is None else "server",
            "with_context": loss.with_context or None,
            "top_k": loss.top_k,
        }
        if options is not None:
            section["answers"] = "student"
            values |= {
                "num_generations": options.num_generations,
                "max_completion_length": spec.longest_answer,
                "temperature": options.temperature,
            }
    return MethodView.model_validate({"type": loss.type, loss.type: section})


def _hyperparameters(spec: JobSpec) -> HyperparametersView:
    training = spec.training
    unit = LEARNING_RATES[spec.method]
    return HyperparametersView(
        n_epochs=training.epochs if training.max_steps is None else None,
        batch_size=training.batch,
        # The number that the user wrote: quotients such as 1e-4 / 2e-4 carry the noise of two
        # roundings.
        learning_rate_multiplier=float(f"{training.rate / unit:.12g}"),
    )


def _progress(metrics: Metrics, valid_loss: float | None) -> ProgressView:
    speed = (
        metrics.tokens / metrics.step_seconds if metrics.tokens and metrics.step_seconds else None
    )
    known = metrics.model_dump(include=set(ProgressView.model_fields))
    reward = (metrics.more or {}).get("train_mean_reward")
    more = {"tokens_per_second": speed, "valid_loss": valid_loss, "train_mean_reward": reward}
    return ProgressView(**{**known, **more})


def _queue(place: QueuePosition) -> QueueView:
    forecast = place.forecast
    return QueueView(
        position=forecast.position,
        reason=forecast.reason,
        estimated_start=whole_seconds(forecast.starts_at),
        share=round(place.share, 4),
    )


def evaluation_id(job_id: str, step: int) -> str:
    return f"{job_id.replace('ftjob', 'fteval', 1)}-{step}"


def evaluation_view(
    job_id: str, evaluation: Evaluation, served: ServedQuality | None
) -> EvaluationView:
    """Return the view of an evaluation.

    `served`: the quality of the job's adapter, which is that of one step.
    """
    own = served if served is not None and served.step == evaluation.step else None
    return EvaluationView.of(
        evaluation,
        id=evaluation_id(job_id, evaluation.step),
        created_at=evaluation.time,
        samples=[
            _answered(sample, number, own) for number, sample in enumerate(evaluation.samples)
        ],
        served=ServedView(**own.model_dump(exclude={"step", "answers"}), beyond=own.beyond)
        if own is not None
        else None,
    )


def _answered(sample: EvaluatedPrompt, number: int, served: ServedQuality | None) -> AnsweredView:
    answers = served.answers if served else {}
    own = {way: texts[number] for way, texts in answers.items() if number < len(texts)}
    return AnsweredView(**sample.model_dump(), served=own)
