"""Profile of a step: the kernels and the host's operations that its time goes to, what adapters
take of it, and how long the device has nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_report.ceilings import synchronize
from benchmarks.gpu_report.jobs import alone, built_once, prepare, steps_alone, train_on
from benchmarks.gpu_report.sections import Context
from benchmarks.gpu_report.speed_job import RANK, Shape, job, shapes_of

FIRST = 3
LAST = 5
"""Steps behind which profiling begins and ends."""
KERNELS = 15
OPERATIONS = 15
"""Of the host: operators, and calls of CUDA's."""
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")
RANKS = {RANK, 2 * RANK, 3 * RANK}
"""Of the adapters of one product: those of gate and up, or of q, k and v, are multiplied as one."""


def measure(context: Context) -> None:
    for precision in ("nf4",) if context.tiny else ("nf4", "fp8"):
        for shape in shapes_of(context)[:1]:
            with context.rows.case(f"{precision}, {shape}") as numbers:
                numbers.update(profiled(context, precision, shape))


def profiled(context: Context, precision: str, shape: Shape) -> dict[str, Any]:
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if context.on_gpu else [])]
    profiler = profile(activities=kinds, record_shapes=True)

    def on_step(step: int) -> None:
        if step in (FIRST, LAST):
            synchronize()
            (profiler.start if step == FIRST else profiler.stop)()

    run = prepare(
        context.scratch / "runs" / f"profile-{precision}-{shape.tokens}",
        job(context, shape, precision, LAST + 1),
    )
    with alone(), steps_alone(), built_once(lambda: None):
        train_on(context.place, run, on_step=on_step)
    events = list(profiler.events() or ())
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    steps = LAST - FIRST
    adapters = [
        event for event in events if event.name in PRODUCTS and of_adapters(event.input_shapes)
    ]
    averages = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    for event in averages[:OPERATIONS]:
        own = {
            "ms_a_step": event.self_cpu_time_total / 1e3 / steps,
            "calls_a_step": event.count / steps,
        }
        context.rows.add(f"{precision}, {shape}, on the host: {event.key}", **own)
    if kernels:
        spans = [(event.time_range.start, event.time_range.end) for event in kernels]
        whole = max(end for _, end in spans) - min(start for start, _ in spans)
        for name, (count, time) in most(kernels):
            context.rows.add(
                f"{precision}, {shape}: {name}",
                ms_a_step=time / 1e3 / steps,
                calls_a_step=count / steps,
                share=time / whole,
            )
        return {
            "step_ms": whole / 1e3 / steps,
            "idle_share": 1 - covered(spans) / whole,
            "kernels_a_step": len(kernels) / steps,
            "adapters_ms": sum(event.self_device_time_total for event in adapters) / 1e3 / steps,
            "adapters_products": len(adapters) / steps,
        }
    return {
        "operators_a_step": sum(event.count for event in averages) / steps,
        "adapters_ms": sum(event.self_cpu_time_total for event in adapters) / 1e3 / steps,
        "adapters_products": len(adapters) / steps,
    }


def of_adapters(shapes: Sequence[Sequence[int]]) -> bool:
    """Whether a product of these matrices has an adapter's rank among its sizes: none of the base's
    is as small.
    """
    return any(size in RANKS for shape in shapes for size in shape)


def most(kernels: Sequence[Any]) -> list[tuple[str, tuple[int, float]]]:
    """The kernels that take most time: name, calls, microseconds."""
    by_name: dict[str, tuple[int, float]] = {}
    for event in kernels:
        count, time = by_name.get(event.name, (0, 0.0))
        by_name[event.name] = (count + 1, time + event.time_range.elapsed_us())
    return sorted(by_name.items(), key=lambda item: -item[1][1])[:KERNELS]


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
