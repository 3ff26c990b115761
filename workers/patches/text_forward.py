"""Text passed straight through a published class of several models to its decoder: the classes
between them mix in the towers.

Replaces: the forward of a published class and of what stands between its head and its decoder;
`get_output_embeddings` and `get_input_embeddings` of a class that leaves them to a part of it.
Written for: transformers 5.23
Fails when upstream changes: tests/workers/patches/test_text_forward.py
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from workers.patches.forward import replace_forward


def answer_as(model: Any, writer: Any) -> None:
    """Let a published class name the embeddings of that part of it that holds its head."""
    model.get_output_embeddings = writer.get_output_embeddings
    model.get_input_embeddings = writer.get_input_embeddings


def pass_text_through(model: Any, decoder: nn.Module, head: nn.Module) -> None:
    """Let text go from the published class's forward straight to its decoder.

    The class that holds decoder and head does with the logits what it always does.
    """
    holder = model
    while True:
        within = [
            c
            for c in holder.children()
            if {id(decoder), id(head)} <= {id(inner) for inner in c.modules()}
        ]
        if not within:
            break
        holder = within[0]
    if holder is not model:
        replace_forward(model, _Passing(holder))
    between = next(
        child for child in holder.children() if any(inner is decoder for inner in child.modules())
    )
    if between is not decoder:
        replace_forward(between, _Passing(decoder, as_text=True))


class _Passing:
    """A forward that gives ids and positions to another module.

    No submodule: that one keeps its one name.
    """

    def __init__(self, module: nn.Module, *, as_text: bool = False) -> None:
        self._module = module
        self._as_text = as_text

    def __call__(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Any = None,
        **_: Any,
    ) -> Any:
        done = self._module(
            input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask
        )
        return _TextOutput(done.last_hidden_state) if self._as_text else done


class _TextOutput:
    """A decoder's output as the published class looks at it: what towers would add is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
