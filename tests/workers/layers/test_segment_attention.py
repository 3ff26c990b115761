"""Attention within segments against the same written out: whole score matrices, masks, one head's
key and value each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from tests.support.fused_attention import fused_attention
from workers.layers import capped_attention, packed_attention, scored_attention
from workers.layers import segment_attention as attention
from workers.layers.scored_attention import AttentionPattern
from workers.layers.segment_attention import (
    attend,
    causal_segments,
    described_mask,
    segment_attention,
)
from workers.layers.segments import CURRENT

LENGTHS = (5, 1, 70, 33)
STARTS = torch.tensor([0, 5, 6, 76, 109], dtype=torch.int32)
SCALE = 0.3


@pytest.fixture(autouse=True)
def no_segments_afterwards() -> Iterator[None]:
    yield
    CURRENT.use(None)


class Layer(nn.Module):
    is_causal = True


def drawn(rows: int, length: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query of four heads, key and value of two, laid out as projections leave them."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, length, 4, 16), (rows, length, 2, 16), (rows, length, 2, width))
    query, key, value = (
        torch.randn(shape, generator=generator).transpose(1, 2).requires_grad_() for shape in shapes
    )
    return query, key, value


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[int, ...],
    window: int | None,
    cap: float | None,
    sinks: Any,
    chosen: Tensor | None = None,
    scale: float = SCALE,
) -> Tensor:
    key, value = (tensor.repeat_interleave(2, dim=1) for tensor in (key, value))
    of_segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(query.shape[2])
    distance = position[:, None] - position
    seen = (of_segment[:, None] == of_segment) & (distance >= 0) & (distance < (window or 10**9))
    if chosen is not None:
        starts = torch.tensor([0, *lengths]).cumsum(0)[of_segment]
        among = ((position - starts[:, None])[None, :, :, None] == chosen[:, :, None]).any(dim=-1)
        seen = seen & (among | (position - starts < chosen.shape[-1])[:, None])[:, None]
    scores = query @ key.transpose(-1, -2) * scale
    if cap:
        scores = torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat(
            [scores, sinks.view(1, -1, 1, 1).expand(len(query), -1, query.shape[2], 1)], dim=-1
        )
    shares = scores.softmax(dim=-1)[..., : query.shape[2]]
    return (shares @ value).transpose(1, 2)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("width", [16, 8, 24])
@pytest.mark.parametrize(
    ("window", "cap", "sinks"),
    [
        (None, None, None),
        (6, None, None),
        (None, 2.0, None),
        (40, 1.0, torch.arange(4.0)),
        (None, None, torch.arange(4.0)),
    ],
    ids=["plain", "window", "cap", "window, cap and sinks", "sinks"],
)
def test_values_and_gradients_are_those_of_whole_scores(
    packed: bool,
    width: int,
    window: int | None,
    cap: float | None,
    sinks: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scored_attention, "ROWS_AT_ONCE", 32)
    rows, lengths = (1, LENGTHS) if packed else (3, (sum(LENGTHS),))
    own = drawn(rows, sum(LENGTHS), width)
    CURRENT.use(STARTS if packed else None)
    options: dict[str, Any] = {
        "scaling": SCALE,
        "sliding_window": window,
        "softcap": cap,
        "s_aux": sinks,
    }
    ours, _ = segment_attention(Layer(), *own, None, **options)
    expected = written_out(*own, lengths, window, cap, sinks)
    assert_same(ours, expected, own)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("window", "sinks"),
    [(None, None), (None, torch.arange(4.0)), (20, None)],
    ids=["plain", "sinks", "window"],
)
def test_queries_see_the_keys_that_are_chosen_for_them_and_no_others(
    packed: bool, window: int | None, sinks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all before them where there are no more than may be chosen."""
    monkeypatch.setattr(scored_attention, "ROWS_AT_ONCE", 16)
    rows, lengths = (1, LENGTHS) if packed else (3, (sum(LENGTHS),))
    own = drawn(rows, sum(LENGTHS), 8)
    CURRENT.use(STARTS if packed else None)
    chosen = choices(rows, lengths, 7)
    ours, _ = segment_attention(
        Layer(),
        *own,
        torch.empty(1, 1, 1, 0),
        scaling=SCALE,
        sliding_window=window,
        s_aux=sinks,
        indices=chosen,
    )
    expected = written_out(*own, lengths, window, None, sinks, chosen)
    assert_same(ours, expected, own)
    everything, _ = segment_attention(
        Layer(), *own, None, scaling=SCALE, sliding_window=window, s_aux=sinks
    )
    assert (everything - ours).abs().max() > 0.1


def assert_same(ours: Tensor, expected: Tensor, inputs: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-6)
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    for found, right in zip(
        torch.autograd.grad(ours, inputs, grad),
        torch.autograd.grad(expected, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def choices(rows: int, lengths: tuple[int, ...], count: int) -> Tensor:
    """For each query `count` places in its segment, one of them its own; those of queries with
    fewer keys do not matter.
    """
    generator = torch.Generator().manual_seed(2)
    parts = []
    for length in lengths:
        scores = torch.rand(rows, length, max(length, count), generator=generator)
        scores[:, :, :length] += 2 * torch.eye(length) + torch.ones(length, length).tril()
        parts.append(scores.topk(count, dim=-1).indices.int())
    return torch.cat(parts, dim=1)


def test_keys_and_values_are_repeated_where_the_kernel_knows_no_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = drawn(1, sum(LENGTHS), 16)
    CURRENT.use(STARTS)
    shared, _ = segment_attention(Layer(), *own, None, scaling=SCALE)
    monkeypatch.setattr(attention, "_kernel_knows_groups", lambda: False)
    repeated, _ = segment_attention(Layer(), *own, None, scaling=SCALE)
    torch.testing.assert_close(repeated, shared)
    for found, right in zip(
        *(torch.autograd.grad(out.sum(), own) for out in (repeated, shared)), strict=True
    ):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("starts", [STARTS, None], ids=["packed", "padded"])
def test_pytorch_s_own_kernels_a_segment_give_the_same(starts: Tensor | None) -> None:
    """What GPUs take that have no kernel for packed rows; here its arithmetic."""
    own = drawn(1 if starts is not None else 3, sum(LENGTHS), 16)
    ours = causal_segments(*own, starts, SCALE)
    expected = written_out(
        *own, LENGTHS if starts is not None else (sum(LENGTHS),), None, None, None
    )
    assert_same(ours, expected, own)


def test_the_operator_is_one_that_the_compiler_can_trust() -> None:
    own = drawn(1, sum(LENGTHS), 16)
    spans = torch.tensor([[1, 3]], dtype=torch.int32)
    for rest in ((9, 0.0, None, choices(1, LENGTHS, 7), None), (0, 0.0, None, None, spans)):
        torch.library.opcheck(attend, (*own, STARTS, SCALE, *rest))


def test_segments_of_another_micro_batch_are_an_error() -> None:
    CURRENT.use(STARTS)
    with pytest.raises(AssertionError, match="another micro-batch"):
        segment_attention(Layer(), *drawn(1, 20, 16), None)


def test_what_only_a_mask_could_say_is_refused() -> None:
    own = drawn(1, 20, 16)
    with pytest.raises(NotImplementedError, match="bias by position"):
        segment_attention(Layer(), *own, None, position_bias=torch.zeros(1))
    with pytest.raises(NotImplementedError, match="not causal"):
        segment_attention(Layer(), *own, None, is_causal=False)
    with pytest.raises(NotImplementedError, match="has a window of 6, and its layer has no window"):
        segment_attention(Layer(), *own, torch.tensor([6, 0]).view(1, 1, 1, 2))


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (causal_mask_function, [0, 0]),
        (sliding_window_causal_mask_function(1), [1, 0]),
        (sliding_window_causal_mask_function(4096), [4096, 0]),
        (sliding_window_causal_mask_function(131_072), [131_072, 0]),
        (sliding_window_causal_mask_function(262_144), [262_144, 0]),
        (chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)), [0, 8]),
        (chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.int64)), [0, 8192]),
        (lambda batch, head, q, kv: kv >= 0, [-1, -1]),
        (lambda batch, head, q, kv: (kv <= q) | (kv < 4), [-1, -1]),
        (lambda batch, head, q, kv: kv < q, [-1, -1]),
        (lambda batch, head, q, kv: (kv <= q) & (kv > q - 8) & (q < 100), [-1, -1]),
    ],
)
def test_a_mask_is_told_by_its_window_or_its_chunk(function: Any, told: list[int]) -> None:
    assert (
        described_mask(q_length=3, kv_length=3, mask_function=function).flatten().tolist() == told
    )


def test_plain_attention_is_pytorch_s() -> None:
    """The reference above is ours too; this one is not."""
    query, key, value = drawn(1, 40, 16)
    ours, _ = segment_attention(Layer(), query, key, value, None)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(ours, expected.transpose(1, 2))


class Called(TorchDispatchMode):
    """The operators that are called while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("values", [None, torch.tensor([-2.0, 0.0, 1.0, 5.0])], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 20])
def test_a_fused_kernel_computes_packed_and_padded_rows(
    window: int | None, values: Tensor | None, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly, and gradients too, which the kernel computes by what it is given of the output: with
    sinks that are added.
    """
    monkeypatch.setattr(attention, "_fits_kernel", lambda query: True)
    rows, lengths = (1, LENGTHS) if packed else (3, (sum(LENGTHS),))
    own = drawn(rows, sum(LENGTHS), 16)
    with fused_attention(), Called() as called:
        if packed:
            CURRENT.use(STARTS, STARTS, max(LENGTHS))
        else:
            CURRENT.use(None, device=torch.device("cpu"))
        ours, _ = segment_attention(
            Layer(), *own, None, scaling=SCALE, sliding_window=window, s_aux=values
        )
    assert "ft_service::packed_attention" in called.names
    with fused_attention():
        assert_same(ours, written_out(*own, lengths, window, None, values), own)


@pytest.mark.parametrize("values", [None, torch.tensor([-2.0, 0.0, 1.0, 5.0])], ids=["", "sinks"])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_fused_kernel_computes_the_same_bits_with_its_operators_and_without(
    rows: int, values: Tensor | None
) -> None:
    found: list[list[Tensor]] = []
    for mode in (nullcontext(), Called()):
        own = [
            tensor.detach().bfloat16().requires_grad_() for tensor in drawn(rows, sum(LENGTHS), 16)
        ]
        with fused_attention(), mode as called:
            if rows == 1:
                CURRENT.use(STARTS, STARTS, max(LENGTHS))
            else:
                CURRENT.use(None, device=torch.device("cpu"))
            out, _ = segment_attention(
                Layer(), own[0], own[1], own[2], None, scaling=SCALE, s_aux=values
            )
            found.append([out, *torch.autograd.grad(out, own, torch.ones_like(out))])
        assert (
            called is None
            or {"ft_service::packed_attention", "ft_service::packed_attention_grad"} <= called.names
        )
    for direct, by_operator in zip(*found, strict=True):
        assert direct.shape == by_operator.shape
        assert torch.equal(direct, by_operator)


def test_sinks_are_compared_with_explicit_scores_before_they_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cpu")
    with fused_attention():
        packed_attention._compare(None, device)
        monkeypatch.setattr(packed_attention, "add_sinks", lambda out, sums, own: sums)
        with pytest.raises(AssertionError, match=r"output: .* apart from explicit scores"):
            packed_attention._compare(None, device)


def capped_kernel(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *rest: Any, **options: Any
) -> Tensor:
    """A stand-in of flash-attn's function, by whole scores. query [tokens, heads, d]."""
    _starts, longest, _longest = rest
    lengths = tuple(starts.diff().tolist())
    assert max(lengths) <= longest
    assert options["causal"]
    left, right = options["window_size"]
    assert right == 0
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return written_out(
        q, k, v, lengths, left + 1, options["softcap"], None, scale=options["softmax_scale"]
    )[0]


@pytest.mark.parametrize("window", [None, 20])
def test_capped_scores_are_computed_by_a_package_that_computes_them_right(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = SimpleNamespace(flash_attn_varlen_func=capped_kernel)
    device = torch.device("cpu")
    capped_attention._compare(package, device)
    monkeypatch.setattr(capped_attention.KERNEL, "on", lambda device: package)
    monkeypatch.setattr(capped_attention, "takes", lambda query, pattern: True)
    monkeypatch.setattr(attention, "_fits_kernel", lambda query: True)
    own = drawn(1, sum(LENGTHS), 16)
    with fused_attention():
        CURRENT.use(STARTS, STARTS, max(LENGTHS))
        ours, _ = segment_attention(
            Layer(), *own, None, scaling=SCALE, sliding_window=window, softcap=2.0
        )
    assert_same(ours, written_out(*own, LENGTHS, window, 2.0, None), own)
    for option, what in (("softcap", 0.0), ("window_size", (-1, 0)), ("softmax_scale", 0.19)):
        wrong = partial(
            lambda *rows, changed, **options: capped_kernel(*rows, **{**options, **changed}),
            changed={option: what},
        )
        with pytest.raises(AssertionError, match="apart from explicit scores"):
            capped_attention._compare(SimpleNamespace(flash_attn_varlen_func=wrong), device)


def test_capped_scores_are_written_out_on_processors_and_without_the_package() -> None:
    pattern = AttentionPattern(SCALE, 0, 2.0)
    assert not capped_attention.takes(torch.ones(1, 1, 1, 8), pattern)
    assert capped_attention.KERNEL.fault(torch.device("cpu")) is None
    assert "flash_attn" in str(capped_attention.KERNEL.fault(torch.device("cuda", 7)))


@pytest.mark.parametrize("own", [None, torch.arange(4.0)], ids=["", "sinks"])
def test_the_operator_for_packed_rows_is_one_that_the_compiler_can_trust(
    own: torch.Tensor | None,
) -> None:
    query, key, value = (
        tensor.detach()[0].transpose(0, 1).requires_grad_() for tensor in drawn(1, sum(LENGTHS), 16)
    )
    with fused_attention():
        for longest in (torch.tensor(max(LENGTHS), dtype=torch.int32), None):
            starts = STARTS if longest is not None else STARTS[[0, -1]]
            torch.library.opcheck(
                packed_attention.packed_attention,
                (query, key, value, own, None, starts, longest, SCALE, 9),
            )


def test_the_fused_kernel_s_gradients_are_not_copied() -> None:
    """Into zeros as large as the tensor: 0.4 GB a layer of a model of 8 billion, for a dimension of
    one.
    """
    query, key, value = (
        tensor.detach().bfloat16().requires_grad_() for tensor in drawn(1, 109, 16)
    )
    with fused_attention(), Called() as called:
        CURRENT.use(STARTS, STARTS, max(LENGTHS))
        out, _ = segment_attention(Layer(), query, key, value, None, scaling=SCALE)
        out.sum().backward()
    assert "ft_service::packed_attention_grad" in called.names
    assert not [name for name in called.names if "select" in name]


def test_gradients_of_the_fused_kernel_are_added_up_in_one_order() -> None:
    """And nothing else of the process is refused for having no such order."""

    def modes() -> tuple[bool, bool, bool]:
        filled = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            filled,
        )

    before = modes()
    during = list[tuple[bool, bool, bool]]()
    with fused_attention():
        stand_in = packed_attention._kernel_grad

        def watched(*given: Any, **seen: Any) -> Any:
            during.append(modes())
            return stand_in(*given, **seen)

        with patch.object(packed_attention, "_kernel_grad", watched):
            CURRENT.use(STARTS, STARTS, max(LENGTHS))
            query, key, value = (
                tensor.detach().bfloat16().requires_grad_() for tensor in drawn(1, sum(LENGTHS), 16)
            )
            segment_attention(Layer(), query, key, value, None, scaling=SCALE)[0].sum().backward()
            with patch.object(packed_attention.DeterministicAttention, "wanted", False):
                segment_attention(Layer(), query, key, value, None, scaling=SCALE)[
                    0
                ].sum().backward()
    assert during == [(True, False, False), before], (
        "with warnings alone the kernel keeps to its own order"
    )
    assert modes() == before == (False, False, True)


@pytest.mark.parametrize(("most", "of_gradients"), [(2**25, torch.float32), (0, torch.bfloat16)])
def test_gradients_of_short_samples_in_bf16_are_made_in_fp32(
    most: int, of_gradients: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_SMALL", most)
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(1, 2, 9, 16, generator=generator).bfloat16() for _ in range(4)
    )
    pattern = (None, 0.25, 0, 0.0, None, None, None)
    out, sums = attention.attend(query, key, value, *pattern)
    found = attention._attend_grad(grad.transpose(1, 2), query, key, value, out, sums, *pattern)
    given = (own.to(of_gradients) for own in (grad, query, key, value, out.transpose(1, 2)))
    expected = attention._kernel_grad(*given, sums, 0.0, True, scale=0.25)
    for own, right in zip(found, expected, strict=True):
        assert own.dtype == torch.bfloat16
        assert torch.equal(own, right.bfloat16())
