"""What kernels take, how much of it at a time, and in how many bytes they work: each rule once,
called by the kernels in `workers` and by a job's plan in `ft_service.plan`. Numbers in, numbers
out: no torch, no job, no machine.

A limit is read in this module alone. Who changes one changes what ranks do and what is planned for
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_FP32_BYTES = 4


def next_power(number: int) -> int:
    """The next power of two: kernels are built for few sizes, where those of rows and samples are
    many."""
    return 1 << (number - 1).bit_length()


# Numbers of rows that libraries meet --------------------------------------------------------------

_FILLED_FROM = 256
"""Tokens of a packed row from which on it is filled up."""
_STEPS = 32
"""Parts of the next power of two, of which a row's tokens are a multiple."""
_MOST_FILLED = 64
"""Tokens of which a longer row's are a multiple."""
_STEPS_OF_GROUPS = 8
"""Likewise, of a group's rows."""


def filled_row(tokens: int) -> int:
    """Tokens of a packed row whose samples have so many (workers/data/batches.py): at most 6 % more
    and 63.

    Libraries look for the fastest kernel of a product, or compile one, for each number of rows that
    they have not met. In bf16 that takes 1.5 milliseconds a product on a processor with AMX, and a
    third of one on an H200's host (benchmarks/README.md). So rows have few lengths.
    """
    if tokens < _FILLED_FROM:
        return tokens
    step = min(_MOST_FILLED, next_power(tokens) // _STEPS)
    return -(-tokens // step) * step


def filled_group(rows: int) -> int:
    """Rows of a product of a group of so many (workers/quant/grouped_linear.py), on a processor in
    bf16: at most 25 % more, for the same reason.
    """
    step = max(1, next_power(rows) // _STEPS_OF_GROUPS)
    return -(-rows // step) * step


# The output head (workers/model/head.py) ----------------------------------------------------------

LOGIT_BYTES = 8
"""Bytes per logit of a chunk at the peak: itself and its log-probability, fp32 each. On a GPU in
bf16 it is 6, since the kernel reads logits as they are."""
CHUNK_ROWS = 2**10
"""Least tokens in a chunk: with fewer a GPU takes longer to read the head's weight than to multiply
by it."""
CHUNK_LOGITS = 2**25
"""Logits in a chunk of a small vocabulary: more would only take memory."""
MOST_LOGITS = 2**28
"""Most logits in a chunk, whatever the vocabulary: 2 GiB, at 8 bytes each."""
WHOLE_LOGIT_BYTES = 12
"""Bytes per logit where they are not made in chunks: log-probability, its gradient, and the logit's
own gradient, in fp32."""


def chunk_rows(vocabulary: int) -> int:
    """Tokens whose logits exist at once: 1,024, or more with a small vocabulary, up to 2^25 logits.

    With 128,256 words a chunk of 1,024 tokens takes 1 GiB. Beyond 262,144 words a chunk has fewer
    tokens, so that it has at most 2^28 logits. A micro-batch with fewer targets takes only what
    those need.
    """
    words = max(1, vocabulary)
    return max(1, min(max(CHUNK_ROWS, CHUNK_LOGITS // words), MOST_LOGITS // words))


def head_bytes(vocabulary: int, hidden: int, targets: int, number_bytes: int, trained: int) -> int:
    """Bytes when the loss of so many targets is taken in chunks: logits of a chunk, the rows of the
    head's input that have targets, and their gradient; with a trained head also the sum of its
    gradients.

    `number_bytes`: of a number in compute; `trained`: numbers of the head's weights that are
    trained, or 0."""
    rows = min(targets, chunk_rows(vocabulary))
    inputs = 2 * number_bytes * hidden * targets
    chunk = LOGIT_BYTES * vocabulary * rows
    if not trained:
        return chunk + inputs
    # A chunk's logits, and their gradient if of another type, are there when it adds its product to
    # the weight's fp32 sum.
    logits = (_FP32_BYTES + number_bytes % _FP32_BYTES) * vocabulary * rows
    return max(chunk, logits + number_bytes * trained) + inputs + _FP32_BYTES * trained


def whole_logits_bytes(vocabulary: int, tokens: int) -> int:
    """Bytes when the loss is taken on the logits of all tokens, where chunks do not work."""
    return WHOLE_LOGIT_BYTES * vocabulary * tokens


# cuDNN's attention (workers/layers/cudnn_attention.py) --------------------------------------------

ATTENTION_TOKENS = 4096
"""Tokens of a row from which on cuDNN computes its attention: it takes the host twice as long as
PyTorch's kernel."""
ATTENTION_NUMBERS = 2**31
"""Fewer numbers than these has a row's query: places in it are int32."""
ATTENTION_WIDEST = 128
"""Channels of a head at most."""
ATTENTION_MULTIPLE = 16
"""Channels of which those of a head are a multiple."""
ATTENTION_SHORTEST = 128
"""Tokens that the samples of a row have at least, on average: with shorter ones its calls are
many."""
ATTENTION_LENGTH = 1024
"""Tokens that a sample is taken to have at least in a backward, in a lot with samples of like
length."""
ATTENTION_SAMPLES = 64
"""Most samples of a lot."""
ATTENTION_SCORE_BYTES = 2**30
"""Most bytes of scores' gradients that a backward is given room for at a time."""
_SCORE_BYTES = 2
"""Of the gradient of a score."""
_ALIGNED_HEADS = 4
"""Heads at multiples of which a part of them begins: log-sums of 4 bytes, at 16."""


def attends_by_cudnn(tokens: int, mean_length: float, heads: int, width: int) -> bool:
    """Whether cuDNN computes the attention of rows of so many tokens, with samples of `mean_length`
    tokens on average, and heads of `width` channels. Scores must also be plain, in bf16, and each
    sample no longer than the layer's window."""
    if width > ATTENTION_WIDEST or width % ATTENTION_MULTIPLE or mean_length < ATTENTION_SHORTEST:
        return False
    return ATTENTION_TOKENS <= tokens < ATTENTION_NUMBERS // (heads * width)


def padded_length(length: int) -> int:
    """Tokens that a sample of this length has in a graph."""
    return max(ATTENTION_LENGTH, next_power(length))


@dataclass(frozen=True)
class Lot:
    """Samples and heads that a backward takes at once. All lots of one length have one shape."""

    samples: tuple[int, ...]
    """Their numbers in the row: at most `count`."""
    count: int
    length: int
    """Tokens of the longest at most."""
    heads: int
    """Heads at once: all, or as many of each group as share a key."""


def lots_of(lengths: Sequence[int], heads: int, groups: int) -> tuple[list[Lot], list[int]]:
    """The lots of a row of samples with these numbers of tokens, and the samples that are too long
    for one.

    A lot's scores of 2 bytes, count · heads · length², take at most ATTENTION_SCORE_BYTES, and at
    most those of a row that is full of samples of more than half the length.
    """
    tokens = next_power(sum(lengths))
    by_length: dict[int, list[int]] = {}
    for sample, length in enumerate(lengths):
        by_length.setdefault(padded_length(length), []).append(sample)
    lots = list[Lot]()
    long = list[int]()
    for length, samples in sorted(by_length.items()):
        at_once = _heads_at_once(heads, groups, length)
        if at_once is None:
            long += samples
            continue
        full = max(1, 2 * tokens // length)
        fitting = ATTENTION_SCORE_BYTES // _bytes_of_scores(at_once, length)
        count = min(ATTENTION_SAMPLES, full, fitting)
        for first in range(0, len(samples), count):
            lots.append(Lot(tuple(samples[first : first + count]), count, length, at_once))
    return lots, long


def _heads_at_once(heads: int, groups: int, length: int) -> int | None:
    """Heads of which the scores of a sample fit, most first: all, or an equal share of every group.
    None: no share does."""
    for parts in range(1, groups + 1):
        share = heads // parts
        begins_aligned = parts == 1 or share % _ALIGNED_HEADS == 0
        fits = _bytes_of_scores(share, length) <= ATTENTION_SCORE_BYTES
        if groups % parts == 0 and begins_aligned and fits:
            return share
    return None


def _bytes_of_scores(heads: int, length: int) -> int:
    return _SCORE_BYTES * heads * length**2


def cudnn_workspace_bytes(
    tokens: int, longest: int, heads: int, width: int, *, grouped: bool
) -> int:
    """Most bytes in which a backward of a row works: the scores of its largest lot, and if keys are
    shared by groups of heads the gradients of a key and a value for each head, fp32. `longest`:
    tokens of the longest sample."""
    row = next_power(tokens)
    scores = min(ATTENTION_SCORE_BYTES, 2 * _SCORE_BYTES * row * heads * padded_length(longest))
    return scores + (2 * _FP32_BYTES * row * heads * width if grouped else 0)


# PyTorch's attention on GPUs (workers/layers/packed_attention.py) ---------------------------------


def flash_workspace_bytes(
    tokens: int, heads: int, width: int, number_bytes: int, *, grouped: bool
) -> int:
    """Bytes in which a backward of a row by PyTorch's kernel works (`mha_varlen_bwd` of its
    FlashAttention): the sum of the query's gradient in fp32, and if keys are shared by groups of
    heads the gradients of a key and a value for each head."""
    numbers = tokens * heads * width
    return _FP32_BYTES * numbers + (2 * number_bytes * numbers if grouped else 0)


# Pictures whose tokens see each other in both directions (workers/layers/two_way_spans.py) ---------

SPAN_SCORES = 2**24
"""Most scores of tokens that see each other ahead of a causal kernel, at a time; one picture may
have more."""
_SPAN_SCORE_BYTES = 16
"""Of a score in a backward: itself, its share, and the gradients of both, in fp32."""


def spans_at_once(tokens: int, heads: int) -> int:
    """Pictures of so many tokens whose scores exist at a time."""
    return max(1, SPAN_SCORES // (heads * tokens**2))


def span_bytes(row: int, picture: int, heads: int) -> int:
    """Most bytes in which a backward of a row of so many tokens works beside its kernel, with
    pictures of `picture` tokens at most."""
    at_once = min(spans_at_once(picture, heads), -(-row // max(1, picture)))
    return _SPAN_SCORE_BYTES * heads * at_once * picture**2


# Feed-forwards by tiles of rows (workers/layers/tiles.py) -----------------------------------------

TILE_ROWS = 2**13
"""Most rows of a tile: enough that a GPU's products are as fast as with all of them, and
dequantising a weight for each tile hardly shows.
"""


def tile_rows(rows: int) -> int:
    """Rows of each tile but the last: tiles are as even as they can be."""
    return -(-rows // tiles_of(rows)) if rows else 0


def tiles_of(rows: int) -> int:
    """Number of tiles, of which the last may be smaller."""
    return max(1, -(-rows // TILE_ROWS))


# Layers' inputs in the host's memory (workers/model/offloaded_inputs.py) --------------------------

OFFLOAD_BLOCK_BYTES = 2**26
"""Pinned host memory is taken in blocks of 64 MiB. PyTorch rounds each up to a power of two, so
that one block for a whole input would take up to twice its bytes.
"""


def offload_blocks(input_bytes: int) -> int:
    """Number of blocks that hold a layer's input of so many bytes."""
    return -(-input_bytes // OFFLOAD_BLOCK_BYTES)


def offloaded_bytes(input_bytes: int, layers: int) -> int:
    """Bytes of the blocks that hold the inputs of so many layers, of which the last one's stays on
    the device."""
    return max(0, layers - 1) * offload_blocks(input_bytes) * OFFLOAD_BLOCK_BYTES


# Grouped products of experts (workers/quant/grouped_linear.py) ------------------------------------

GROUPED_BYTES = 2**30
"""Most bytes of experts' matrices that a GPU dequantises at a time for one grouped product; one
matrix may have more. 1 GiB holds the larger stack of a layer of Qwen3-30B, 768 MiB: in two lots its
input and result would be copied twice."""
GROUPED_MULTIPLE = 8
"""Rows and columns of the matrices are multiples of this: 16 bytes in bf16."""


def grouped_fits(rows: int, cols: int) -> bool:
    """Whether a kernel multiplies rows by matrices [rows, cols] of their groups, on GPUs that have
    one."""
    return rows % GROUPED_MULTIPLE == 0 and cols % GROUPED_MULTIPLE == 0


def matrices_at_a_time(matrix_bytes: int) -> int:
    """Number of a stack's matrices that are dequantised at a time, if it has so many.
    `matrix_bytes`: of one, dequantised."""
    return max(1, GROUPED_BYTES // max(1, matrix_bytes))


def copied_by_lots(rows: int, cols: int, number_bytes: int) -> int:
    """Bytes per row of the copies that a product with a stack [rows, cols] in several lots makes:
    of its input and its result, or of its result twice, in either direction."""
    return 2 * number_bytes * max(rows, cols)


# Products in FP8 (workers/quant/fp8_products.py) --------------------------------------------------

FP8_MULTIPLE = 16
"""Both dimensions of a weight are multiples of this."""
FP8_BACKWARD_BYTES = 3
"""Bytes per number of the gradient that a product's backward rounds: times the weight's scales, in
bf16, and rounded."""


def fp8_fits(rows: int, cols: int) -> bool:
    """Whether the hardware multiplies a weight [rows, cols]."""
    return rows % FP8_MULTIPLE == 0 and cols % FP8_MULTIPLE == 0


def fp8_backward_bytes(grads: int, inputs: int) -> int:
    """Bytes per token of a product's backward besides its result: its gradient, `grads` numbers,
    scaled and rounded, and the last input that was rounded, `inputs` numbers."""
    return FP8_BACKWARD_BYTES * grads + inputs


# Dropout (workers/layers/dropout.py) and fused layers (workers/layers/fused.py) -------------------

NORM_BACKWARD_COPIES = 5
"""fp32 copies of a norm's input that its backward by PyTorch's operations makes: for the product's
gradient, the mean's, and three for the power's."""


def dropout_bytes(inputs: int, number_bytes: int) -> int:
    """Bytes per token of a product's backward behind dropout: a mask, and the input without what is
    dropped."""
    return (1 + number_bytes) * inputs


def norm_kept_bytes(width: int, number_bytes: int, *, fused: bool) -> int:
    """Bytes per token of the input that a norm keeps: a copy in fp32, or by a kernel as it is."""
    return (number_bytes if fused else _FP32_BYTES) * width


def norm_backward_bytes(width: int, number_bytes: int, *, fused: bool) -> int:
    """Bytes per token that a norm's backward needs with what it keeps, and its gradients by a
    kernel."""
    kept = norm_kept_bytes(width, number_bytes, fused=fused)
    return kept + (2 * number_bytes * width if fused else NORM_BACKWARD_COPIES * kept)


def gate_kept(*, fused: bool) -> int:
    """How many tensors of a gated feed-forward's width are kept: gate, up, the product and, unless
    by a kernel, the gate's activation."""
    return 3 if fused else 4


# Moments of AdamW in 8 bits (workers/quant/dynamic8.py) -------------------------------------------

MOMENT_BLOCK = 128
"""Columns of a row whose codes share a scale."""
_LEAST_COLUMNS = 8
"""Of a matrix whose moments are kept in 8 bits: of fewer, a row's scale takes half of what its
numbers would."""


def moments_in_8_bits(cols: int) -> bool:
    """Whether moments of a matrix of so many columns are kept in 8 bits, if a job wants it."""
    return cols >= _LEAST_COLUMNS


def moments_bytes(rows: int, cols: int, *, in_8_bits: bool) -> int:
    """Bytes of both moments of a matrix."""
    if not (in_8_bits and moments_in_8_bits(cols)):
        return 8 * rows * cols
    return 2 * rows * (cols + 4 * -(-cols // MOMENT_BLOCK))


# Weights that are rounded with their adapter (workers/quant/served_forms.py) ----------------------

SERVED_BLOCK = {"cpu": 2**17, "cuda": 2**22}
"""Numbers of a weight that are rounded at a time: on a processor as many as its cache holds, on a
GPU enough to keep it busy."""
SERVED_BLOCK_BYTES = 36
"""Bytes for each of them meanwhile: the sum in fp64 and fp32, magnitudes, codes and values."""
SERVED_MOVED_BYTES = {
    **dict.fromkeys(("int4_g128", "int4_g64", "int4_g32", "fp8", "int8", "8da4w"), 98),
    "nvfp4": 177,
    "mxfp4": 164,
}
"""Form → bytes that rounding moves for each number of a weight in bf16: its 19 to 35 operations
read and write it in fp32, those of the sum in fp64. Counted (tests/workers/test_on_fake_cuda.py).
"""


def served_bytes(numel: int, number_bytes: int, *, gpu: bool, kept_sums: bool = False) -> int:
    """Bytes while a weight is made that is multiplied by: itself, and the block that is rounded.

    `kept_sums`: whether all sums in fp32 are there before the first is rounded, as in NVFP4, whose
    scale of the whole weight depends on all.
    """
    block = min(numel, SERVED_BLOCK["cuda" if gpu else "cpu"])
    sums = 4 * numel if kept_sums else 0
    return number_bytes * numel + sums + SERVED_BLOCK_BYTES * block
