"""What an inference server takes of an adapter, known before it is trained (`serve` in a create body)."""

from __future__ import annotations

from ft_service.errors import SpecError
from ft_service.spec.options import LoraOptions

RANK_STEPS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank."""
_MERGE = "leave serve out and merge the tuned model (ft merge)"


def check_served(serve: str | None, lora: LoraOptions) -> None:
    """Raises SpecError naming the option that the server would refuse, or ignore without a word."""
    if serve is None:
        return
    if lora.target_parameters:
        raise _refused(
            "target_parameters", lora.target_parameters, "it loads no adapters on stacks of experts. Leave them out, or"
        )
    for name in ("use_dora", "modules_to_save"):
        if given := getattr(lora, name, None):
            raise _refused(name, given, "it loads A and B of LoRA and nothing beside them. Leave it out, or")


def _refused(name: str, given: object, why: str) -> SpecError:
    return SpecError(f"lora.{name} = {given!r} with serve = 'vllm': {why} {_MERGE}.", param=f"lora.{name}", code="not_served")


def note_served(lora: LoraOptions) -> str:
    """What whoever runs the server needs to know."""
    rank = max([lora.r, *lora.rank_pattern.values()])
    step = next(step for step in RANK_STEPS if step >= rank)
    text = f"vLLM serves it with --enable-lora --max-lora-rank {step} or more."
    if lora.rank_pattern or lora.alpha_pattern:
        text += f" It reads no patterns: the adapter is handed over padded to rank {rank}, each module's scale folded in."
    return text
