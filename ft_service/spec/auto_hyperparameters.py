"""The learning rate, the batch size and the number of epochs for "auto". Pure.

The learning rate: as measured by "LoRA Without Regret" (Thinking Machines, 2025) over fourteen
models and put into tinker-cookbook's hyperparam_utils: ten times full fine-tuning's 5e-5, times
(2000 / width) to a power that depends on the family. This holds for the scaling alpha / r with
alpha 32, where the best rate hardly depends on the rank. The adapter's early change of the output
grows with scaling times rate, so that another scaling needs another rate.

The batch size: 0.2 % of the training file's samples, as OpenAI's fine-tuning API has documented its
own default, as a power of two. OpenAI stops at 256; we stop at 32, the batch of that article's
experiments, since it finds that LoRA loses more than full fine-tuning does as batches grow,
whatever the rank. Never below 4, nor below the number of ranks, which would leave some idle.

Epochs: 3, but enough to see 100 samples (at most 25 epochs), and few enough to see no more than
25,000 (at least one), as OpenAI's cookbook for preparing chat data estimates its default. Of
preference optimisation 1: further passes learn pairs by heart.
"""

from __future__ import annotations

import math

from ft_service.spec.methods import PREFERENCE_METHODS, MethodType
from ft_service.spec.options import DPO_EPOCHS, REINFORCEMENT_EPOCHS, LoraOptions
from ft_service.wording import counted

OF_FULL_TRAINING = 5e-5
FOR_LORA = 10.0
WIDTH = 2000
ALPHA = 32.0
POWERS = {"llama": 0.781, "qwen": 0.0775}
"""Beginning of the model type → the power.

Other families take Llama's, the more careful one for wide models.
"""
MOST = 1e-2
"""Highest rate: measurements of widths from 2,000 on say little about the smallest models."""
BATCH_SHARE = 0.002
LEAST_BATCH = 4
MOST_BATCH = 32
EPOCHS = 3
MOST_EPOCHS = 25
LEAST_SEEN = 100
MOST_SEEN = 25_000
"""Samples that a training sees, over all epochs."""
COUNTED = 25_000
"""Number of samples to train on above which batch size and epochs no longer change; files with more
are not counted to their end, but estimated, since a part may be set aside for validation.
"""


def rate_for(model_type: str, hidden: int, lora: LoraOptions) -> tuple[float, str]:
    """The rate, with two digits, and the reason.

    `model_type`: that of the base's config.json; `hidden`: its width.
    """
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


def batch_for(samples: int, ranks: int) -> tuple[int, str]:
    """Samples (or pairs) per optimizer step, and the reason.

    `samples`: those of the training file, at most COUNTED.
    """
    exact = BATCH_SHARE * samples
    batch = min(MOST_BATCH, max(LEAST_BATCH, 2 ** round(math.log2(max(1.0, exact)))))
    why = f"0.2 % of {_how_many(samples)}, as a power of two from {LEAST_BATCH} to {MOST_BATCH}"
    if batch < ranks:
        return ranks, f"{why}, and one for each rank"
    return batch, why


def epochs_for(samples: int, method: MethodType) -> tuple[int, str]:
    """Passes over the training file, and the reason.

    `samples`: those of the training file, at most COUNTED.
    """
    if method == "reinforcement":
        return REINFORCEMENT_EPOCHS, "every prompt is answered several times in a pass"
    if method in PREFERENCE_METHODS:
        return (
            DPO_EPOCHS,
            "further passes of preference optimisation learn the answers by heart",
        )
    seen = _how_many(samples)
    if samples * EPOCHS < LEAST_SEEN:
        epochs = min(MOST_EPOCHS, LEAST_SEEN // max(1, samples))
        return (
            epochs,
            f"{seen} {'is' if samples == 1 else 'are'} few: as many passes as see {LEAST_SEEN}, "
            f"at most {MOST_EPOCHS}",
        )
    if samples * EPOCHS > MOST_SEEN:
        return max(
            1, MOST_SEEN // samples
        ), f"{seen} are many: passes that see at most {MOST_SEEN:,}, at least one"
    return EPOCHS, f"usual for {seen}"


def _how_many(samples: int) -> str:
    return counted(samples, "sample") + (" or more" if samples >= COUNTED else "")
