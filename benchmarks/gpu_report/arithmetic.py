"""Least work of a step of LoRA training on a frozen base, and so the most tokens a second."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.bases import Llama


@dataclass(frozen=True)
class Work:
    """Parameters, and the widths that attention's work follows from."""

    linears: int
    """Of all decoder layers' linears."""
    head: int
    adapters: int
    layers: int
    width: int
    """Heads times their dimension."""

    @classmethod
    def of(cls, llama: Llama, rank: int) -> Work:
        """`rank`: of adapters on every linear layer but the head."""
        shapes = llama.shapes_of_layer().values()
        return cls(
            linears=llama.layers * sum(rows * cols for rows, cols in shapes),
            head=llama.vocabulary * llama.hidden,
            adapters=llama.layers * rank * sum(rows + cols for rows, cols in shapes),
            layers=llama.layers,
            width=llama.hidden,
        )

    def flops_per_token(self, length: float) -> float:
        """Of a forward and backward without recomputation, causal samples of `length` tokens, all
        of them targets.

        A frozen weight takes 2 operations forward and 2 backward, a trained one 6, causal attention
        6 times layers, width and length: of samples of several lengths the sum of their squares
        over that of themselves.
        """
        return (
            4 * (self.linears + self.head)
            + 6 * self.adapters
            + 6 * self.layers * self.width * length
        )
