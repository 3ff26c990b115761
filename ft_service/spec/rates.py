"""The learning rate that "auto" stands for. Pure.

As measured by "LoRA Without Regret" (Thinking Machines, 2025) over fourteen models and put into tinker-cookbook's
hyperparam_utils: ten times full fine-tuning's 5e-5, times (2000 / width) to a power that depends on the family. That is for the
scaling alpha / r with alpha 32, by which the best rate hardly depends on the rank; what an adapter adds early in training grows
with scaling times rate, so that another scaling takes another rate.
"""

from __future__ import annotations

from ft_service.spec.options import LoraOptions

OF_FULL_TRAINING = 5e-5
FOR_LORA = 10.0
WIDTH = 2000
ALPHA = 32.0
POWERS = {"llama": 0.781, "qwen": 0.0775}
"""Beginning of the model type → the power. Other families take Llama's, which is the more careful one of wide models."""
MOST = 1e-2
"""No rate above this: what holds of widths from 2,000 on says little of the smallest."""


def rate_for(model_type: str, hidden: int, lora: LoraOptions) -> tuple[float, str]:
    """The rate, of two digits, and why. `model_type`: as in the base's config.json; `hidden`: its width."""
    family = next((family for family in POWERS if model_type.startswith(family)), None)
    power = POWERS[family or "llama"]
    alpha = lora.lora_alpha * (lora.r**0.5 if lora.use_rslora else 1.0)
    exact = OF_FULL_TRAINING * FOR_LORA * (WIDTH / hidden) ** power * ALPHA / alpha
    rate = float(f"{min(exact, MOST):.1e}")
    of = f"{model_type}'s" if family else f"Llama's, since none was measured for {model_type};"
    why = f"LoRA Without Regret: 5e-4 · ({WIDTH} / {hidden})^{power} with {of} power"
    if alpha != ALPHA:
        why += f", times {ALPHA:g} / {alpha:g} for the adapter's scaling"
    return rate, why + (f", at most {MOST:g}" if exact > MOST else "")
