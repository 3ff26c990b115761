"""The loss, or the targets' log-probabilities, inside the output head: a few tokens' logits at a
time, and only of tokens that have a target.

The logits of all tokens and their gradient would be the largest tensors of a step, 12 bytes per
token and word. But the gradients of the head's input, and of its weights if they are trained
(`lora.modules_to_save`), are known as soon as a token's logits are. So a chunk's logits are made,
turned into these and thrown away; only [targets, hidden] stays, and fp32 sums in the shape of what
is trained.

The same holds for log-probabilities of which the loss is taken outside: a token's changes nothing
but its own, so that its gradient is kept as it is for a loss that grows as it does, and scaled once
the true one is known. Weights add up all tokens, so that with trained ones the backward makes the
logits again.

The model runs as usual, so that FSDP2's hooks see what they expect; the head returns the loss in
place of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ft_service.kernel_limits import chunk_rows
from workers.model.divergence import (
    DIVERGENCE_SUMS,
    Divergence,
    Likeliest,
    divergence_gradient,
    divergence_sums,
)
from workers.model.multimodal import text_decoder
from workers.patches.head_forward import CAP, head_replaced
from workers.quant import gpu_kernels

_IN_CHUNKS = "_ft_loss_in_chunks"


@dataclass
class Losses:
    """Sums over all targets of a micro-batch; scalars."""

    loss: Tensor
    """Sum of cross entropies in nats, fp32."""
    correct: Tensor
    """Targets that were the most likely token, fp64."""


def works_in_chunks(model: PreTrainedModel) -> bool:
    """Whether the loss is taken inside the model's head, as `set_works_in_chunks` said; else on the
    logits as a whole.
    """
    return getattr(model, _IN_CHUNKS, False)


def set_works_in_chunks(model: PreTrainedModel, value: bool) -> None:
    """Say whether the head is the last that the model does, but for a cap that is known
    (workers/model/probes.py finds out).
    """
    object.__setattr__(model, _IN_CHUNKS, value)


@contextmanager
def loss_in_head(
    model: PreTrainedModel, places: Tensor, targets: Tensor, scale: float
) -> Iterator[list[Losses]]:
    """While it is entered, a forward's `logits` are the sum of cross entropies times `scale`, and
    the list takes the sums.

    `places`, `targets`: int64 [targets], as in a `Batch`.
    """
    counted: list[Losses] = []

    def forward(own: Tensor, head: _Head) -> Tensor:
        made = _HeadLoss.apply(own, head.weight, head.bias, targets, head.cap, scale)
        scaled, loss, correct = made  # pyright: ignore[reportGeneralTypeIssues]
        counted.append(Losses(loss, correct))
        return scaled

    with _in_head(model, places, forward):
        yield counted


@contextmanager
def log_probabilities_in_head(
    model: PreTrainedModel, places: Tensor, targets: Tensor, temperature: float = 1.0
) -> Iterator[list[Tensor]]:
    """While it is entered, a forward's `logits` are the log-probabilities of the targets, fp32
    [targets], and the list takes which of them were the most likely token, bool [targets].

    `places`, `targets`: int64 [targets], as in a `Batch`. `temperature`: what the logits are
    divided by.
    """
    likeliest: list[Tensor] = []

    def forward(own: Tensor, head: _Head) -> Tensor:
        made = _HeadLogProbabilities.apply(
            own, head.weight, head.bias, targets, head.cap, temperature
        )
        logs, correct = made  # pyright: ignore[reportGeneralTypeIssues]
        likeliest.append(correct)
        return logs

    with _in_head(model, places, forward):
        yield likeliest


@contextmanager
def hidden_in_head(model: PreTrainedModel, places: Tensor) -> Iterator[None]:
    """While it is entered, a forward's `logits` are what the head is given at these places,
    [places, hidden].

    `places`: int64, as in a `Batch`.
    """
    with _in_head(model, places, lambda own, head: own):
        yield


@dataclass(frozen=True)
class OtherHead:
    """The output head of another model than the one that is trained."""

    weight: Tensor
    """[words, hidden], in the compute dtype."""
    bias: Tensor | None
    cap: float | None

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: torch.dtype) -> OtherHead:
        """The head of a frozen model, gathered if it is sharded. Called by all ranks together."""
        head: Any = model.get_output_embeddings()
        weight, bias = (
            part.full_tensor() if isinstance(part, DTensor) else part
            for part in (head.weight.detach(), head.bias)
        )
        cap = getattr(text_decoder(model).config, CAP, None)
        return cls(weight.to(dtype), None if bias is None else bias.detach().to(dtype), cap)


@dataclass(frozen=True)
class TeacherHidden:
    """What the head is given of a teacher (`hidden_in_head`)."""

    hidden: Tensor
    """[targets, hidden]."""
    head: OtherHead | None = None
    """None: the student's own."""

    def rows(self, rows: slice) -> Tensor:
        """Those of some targets."""
        return self.hidden[rows]


@contextmanager
def likeliest_in_head(
    model: PreTrainedModel, places: Tensor, targets: Tensor, words: int, k: int
) -> Iterator[list[Likeliest]]:
    """While it is entered, the list takes a forward's likeliest words of the first `words`, whose
    probabilities sum up to 1.

    `places`, `targets`: int64 [targets], as in a `Batch`.
    """
    taken: list[Likeliest] = []

    def forward(own: Tensor, head: _Head) -> Tensor:
        head = head.first(words)
        height = chunk_rows(words)
        parts = [
            Likeliest.of(_log_softmax(own[rows], head)[0], targets[rows], k)
            for start in range(0, max(1, len(own)), height)
            for rows in [slice(start, start + height)]
        ]
        taken.append(
            Likeliest(
                torch.cat([part.words for part in parts]),
                torch.cat([part.logs for part in parts]),
                torch.cat([part.targets for part in parts]),
            )
        )
        return own

    with _in_head(model, places, forward):
        yield taken


@contextmanager
def divergence_in_head(
    model: PreTrainedModel,
    places: Tensor,
    targets: Tensor,
    teacher: TeacherHidden | Likeliest,
    words: int,
    divergence: Divergence,
    scale: float,
) -> Iterator[list[Tensor]]:
    """While it is entered, a forward's `logits` are the sum of divergences times `scale`, and the
    list takes the sums of `DIVERGENCE_SUMS`, fp64.

    `places`, `targets`: int64 [targets], as in a `Batch`. `teacher`: at the same targets. `words`:
    so many, the first ones, are compared.
    """
    taken: list[Tensor] = []

    def forward(own: Tensor, head: _Head) -> Tensor:
        made = _HeadDivergence.apply(own, head.first(words), teacher, targets, divergence, scale)
        scaled, sums = made  # pyright: ignore[reportGeneralTypeIssues]
        taken.append(sums)
        return scaled

    with _in_head(model, places, forward):
        yield taken


@contextmanager
def logits_in_head(model: PreTrainedModel, places: Tensor) -> Iterator[None]:
    """While it is entered, a forward's `logits` are those at these places alone, [places, words].

    `places`: int64, as in a `Batch`.
    """

    def forward(own: Tensor, head: _Head) -> Tensor:
        logits = F.linear(own, head.weight, head.bias)
        return logits if head.cap is None else torch.tanh(logits / head.cap) * head.cap

    with _in_head(model, places, forward):
        yield


@contextmanager
def _in_head(
    model: PreTrainedModel, places: Tensor, act: Callable[[Tensor, _Head], Tensor]
) -> Iterator[None]:
    """While it is entered, the head returns what `act` makes of the hidden states [places, hidden]
    and its own weights.
    """
    head: Any = model.get_output_embeddings()
    config = text_decoder(model).config
    cap = getattr(config, CAP, None)

    def forward(hidden: Tensor) -> Tensor:
        frozen = _Head(head.weight, head.bias, cap)  # now: FSDP2 has gathered them
        return act(hidden.flatten(0, 1).index_select(0, places), frozen)

    with head_replaced(head, config, forward):
        yield


@dataclass(frozen=True)
class _Gradients:
    """Sums that the chunks of a head add to. None: of what needs no gradient."""

    hidden: Tensor | None
    """[n, h], in its own dtype."""
    weight: Tensor | None
    """[words, h] fp32."""
    bias: Tensor | None
    """[words] fp32."""

    @classmethod
    def of(
        cls, needed: Sequence[bool], hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> _Gradients:
        """Zero sums. `needed`: whether hidden, weight and bias need a gradient."""
        of_hidden, of_weight, of_bias = needed[:3]
        return cls(
            torch.empty_like(hidden) if of_hidden else None,
            torch.zeros_like(weight, dtype=torch.float32) if of_weight else None,
            torch.zeros_like(bias, dtype=torch.float32) if of_bias and bias is not None else None,
        )

    @property
    def any(self) -> bool:
        return any(part is not None for part in (self.hidden, self.weight, self.bias))

    @property
    def trained(self) -> bool:
        return self.weight is not None or self.bias is not None

    def add(
        self, rows: slice, own: Tensor, of_logits: Tensor, weight: Tensor, scale: float
    ) -> None:
        """Add what a chunk gives.

        `own` [rows, h]: its input; `of_logits` [rows, words]: its gradient, to be scaled.
        """
        if self.hidden is not None:
            into = self.hidden[rows]
            torch.addmm(into, of_logits, weight, beta=0, alpha=scale, out=into)
        if self.weight is not None:
            self.weight.add_(of_logits.t() @ own, alpha=scale)
        if self.bias is not None:
            self.bias.add_(of_logits.sum(dim=0, dtype=torch.float32), alpha=scale)


@dataclass(frozen=True)
class _Head:
    """weight [words, h], bias [words] or None, the cap on its logits, and what they are divided by
    behind it.
    """

    weight: Tensor
    bias: Tensor | None
    cap: float | None
    temperature: float = 1.0

    def first(self, words: int) -> _Head:
        """The head of the first words alone."""
        if words == self.weight.shape[0]:
            return self
        bias = None if self.bias is None else self.bias[:words]
        return _Head(self.weight[:words], bias, self.cap, self.temperature)

    def chunks(
        self,
        hidden: Tensor,
        targets: Tensor,
        gradients: _Gradients,
        scale: float,
        of_tokens: Tensor | None = None,
    ) -> Iterator[_Chunk]:
        """Targets' log-probabilities, some rows of hidden [n, h] at a time.

        Adds to `gradients` those of scale times the sum of minus the log-probabilities, each times
        its factor in `of_tokens` fp32 [n]; None: 1.
        """
        height = chunk_rows(self.weight.shape[0])
        for start in range(0, hidden.shape[0], height):
            span = slice(start, start + height)
            factors = None if of_tokens is None else of_tokens[span]
            logs, correct, of_logits = self._chunk(
                hidden[span], targets[span], factors, graded=gradients.any
            )
            yield _Chunk(span, logs, correct)
            if of_logits is not None:
                gradients.add(span, hidden[span], of_logits, self.weight, scale / self.temperature)
            del of_logits  # before the next chunk's are made

    def _chunk(
        self, rows: Tensor, right: Tensor, factors: Tensor | None, *, graded: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities of the targets, which of them are the most likely word, and the
        gradient in the logits, if it is wanted: in the dtype of rows [n, h], and of the logits as
        they are divided.
        """
        kernels = (
            KERNEL.on(rows.device) if rows.dtype == torch.bfloat16 and self.cap is None else None
        )
        if kernels is not None:
            logits = F.linear(rows, self.weight, self.bias)
            if self.temperature != 1:
                logits.div_(self.temperature)
            return *kernels.cross_entropy(
                logits, right, factors, graded=graded
            ), logits if graded else None
        right = right.unsqueeze(1)
        logs, through = _log_softmax(rows, self)
        found = logs.gather(1, right).squeeze(1), logs.argmax(dim=-1) == right.squeeze(1)
        if not graded:
            return *found, None
        of_logits = (
            _gradient(logs, right) if through is None else _gradient(logs, right).mul_(through)
        )
        del through  # before a copy is made: at most two in fp32 exist at once
        if factors is not None:
            of_logits.mul_(factors.unsqueeze(1))
        return *found, of_logits.to(rows.dtype)


@dataclass(frozen=True)
class _Chunk:
    """Some rows of a head's input."""

    rows: slice
    logs: Tensor
    """fp32: log-probabilities of the targets."""
    correct: Tensor
    """bool: whether a target was the most likely token."""


class _HeadLoss(torch.autograd.Function):
    """hidden [n, h], weight, bias, targets [n] → loss × scale, loss, number of correct ones."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        cap: float | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients = _Gradients.of(ctx.needs_input_grad, hidden, weight, bias)
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        correct = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for chunk in _Head(weight, bias, cap).chunks(hidden, targets, gradients, scale):
            correct += chunk.correct.sum()
            loss -= chunk.logs.sum(dtype=torch.float64)
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.dtype = weight.dtype
        rounded = loss.float()
        ctx.mark_non_differentiable(rounded, correct)
        return rounded * scale, rounded, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *trained = ctx.saved_tensors
        of_hidden = None if hidden is None else hidden * grads[0].to(hidden.dtype)
        return of_hidden, *_in_dtype(trained, grads[0], ctx.dtype), None, None, None


class _HeadLogProbabilities(torch.autograd.Function):
    """hidden [n, h], weight, bias, targets [n] → log-probabilities fp32 [n], correct bool [n]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        cap: float | None,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        of_hidden, *trained = ctx.needs_input_grad[:3]
        ctx.again = any(trained)
        ctx.cap = cap
        ctx.temperature = temperature
        gradients = _Gradients.of((of_hidden and not ctx.again, False, False), hidden, weight, bias)
        logs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        correct = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        for chunk in _Head(weight, bias, cap, temperature).chunks(hidden, targets, gradients, -1):
            logs[chunk.rows], correct[chunk.rows] = chunk.logs, chunk.correct
        ctx.save_for_backward(
            *((hidden, weight, bias, targets) if ctx.again else (gradients.hidden,))
        )
        ctx.mark_non_differentiable(correct)
        return logs, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.again:
            (gradient,) = ctx.saved_tensors
            return (
                (gradient * grads[0].unsqueeze(1)).to(gradient.dtype),
                None,
                None,
                None,
                None,
                None,
            )
        hidden, weight, bias, targets = ctx.saved_tensors
        gradients = _Gradients.of(ctx.needs_input_grad, hidden, weight, bias)
        head = _Head(weight, bias, ctx.cap, ctx.temperature)
        for _ in head.chunks(hidden, targets, gradients, -1, grads[0]):
            pass
        return (
            gradients.hidden,
            *_in_dtype((gradients.weight, gradients.bias), None, weight.dtype),
            None,
            None,
            None,
        )


class _HeadDivergence(torch.autograd.Function):
    """hidden [n, h] of the student, with a frozen head, and the teacher's → loss × scale, and the
    sums of DIVERGENCE_SUMS. Only hidden gets a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: _Head,
        teacher: TeacherHidden | Likeliest,
        targets: Tensor,
        divergence: Divergence,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        other = None if isinstance(teacher, Likeliest) else teacher.head
        theirs = head if other is None else _Head(other.weight, other.bias, other.cap)
        theirs = theirs.first(head.weight.shape[0])
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        sums = torch.zeros(len(DIVERGENCE_SUMS), dtype=torch.float64, device=hidden.device)
        height = max(1, chunk_rows(head.weight.shape[0]) // 2)  # two logits of each row
        for start in range(0, len(hidden), height):
            rows = slice(start, start + height)
            own, through = _log_softmax(hidden[rows], head)
            given = teacher.rows(rows)
            others = given if isinstance(given, Likeliest) else _log_softmax(given, theirs)[0]
            sums += divergence_sums(own, others, targets[rows], divergence)
            if gradient is None:
                continue
            of_logits = divergence_gradient(own, others, divergence)
            if through is not None:
                of_logits.mul_(through)
            into = gradient[rows]
            of_logits = of_logits.to(hidden.dtype)
            torch.addmm(into, of_logits, head.weight, beta=0, alpha=scale, out=into)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(sums)
        return (sums[0] * scale).float(), sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None, None


def _compare(kernels: Any, device: torch.device) -> None:
    """Raise AssertionError if the kernel computes something else than PyTorch's operations."""
    generator = torch.Generator().manual_seed(0)
    for words in (100, 20_000):
        logits = 4 * torch.randn(6, words, generator=generator)
        right = torch.randint(0, words, (6,), generator=generator)
        right[0] = 50
        logits[0, 50], logits[1, :90], logits[2, right[2]] = 40.0, float("-inf"), 30.0
        # Two are the most likely, and the first is not the target.
        logits[3, 7:9], right[3] = (
            50.0,
            8,
        )
        for factors in (None, torch.rand(6, generator=generator)):
            own = logits.to(device).bfloat16()
            places = right.to(device)
            weights = None if factors is None else factors.to(device)
            # In fp32 what is missing to a probability near 1 is rounded.
            logs = own.log_softmax(dim=-1, dtype=torch.float64)
            expected = logs.gather(1, places[:, None])[:, 0].float(), logs.argmax(dim=-1) == places
            graded = _gradient(logs, places[:, None]) * (1 if weights is None else weights[:, None])
            alone, found = (
                kernels.cross_entropy(own, places, weights, graded=graded)
                for graded in (False, True)
            )
            for ours in (alone, found):
                assert torch.allclose(ours[0], expected[0], rtol=1e-5, atol=1e-5), (
                    "it gives other log-probabilities"
                )
                assert torch.equal(ours[1], expected[1]), (
                    "it takes others for the most likely words"
                )
            apart = float((own != graded.bfloat16()).float().mean())
            same = apart <= _MOST_OTHER and torch.allclose(
                own.double(), graded, rtol=2**-7, atol=2**-30
            )
            assert same, f"its gradient has {apart:.1%} other numbers"


KERNEL = gpu_kernels.CheckedKernel("workers.layers.loss_kernel", _compare)

_MOST_OTHER = 0.02
"""Share of the gradient's numbers that may differ, by one step of bf16."""


def _in_dtype(
    sums: Sequence[Tensor | None], scale: Tensor | None, dtype: torch.dtype
) -> list[Tensor | None]:
    """Sums in fp32 as gradients of a head's weights, times a number. They are changed in place."""
    return [
        part if part is None else (part if scale is None else part.mul_(scale)).to(dtype)
        for part in sums
    ]


def _log_softmax(rows: Tensor, head: _Head) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of all words, fp32 [rows, words], and what the cap lets through of their
    gradient; None: all.
    """
    cap = head.cap
    temperature = head.temperature
    logits = F.linear(rows, head.weight, head.bias)
    if (
        cap is None and temperature == 1 and logits.is_cuda
    ):  # its kernel reads them as they are; others would keep them and a copy in fp32
        return logits.log_softmax(dim=-1, dtype=torch.float32), None
    logits = logits.float()
    if cap is None:
        return (logits if temperature == 1 else logits.div_(temperature)).log_softmax(dim=-1), None
    logits.div_(cap).tanh_().mul_(cap / temperature)
    logs = logits.log_softmax(dim=-1)
    return logs, logits.div_(cap / temperature).square_().neg_().add_(1)


def _gradient(logs: Tensor, right: Tensor) -> Tensor:
    """The gradient of the loss in the logits, softmax - one-hot, in place of `logs`, fp32.

    The one-hot is never subtracted: of a probability near 1 that would leave little.
    """
    of_right = logs.gather(1, right).expm1_()
    return logs.exp_().scatter_(1, right, of_right)
