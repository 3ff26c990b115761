"""Attention by cuDNN's graphs: which samples and heads they are given, and that what they make is
put together right.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ft_service import kernel_limits
from ft_service.kernel_limits import lots_of
from tests.support.fake_cudnn import fake_cudnn
from tests.support.fused_attention import fused_attention
from workers.layers import cudnn_attention, packed_attention, segment_attention
from workers.layers.cudnn_attention import attend_packed, takes
from workers.layers.scored_attention import AttentionPattern
from workers.layers.segments import CURRENT, Bounds

LENGTHS = (5, 1, 70, 33, 4, 17, 140)
HEADS = 8
GROUPS = 2
WIDTH = 16
SCALE = 0.3
SINKS = torch.linspace(-2, 5, HEADS)


def bounds_of(lengths: tuple[int, ...] = LENGTHS) -> Bounds:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return Bounds(starts, starts, max(lengths))


def drawn(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, laid out as projections leave them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, sum(lengths), heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    query, key, value = (
        torch.randn(shape, generator=generator).transpose(1, 2).requires_grad_() for shape in shapes
    )
    return query, key, value


def written_out(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
    key, value = (tensor.repeat_interleave(HEADS // GROUPS, dim=1) for tensor in (key, value))
    sample = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.arange(sum(LENGTHS))
    seen = (sample[:, None] == sample) & (place[:, None] >= place)
    scores = (query @ key.mT * SCALE).masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat(
            [scores, sinks.view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)], dim=-1
        )
    return (scores.softmax(dim=-1)[..., : sum(LENGTHS)] @ value).transpose(1, 2)


def in_small_lots(monkeypatch: pytest.MonkeyPatch, score_bytes: int) -> None:
    monkeypatch.setattr(kernel_limits, "ATTENTION_LENGTH", 8)
    monkeypatch.setattr(kernel_limits, "ATTENTION_SCORE_BYTES", score_bytes)


SCORES = {
    "all heads": 2 * HEADS * 256**2,
    "parts of the heads, and one sample by the other kernel": 2 * 4 * 128**2,
}


@pytest.mark.parametrize("score_bytes", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
def test_it_is_the_attention_of_each_sample(
    sinks: Tensor | None, score_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_small_lots(monkeypatch, score_bytes)
    inputs = drawn()
    grad = torch.randn(1, sum(LENGTHS), HEADS, WIDTH, generator=torch.Generator().manual_seed(1))
    with fake_cudnn() as ran, fused_attention():
        ours = attend_packed(*inputs, bounds_of(), AttentionPattern(SCALE, sinks=sinks))
        found = torch.autograd.grad(ours, inputs, grad)
    expected = written_out(*inputs, sinks)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-6)
    for one, right in zip(found, torch.autograd.grad(expected, inputs, grad), strict=True):
        torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-5)
    heads = [options["q"].known["dim"][1] for options in ran]
    assert heads[0] == HEADS, "forward takes all"
    whole = score_bytes == SCORES["all heads"]
    assert set(heads[1:]) == ({HEADS} if whole else {HEADS, 4})
    _, long = lots_of(LENGTHS, HEADS, GROUPS)
    assert long == ([] if whole else [6])


def test_layers_of_a_micro_batch_share_what_graphs_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    on_device = cudnn_attention._on_device
    monkeypatch.setattr(
        cudnn_attention,
        "_on_device",
        lambda table, device: (made.append(1), on_device(table, device))[1],
    )
    bounds = bounds_of()
    with fake_cudnn():
        for _ in range(3):
            attend_packed(*drawn(), bounds, AttentionPattern(SCALE))
        assert made == [1]
        attend_packed(*drawn(), bounds_of(), AttentionPattern(SCALE))
    assert made == [1, 1]


@pytest.mark.parametrize("tokens", [sum(LENGTHS) - 1, sum(LENGTHS) + 1])
def test_segments_of_another_micro_batch_are_refused(tokens: int) -> None:
    """Where they are told to be, cuDNN would read and write what belongs to other tensors."""
    with fake_cudnn() as ran, pytest.raises(AssertionError, match="another micro-batch"):
        attend_packed(*drawn((tokens,)), bounds_of(), AttentionPattern(SCALE))
    assert not ran


def test_pytorch_s_kernel_makes_the_gradients_where_cudnn_has_no_graph() -> None:
    inputs = drawn()
    sinks = SINKS
    with fake_cudnn(refuses="sdpa_backward") as ran, fused_attention():
        ours = attend_packed(*inputs, bounds_of(), AttentionPattern(SCALE, sinks=sinks))
        found = torch.autograd.grad(ours, inputs, torch.ones_like(ours))
    assert len(ran) == 1
    expected = written_out(*inputs, sinks)
    for one, right in zip(
        found, torch.autograd.grad(expected, inputs, torch.ones_like(ours)), strict=True
    ):
        torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-5)


@pytest.fixture
def on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_attention.KERNEL, "on", lambda device: SimpleNamespace())


BF16 = (torch.bfloat16,) * 3


def row(
    tokens: int = 8192,
    width: int = 128,
    dtypes: tuple[torch.dtype, ...] = BF16,
    of_value: int | None = None,
) -> tuple[Any, Any, Any]:
    """Query, key and value on a GPU, as far as is asked for."""
    shapes = (1, 32, tokens, width), (1, 8, tokens, width), (1, 8, tokens, of_value or width)
    query, key, value = (
        SimpleNamespace(shape=shape, is_cuda=True, dtype=dtype, device=torch.device("cpu"))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    return query, key, value


@pytest.mark.usefixtures("on_a_hopper")
def test_what_it_takes() -> None:
    bounds = Bounds(torch.tensor([0, 8192]), None, 8192)
    plain = AttentionPattern(SCALE)
    with fake_cudnn():
        assert takes(*row(), bounds, plain)
        assert takes(*row(), bounds, AttentionPattern(SCALE, window=8192, sinks=SINKS))
        assert not takes(*row(), bounds, AttentionPattern(SCALE, window=128)), (
            "it would compute what a window hides"
        )
        assert not takes(*row(), bounds, AttentionPattern(SCALE, softcap=30.0))
        assert not takes(*row(tokens=1024), bounds, plain), (
            "the host would take longer than the GPU saves"
        )
        assert not takes(*row(width=256), bounds, plain)
        short = Bounds(torch.arange(0, 8193, 100), None, 100)
        assert not takes(*row(), short, plain), "a lot is a call, and short samples are many lots"
        assert not takes(*row(width=72), bounds, plain)
        assert not takes(*row(of_value=64), bounds, plain)
        for other in range(3):
            dtypes = tuple(
                torch.float32 if number == other else dtype for number, dtype in enumerate(BF16)
            )
            assert not takes(*row(dtypes=dtypes), bounds, plain), (
                "it would read their bytes as bf16"
            )
        assert not takes(*row(tokens=600_000), bounds, plain), "places are 32 bits"
    with fake_cudnn(refuses="sdpa"):
        assert not takes(*row(), bounds, plain)


def test_other_devices_have_no_fault() -> None:
    assert cudnn_attention.KERNEL.fault(torch.device("cpu")) is None
    query, key, value = (tensor.bfloat16() for tensor in drawn((5000,)))
    assert not takes(query, key, value, bounds_of((5000,)), AttentionPattern(SCALE))


def test_a_hopper_without_the_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_attention.KERNEL, "suits", lambda device: True)
    monkeypatch.setattr(cudnn_attention.KERNEL, "module", "cudnn_that_is_not_here")
    fault = cudnn_attention.KERNEL.fault(torch.device("cpu", 7))
    assert fault == "ModuleNotFoundError: No module named 'cudnn_that_is_not_here'"


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is compared before a job: whether there are sinks, windows, lengths.

    In fp32, which the stand-in computes in, and on shorter samples.
    """
    compared_with: list[tuple[Any, ...]] = []

    def checked(
        kernel: Any, pattern: AttentionPattern, device: torch.device, windows: Any, lengths: Any
    ) -> None:
        compared_with.append((pattern.sinks is not None, windows, lengths))
        inputs = drawn()
        bounds = bounds_of()
        pattern = AttentionPattern(SCALE, sinks=None if pattern.sinks is None else SINKS)
        expected = written_out(*inputs, pattern.sinks)
        torch.testing.assert_close(
            kernel(*inputs, bounds.starts, bounds.longest, pattern), expected, rtol=1e-5, atol=2e-6
        )

    monkeypatch.setattr(cudnn_attention, "assert_same", checked)
    return compared_with


def test_the_check_finds_a_kernel_that_computes_something_else(
    compared: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cpu")
    with fake_cudnn(), fused_attention():
        cudnn_attention._compare(None, device)
        assert [row[:2] for row in compared] == [(False, (0,)), (True, (0,))]
        monkeypatch.setattr(packed_attention, "add_sinks", lambda out, sums, own: sums)
        with pytest.raises(AssertionError):
            cudnn_attention._compare(None, device)
    lots, long = lots_of(compared[0][2], 4, 2)
    assert [(lot.samples, lot.count) for lot in lots] == [((0, 2, 3, 4), 4), ((1,), 2)], (
        "not each sample alone"
    )
    assert not long


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("operation", ["sdpa", "sdpa_backward"])
def test_the_check_says_why_cudnn_has_no_graph(operation: str) -> None:
    with (
        fake_cudnn(refuses=operation),
        fused_attention(),
        pytest.raises(RuntimeError, match="no engine"),
    ):
        cudnn_attention._compare(None, torch.device("cpu"))


class Layer(nn.Module):
    is_causal = True


def test_packed_rows_go_to_it_where_it_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_attention, "_fits_kernel", lambda query: True)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    taken = True
    monkeypatch.setattr(cudnn_attention, "takes", lambda *_: taken)
    inputs = drawn()
    try:
        with fake_cudnn() as ran, fused_attention():
            CURRENT.use(starts, starts, max(LENGTHS))
            ours, _ = segment_attention.segment_attention(Layer(), *inputs, None, scaling=SCALE)
            assert len(ran) == 1
            taken = False
            other, _ = segment_attention.segment_attention(Layer(), *inputs, None, scaling=SCALE)
            assert len(ran) == 1
    finally:
        CURRENT.use(None)
    torch.testing.assert_close(ours, other, rtol=1e-5, atol=2e-6)
    assert [end - start for start, end in pairwise(starts.tolist())] == list(LENGTHS)
