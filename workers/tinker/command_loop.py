"""The loop of a job whose client runs the training loop: the ranks carry out its commands in the
order of their numbers.

    rank 0 waits for command n ─▶ all ranks get it ─▶ all carry it out ─▶ rank 0 writes result n ─▶
    n + 1

The state after each change of the adapter belongs to the number of the command that made it. A
checkpoint holds that number, and never gradients: what came after it is carried out again by the
next attempt, from the same log, and gives the same bits. Results that are there already stay, and
what only reads or saves is not done twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.errors import FtError, SpecError
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.checkpoints import checkpoint_key, complete_checkpoints
from ft_service.rundir.directory import RunDir
from ft_service.rundir.evaluations import MOST_PROBES, MOST_TOKENS
from ft_service.rundir.events import Metrics
from ft_service.spec import DistillationOptions, JobSpec
from ft_service.tinker.commands import (
    TARGETS,
    TEMPERATURE,
    Command,
    CommandLog,
    CommandResult,
)
from ft_service.tinker.loss_calls import Datum, LossCall, LossRequest, write_output
from ft_service.tinker.saved_weights import (
    PROBES,
    SamplerProbes,
    SavedWeights,
    begin_options,
    sampler_key,
    saved_key,
)
from workers.base.rank_objects import from_all, from_first
from workers.job.adamw import AdamOptions
from workers.job.training_state import JobState, learning_rate_at
from workers.model.divergence import DIVERGENCE_SUMS, Likeliest
from workers.output.checkpoint import read_position, take_weights
from workers.output.checkpoint_pruning import keeps_best
from workers.output.checkpoint_saver import Saver
from workers.output.outcome import export_adapter
from workers.output.served_probes import measure
from workers.ranks.runtime import ExportError, TrainingError
from workers.ranks.sharding import reshard
from workers.tinker.attendance import Attendance, pause_after
from workers.tinker.call_pictures import CallPictures
from workers.tinker.loss_batches import loss_and_logprobs, make_loss_batch, share_out
from workers.training.context import TrainingContext, Wait
from workers.training.distillation import Taught, TaughtSums
from workers.training.guards import AdapterWatch
from workers.training.objective import RankShare
from workers.training.teachers import Teacher

SAVE_SECONDS = 60.0
"""Time of work after which a checkpoint is due: what an attempt's end costs is computed again."""
KEEP_RESULT_SECONDS = 3600.0
"""Time for which a client can ask for a result."""
TICK_SECONDS = 0.2
"""How often ranks that wait for a command hear of each other: a collective may not take longer than
the job's limit for it.
"""
MOST_TICK_SECONDS = 2.0
"""The same after they have waited for long."""
LEAST_RATE = 1e-9
"""Learning rate below which fp32 weights may stay as they are."""


@dataclass(frozen=True)
class Order:
    """What rank 0 has decided next."""

    command: Command | None
    """None: to stop."""
    answered: bool = False
    """Whether its result is there."""
    saves: bool = False
    """Whether a checkpoint is due after it."""


@dataclass
class StepSums:
    """What forward_backward has added up since the last optimizer step."""

    data: int = 0
    tokens: int = 0
    weight: float = 0.0
    """Sum of the targets' weights without their signs; of a loss with advantages, number of those
    that are not 0.
    """
    loss: float = 0.0
    seconds: float = 0.0
    drawn: int = 0
    """Tokens that a sampler has drawn, and that count in the loss."""
    gap: float = 0.0
    """Sum over these of how far the trainer's log-probability lies from the sampler's, in nats."""
    distilled: TaughtSums | None = None
    """Of the student's answers."""


@dataclass
class CommandLoop:
    """One attempt of such a job on one rank. All ranks call its methods together."""

    context: TrainingContext
    job: JobState
    saver: Saver
    watch: AdapterWatch
    vocabulary: int
    """Rows of the base's embedding."""
    wait: Wait | None = None
    """None: the job has its ranks to itself."""
    pictures: CallPictures | None = None
    """None: calls may show none."""
    teacher: Teacher = field(default_factory=Teacher)
    """Whom distill asks."""
    newest_sequences: list[Tokens] = field(default_factory=list[Tokens])
    """The first sequences of the newest call, on which the trainer's log-probabilities are compared
    with a sampler's.
    """

    def __post_init__(self) -> None:
        runtime = self.context.runtime
        self._log = CommandLog(runtime.run)
        self._next = self.job.command + 1
        self._sums = StepSums()
        self._saved_at = time.monotonic()
        self._attendance = Attendance(Attempt(runtime.run, runtime.start.attempt))
        self.left_alone: float | None = None
        """Seconds without a sign of the service for which the loop has ended, on rank 0; None: for
        another reason.
        """
        self._reported: Metrics | None = None
        """Metrics of the newest step."""
        self._saved: tuple[int, str] | None = None
        """Newest command of the newest checkpoint of this job's state, and its name."""
        if runtime.start.checkpoint is not None:
            self._saved = self.job.command, runtime.start.checkpoint
        if self._log.has_result(self._next) and not self._log.has(self._next):
            raise TrainingError(
                f"Command {self._next} is gone, and with it the state that came of it: the "
                "checkpoints that held it were lost. "
                "Create the model again, from weights that were saved."
            )

    def run(self) -> tuple[bool, str | None]:
        """Carry out commands until the client has finished, a stop is requested, or the service is
        gone. Returns whether it has finished, and the newest checkpoint, which after a stop is that
        of the state; None: nothing has been changed yet.
        """
        self._answer_loaded()
        while True:
            order = self._next_order()
            if order.command is None:
                return False, self._save() if self.job.step else None
            if order.command.op == "finish":
                if (report := order.command.options.get("report")) is not None:
                    self._report_again(report)
                name = self._save()
                self._answer(order, CommandResult({"type": "unload_model"}))
                return True, name
            self._carry_out(order)
            self._next += 1
            if order.saves and self.job.command == order.command.seq:
                self._save()

    # What comes next

    def _next_order(self) -> Order:
        runtime = self.context.runtime
        self._attendance.wait()
        if self.wait is not None:
            self.wait(self._is_due)
        while not self._stops_or_is_due():
            pass
        if runtime.rank == 0:
            stops = self.context.stop.is_requested
            command = None if stops else self._log.command(self._next)
            self.left_alone = self._attendance.limit if command is None and not stops else None
            timed = runtime.spec.reinforcement is None  # whose commands say when
            due = timed and time.monotonic() - self._saved_at >= SAVE_SECONDS
            order = Order(command, command is not None and self._log.has_result(command.seq), due)
        else:
            order = Order(None)
        return from_first(order, runtime.groups.stop)

    def _stops_or_is_due(self) -> bool:
        """Whether there is something to do, on any rank; looked for during a tick."""
        waited = self._attendance.waited
        until = time.monotonic() + min(max(TICK_SECONDS, waited / 20), MOST_TICK_SECONDS)
        rank = self.context.runtime.rank
        due = self._is_due()
        while rank == 0 and not due and time.monotonic() < until:
            time.sleep(pause_after(waited))
            due = self._is_due()
        if not self._anywhere(due):
            return False
        self.context.stop.agree(requested=self._anywhere(self.context.stop.is_requested))
        return True

    def _is_due(self) -> bool:
        self.context.reporter.heartbeat()
        if self.context.stop.is_requested:
            return True
        return self.context.runtime.rank == 0 and (
            self._log.has(self._next) or self._attendance.is_over
        )

    def _anywhere(self, here: bool) -> bool:
        """Whether something holds on any rank."""
        group = self.context.runtime.groups.stop
        if group is None:
            return here
        flag = torch.tensor([here], dtype=torch.uint8)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag.item())

    # What is done

    def _carry_out(self, order: Order) -> None:
        command = order.command
        assert command is not None
        acts: Mapping[str, Callable[[Order, Command], CommandResult | None]] = {
            "create_model": self._create,
            "forward_backward": self._forward_backward,
            "distill": self._distill,
            "optim_step": self._optim_step,
            "checkpoint": self._checkpoint,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "refused": self._refuse,
        }
        try:
            act = acts.get(command.op)
            if act is None:
                raise SpecError(f"Command {command.seq}: this version knows no {command.op}.")
            result = act(order, command)
        except TrainingError:
            raise
        except FtError as error:  # the client's mistake, the same on all ranks; nothing was changed
            result = CommandResult.failed(error.message)
        if result is not None:
            self._answer(order, result)

    def _answer(self, order: Order, result: CommandResult) -> None:
        assert order.command is not None
        if self.context.runtime.rank == 0 and not order.answered:
            self._log.put_result(order.command.seq, result)

    def _create(self, order: Order, command: Command) -> CommandResult | None:
        load = command.options.get("load")
        if load is not None:
            self._load(command.seq, load)
        return _begun(command)

    def _refuse(self, order: Order, command: Command) -> CommandResult | None:
        return CommandResult.failed(str(command.options.get("error")))

    def _forward_backward(self, order: Order, command: Command) -> CommandResult | None:
        began = time.perf_counter()
        options = self.context.runtime.spec.training
        request = LossRequest.parse(command.body)
        read = None if self.pictures is None else self.pictures.read
        call = request.call(vocabulary=self.vocabulary, longest=options.max_length, read=read)
        if call.forward_only and order.answered:
            return None
        if self.pictures is not None:
            self.pictures.look_at(call.data)
        self.newest_sequences = [_cut(datum) for datum in call.data[:MOST_PROBES]]
        found = self._computed(call, command.options.get(TEMPERATURE, 1.0))
        if not call.forward_only:
            sums = self._sums
            sums.data += len(call.data)
            sums.tokens += sum(len(datum.ids) for datum in call.data)
            sums.weight += math.fsum(_weight(datum.inputs) for datum in call.data)
            sums.loss += math.fsum(loss for loss, _ in found.values())
            if self.context.runtime.rank == 0:  # which has all
                _add_gap(sums, call, found)
            sums.seconds += time.perf_counter() - began
        if self.context.runtime.rank != 0 or order.answered:
            return None
        losses, logprobs = zip(
            *(found[position] for position in range(len(call.data))), strict=True
        )
        return CommandResult({}, write_output(logprobs, {"loss:sum": math.fsum(losses)}))

    def _computed(self, call: LossCall, temperature: float) -> dict[int, tuple[float, np.ndarray]]:
        """The sum of losses and the log-probabilities of each datum, by its position; on rank 0 of
        all, with gradients added up unless the call is forward only.
        """
        runtime = self.context.runtime
        context = self.context
        before = 0 if call.forward_only else self._sums.data
        together = _data_together(runtime.spec)
        read: dict[int, tuple[float, np.ndarray]] = {}
        with torch.set_grad_enabled(not call.forward_only):
            for micro in share_out(len(call.data), before, runtime.world, together):
                own = micro[runtime.rank]
                batch = make_loss_batch(
                    [call.data[position] for position in own],
                    runtime.device,
                    packed=context.limits.packed,
                )
                if not call.forward_only:
                    context.gradients.begin(last=False)
                loss, losses, logprobs = loss_and_logprobs(context.model, batch, call, temperature)
                if not call.forward_only:
                    # Which averaging over the ranks takes back.
                    context.gradients.backward(loss * runtime.world)
                read |= dict(zip(own, zip(losses, logprobs, strict=True), strict=True))
        if call.forward_only:
            reshard(context.model)  # what a forward leaves gathered, only a backward would free
        return {
            position: of_datum
            for own in from_all(read, runtime.groups.stop)
            for position, of_datum in own.items()
        }

    def _distill(self, order: Order, command: Command) -> CommandResult | None:
        """Add the gradients of a student's answers: how far it is from its teacher there."""
        began = time.perf_counter()
        context = self.context
        runtime = context.runtime
        options = runtime.spec.loss
        if not isinstance(options, DistillationOptions):
            raise SpecError(f"Command {command.seq}: the job's method is no distillation.")
        request = LossRequest.parse(command.body)
        call = request.call(vocabulary=self.vocabulary, longest=runtime.spec.training.max_length)
        rows = data = call.data
        told = None
        if runtime.spec.served_teacher is not None:  # behind each answer what its server has said
            rows = data = call.data[::2]
            told = [*map(_told, data, call.data[1::2])]
        elif options.with_context:  # behind each answer the row that its teacher reads
            data = call.data[::2]
        self.newest_sequences = [_cut(datum) for datum in data[:MOST_PROBES]]
        objective = Taught(TokenSet.of(map(_answered, rows)), options, self.teacher, told)
        items = range(len(objective))
        scale = runtime.world / max(1, int(command.options[TARGETS]))
        loss_of = objective.loss_of(items)
        found = torch.zeros(len(DIVERGENCE_SUMS), dtype=torch.float64, device=runtime.device)
        share = RankShare.of(runtime, context.limits)
        for batch in share.batches(objective, items):
            context.gradients.begin(last=False)
            loss, own = loss_of(context.model, batch, scale)
            context.gradients.backward(loss)
            found += own
        sums = self._sums
        sums.data += len(data)
        sums.tokens += sum(len(datum.ids) for datum in rows)
        of_all = np.sum(from_all(found.tolist(), runtime.groups.stop), axis=0)
        read = objective.read(of_all.tolist(), items)
        sums.distilled = read if sums.distilled is None else sums.distilled.plus(read)
        sums.seconds += time.perf_counter() - began
        return CommandResult({"type": "distill"})

    def _optim_step(self, order: Order, command: Command) -> CommandResult | None:
        began = time.perf_counter()
        job = self.job
        context = self.context
        options = command.options
        if options.get("skipped"):
            return self._skip(command)
        rate, clip, adam = self._step_options(options)
        self._reduce()
        for parameter in job.parameters.values():
            if parameter.grad is None:  # the moments go on where there was no forward_backward
                parameter.grad = torch.zeros_like(parameter)
        norm = float(job.update(rate, clip, adam))
        job.command = command.seq
        sums = self._sums
        self._sums = StepSums()
        if not math.isfinite(norm):
            job.updates -= 1
            raise SpecError(
                "The gradient was not a finite number, so that the step changed nothing and the "
                "gradient is dropped. Look at "
                "the losses since the last step: at advantages, and at log-probabilities that are "
                "far from the model's."
            )
        self.watch.after_step(rate if norm > 0 and rate >= LEAST_RATE else 0.0)
        job.trained_tokens += sums.tokens
        seconds = sums.seconds + time.perf_counter() - began
        self._reported = self._metrics(sums, rate, norm, seconds, options.get("report"))
        context.reporter.metrics(self._reported)
        return CommandResult(
            {"metrics": {"grad_norm:mean": norm, "learning_rate:mean": rate}, "type": "optim_step"}
        )

    def _step_options(self, options: Mapping[str, Any]) -> tuple[float, float, AdamOptions | None]:
        """Learning rate, clip and AdamW's options of a step: the command's, or by the job's
        schedule.
        """
        training = self.context.runtime.spec.training
        if (total := options.get("scheduled")) is not None:
            return (
                learning_rate_at(self.job.step, int(total), training),
                training.max_grad_norm,
                None,
            )
        adam = AdamOptions(
            float(options["weight_decay"]),
            float(options["beta1"]),
            float(options["beta2"]),
            float(options["eps"]),
        )
        return float(options["learning_rate"]), float(options["grad_clip_norm"]), adam

    def _skip(self, command: Command) -> CommandResult:
        """Count a step that has nothing to learn: neither weights nor moments change."""
        self.job.step += 1
        self.job.command = command.seq
        self._sums = StepSums()
        self._reported = self._metrics(report=command.options.get("report"))
        self.context.reporter.metrics(self._reported)
        return CommandResult({"metrics": {}, "type": "optim_step"})

    def _report_again(self, report: Mapping[str, Any]) -> None:
        """Report the last step again, with what was measured behind it."""
        last = self._reported
        if last is None or last.step != self.job.step:
            last = self._metrics(report=report)
        self.context.reporter.metrics(
            last.model_copy(update={"more": {**(last.more or {}), **report.get("more", {})}})
        )

    def _checkpoint(self, order: Order, command: Command) -> CommandResult | None:
        """Write a checkpoint, if it is due or the best so far.

        `criterion`: what checkpoints are compared by.
        """
        valid = command.options.get("criterion")
        job = self.job
        if valid is not None and job.validations.last_step != job.step:
            job.validations = job.validations.after(job.step, float(valid), 0.0)
            # A checkpoint of this step is that of a pause, and lacks the criterion. An earlier
            # attempt wrote it: one that goes on writes none of a step before its validation, so
            # that the new one's name is free.
            self._saved = None
        is_best = (
            valid is not None
            and keeps_best(self.context.runtime.spec)
            and job.validations.best_step == job.step
        )
        if command.options.get("saves") or is_best:
            self._save()
        return CommandResult({"type": "checkpoint"})

    def _reduce(self) -> None:
        """Add up over the ranks the gradients since the last optimizer step."""
        context = self.context
        if (
            context.gradients.reduces_in_backward
        ):  # which no micro-batch was the last of: an empty one is
            context.gradients.begin(last=True)
            empty = make_loss_batch([], context.runtime.device, packed=context.limits.packed)
            loss, _, _ = loss_and_logprobs(context.model, empty, _NO_CALL)
            context.gradients.backward(loss)
        context.gradients.reduce()

    def _metrics(
        self,
        sums: StepSums | None = None,
        rate: float | None = None,
        norm: float | None = None,
        seconds: float = 0.0,
        report: Mapping[str, Any] | None = None,
    ) -> Metrics:
        """`report`: what the commands say of the step besides."""
        sums = sums or StepSums()
        report = report or {}
        taught = sums.distilled
        more = {
            **({} if taught is None else taught.more),
            **({"sampler/logprob_gap": sums.gap / sums.drawn} if sums.drawn else {}),
            **report.get("more", {}),
        }
        # The loss of reinforcement learning says nothing: its advantages sum up to 0, and only its
        # gradient counts.
        has_loss = (
            self.context.runtime.spec.reinforcement is None
            and sums.weight
            and math.isfinite(sums.loss)
        )
        return Metrics(
            step=self.job.step,
            total_steps=int(report.get("total_steps", self.job.step)),
            epoch=report.get("epoch"),
            more=more or None,
            train_loss=taught.mean_loss
            if taught is not None
            else (sums.loss / sums.weight if has_loss else None),
            learning_rate=rate,
            grad_norm=norm,
            tokens=sums.tokens or None,
            trained_tokens=self.job.trained_tokens,
            step_seconds=seconds or None,
        )

    def _load_weights(self, order: Order, command: Command) -> CommandResult | None:
        self._load(command.seq, command.options)
        return _begun(command)

    def _load(self, seq: int, options: Mapping[str, Any]) -> None:
        source = RunDir(options["run_dir"])
        take_weights(
            self.job, source, options["checkpoint"], with_optimizer=bool(options["optimizer"])
        )
        if self._sums.data:
            self._reduce()
            for parameter in self.job.parameters.values():
                parameter.grad = None
            self._sums = StepSums()
        self.job.command = seq
        self.job.step += 1
        self._save()  # at once: what it was loaded from may be deleted

    def _answer_loaded(self) -> None:
        """Answer the command of the checkpoint with which this attempt begins, if the last one
        ended just before.
        """
        if (
            self.context.runtime.rank != 0
            or self.job.command < 0
            or self._log.has_result(self.job.command)
        ):
            return
        command = self._log.command(self.job.command)
        if command is not None and command.op in ("create_model", "load_weights"):
            self._log.put_result(command.seq, _begun(command))

    # What is saved

    def _save(self) -> str:
        """Write a complete checkpoint of the job's state without gradients unless there is one.

        Returns its name.
        """
        job = self.job
        runtime = self.context.runtime
        if self._saved is None or self._saved[0] != job.command:
            reported = self._reported
            metrics = (
                reported if reported is not None and reported.step == job.step else self._metrics()
            )
            self._saved = job.command, self.saver.save_last(job, metrics)
            self._saved_at = time.monotonic()
            if runtime.rank == 0:
                self._prune()
        return self._saved[1]

    def _prune(self) -> None:
        """Remove the commands that no checkpoint needs to which an attempt may go back."""
        run = self.context.runtime.run
        names = complete_checkpoints(run)[-2:]
        if names:
            # The one that is carried out now has no result yet, and its client asks for it.
            done = self._next - 1
            self._log.prune(
                min(read_position(run, names[0]).command, done), time.time() - KEEP_RESULT_SECONDS
            )

    def _save_weights(self, order: Order, command: Command) -> CommandResult | None:
        if order.answered:
            return None
        run = self.context.runtime.run
        name = command.options["name"]
        before = from_first(run.readable(saved_key(name), SavedWeights))
        if (
            before is not None
            and before.command != command.seq
            and not command.options.get("overwrite")
        ):
            raise SpecError(
                f"path = {name!r}: there are saved weights of this name. Take another one, or "
                "overwrite = True."
            )
        checkpoint = self._save()
        if self.context.runtime.rank == 0:
            folder = run.path(checkpoint_key(checkpoint))
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            self.context.runtime.fence.check()
            begin_options(run, f"weights/{name}", command.options)
            saved = SavedWeights(
                name=name,
                checkpoint=checkpoint,
                step=self.job.step,
                command=command.seq,
                created_at=time.time(),
                bytes=size,
            )
            run.write(saved_key(name), saved)
        return CommandResult({"path": command.options["path"], "type": "save_weights"})

    def _save_for_sampler(self, order: Order, command: Command) -> CommandResult | None:
        if order.answered:
            return None
        context = self.context
        name = command.options["name"]
        key = sampler_key(name)
        before = from_first(context.runtime.run.readable(f"{key}/{PROBES}", SamplerProbes))
        if before is not None and before.command != command.seq:
            raise SpecError(
                f"path = {name!r}: there are weights to sample from of this name. Take another one."
            )
        probes = measure(context.model, self.newest_sequences, context.runtime.device)
        context.model.train()
        stored = SamplerProbes(command=command.seq, probes=probes)
        target = context.runtime.run.path(key)
        config = context.model.peft_config["default"]
        try:
            with export_adapter(target, self.job, config, context.runtime) as folder:
                if folder is not None:
                    begin_options(context.runtime.run, key, command.options)
                    (folder / PROBES).write_text(stored.model_dump_json(), encoding="utf-8")
        except ExportError as error:
            return CommandResult.failed(str(error), by_user=False)
        own = command.options.get("sampling_session_id")
        answer = {"path": command.options["path"]} if own is None else {"sampling_session_id": own}
        return CommandResult({**answer, "type": "save_weights_for_sampler"})


def _data_together(spec: JobSpec) -> int:
    """Most data of a micro-batch.

    Where a client decides, one: so that a call of eight data computes what two of four do.
    """
    training = spec.training
    if training.per_device_train_batch_size is not None:
        return training.per_device_train_batch_size
    budget = training.tokens_per_micro_batch
    if spec.reinforcement is None or isinstance(budget, str):
        return 1
    return max(1, budget // training.max_length)


_NO_CALL = LossCall("cross_entropy", {}, [], forward_only=False)


def _begun(command: Command) -> CommandResult:
    """The result of a command that creates a model, loads weights into one, or creates one that
    begins with saved weights.
    """
    options = command.options
    model = {} if command.op == "load_weights" else {"model_id": options.get("model_id")}
    load = options if command.op == "load_weights" else options.get("load")
    kind = (
        {"type": "create_model"} if load is None else {"type": "load_weights", "path": load["path"]}
    )
    return CommandResult({**model, **kind})


def _add_gap(sums: StepSums, call: LossCall, read: Mapping[int, tuple[float, np.ndarray]]) -> None:
    """Add how far the log-probabilities of drawn tokens lie from the sampler's."""
    for position, datum in enumerate(call.data):
        if "logprobs" in datum.inputs:
            drawn = datum.inputs["advantages"] != 0
            sums.drawn += int(np.count_nonzero(drawn))
            sums.gap += float(
                np.abs(read[position][1] - datum.inputs["logprobs"])[drawn].sum(dtype=np.float64)
            )


def _cut(datum: Datum) -> Tokens:
    ids = datum.ids.astype(np.int32)
    return Tokens(ids, np.zeros(len(ids), dtype=bool), images=datum.images).cut(MOST_TOKENS)


def _answered(datum: Datum) -> Tokens:
    """A row of a student's answer, of which the tokens with a weight are targets."""
    ids = np.concatenate([datum.ids[:1], datum.targets]).astype(np.int32)
    return Tokens(ids, np.concatenate([[False], datum.inputs["weights"] > 0]))


def _told(answer: Datum, said: Datum) -> Likeliest:
    """What a teacher thinks of the tokens of an answer's row: its likeliest words, and last the
    token itself, with their log-probabilities as weights.
    """
    places = answer.inputs["weights"] > 0
    words = torch.from_numpy(said.targets[places])
    logs = torch.from_numpy(said.inputs["weights"][places])
    return Likeliest.of_told(words[:, :-1], logs[:, :-1], logs[:, -1].clone())


def _weight(inputs: Mapping[str, np.ndarray]) -> float:
    """What a datum's loss is divided by, with that of the step's others, for a loss in nats a
    token: a client may give each sequence weights that add up to 1.
    """
    if "weights" in inputs:
        return float(np.abs(inputs["weights"]).sum(dtype=np.float64))
    return float(np.count_nonzero(inputs["advantages"]))
