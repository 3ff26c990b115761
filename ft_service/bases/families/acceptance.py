"""Which architectures can be tuned, by config.json alone: the one rule, for a submit, the plan and the worker.

What is refused here is what would give wrong numbers without a word, or could not be built. Everything else is tuned by general
rules; what no test knows is said (`untested`), and the worker tries it before it trains.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ft_service.bases.config_values import refuse_values
from ft_service.bases.families.known import family_of
from ft_service.bases.families.tested import TESTED
from ft_service.bases.published_layouts import quantization_of
from ft_service.bases.wrapped import NO_DECODER, NOT_TEXT, generates, not_tunable, text_config, text_section
from ft_service.errors import SpecError

BOTH_WAYS = frozenset(
    {
        *("bert", "bert-generation", "big_bird", "camembert", "cpmant", "data2vec-text", "electra", "ernie", "megatron-bert"),
        *(
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xlnet",
        ),
        *("reformer", "xmod", "modernbert", "nomic_bert", "deberta", "deberta-v2", "distilbert", "albert", "mpnet", "esm"),
        *("neobert", "eurobert", "jina_embeddings_v3", "luke", "mobilebert", "ibert", "fnet", "nystromformer", "yoso"),
    }
)
"""Model types in which a token sees those behind it."""
PAIRS = frozenset(
    {
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "musicgen", "musicgen_melody", "mvp"),
        *("pegasus", "plbart", "prophetnet", "trocr", "whisper", "t5", "mt5", "umt5", "t5gemma", "led", "m2m_100", "longt5"),
        *("florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop", "vision-encoder-decoder"),
    }
)
"""Model types of an encoder and a decoder that reads what the encoder says."""
OTHERS = {
    "phimoe": "its router draws experts at random in training: no step could be repeated, and no resume be exact",
    "openai-gpt": "its layers are convolutions of width one in place of linear layers",
    "longcat_flash": "some of its experts are the token itself, and each layer holds two",
    "hrm_text": "it goes through its layers several times",
    **dict.fromkeys(("inkling_text", "inkling_mm_model"), "its shared experts are stacks"),
    **dict.fromkeys(("inkling2_text", "inkling2"), "its experts are stored in a layout of their own"),
    "zamba": "its time steps come from stacks of matrices that are no experts",
    "blt": "it groups bytes into patches by a model of its own",
    "recurrent_gemma": "its recurrence holds stacks of matrices that are no experts",
    **dict.fromkeys(
        ("ernie4_5_vl_moe", "ernie4_5_vl_moe_text"), "its experts for text and those for images are stored in one row"
    ),
    "phi4mm": "its code comes with its files, and is not run; the same base in the layout of Transformers is phi4_multimodal",
    "unlimited_ocr": "it sees all that it has written while it is trained, and through a window while it answers",
    "nemo_speechlm": "its files call its text part by names of their own",
    "voxtral_realtime": "its text part is told how far it lags behind what it hears",
    **dict.fromkeys(("molmo2", "molmo2_text"), "its files hold queries, keys and values as one"),
    "jetmoe": "its attention is a mixture of experts as well",
    **dict.fromkeys(
        ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), "it has no attention at all, which memory and time are planned by"
    ),
}
"""Model type → why it cannot be tuned."""
_OTHER_HEAD = re.compile(
    r"For(MaskedLM|SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice|PreTraining|RewardModel)$"
)


def refuse_untunable(config: Mapping[str, Any]) -> None:
    """Raises SpecError for a base that, by its config.json, cannot be tuned: it does not read from left to right, is made of
    what is not known here, or of values that make no model.
    """
    kind = str(config.get("model_type"))[:80]
    named = config.get("architectures")
    classes = [str(name)[:80] for name in named] if isinstance(named, list) else []
    several = text_section(config) is not None
    of_text = text_config(config)
    inner = str(of_text.get("model_type"))[:80]
    if kind in PAIRS or inner in PAIRS or True in (config.get("is_encoder_decoder"), of_text.get("is_encoder_decoder")):
        raise _refusal(kind, "which is no causal language model: its decoder reads what an encoder makes of the input")
    if kind in NOT_TEXT:
        raise not_tunable(kind, NOT_TEXT[kind])
    if several and classes and not any(generates(name) for name in classes):
        raise not_tunable(kind, NO_DECODER)
    if kind in BOTH_WAYS or inner in BOTH_WAYS:
        raise _refusal(kind, "which is no causal language model: its tokens see those behind them")
    if of_text.get("use_bidirectional_attention") in (True, "all"):
        raise _refusal(kind, "whose config.json says use_bidirectional_attention: its tokens see those behind them")
    why = OTHERS.get(kind) or OTHERS.get(inner)
    if why is not None:
        raise _refusal(kind, f"and cannot be tuned here: {why}")
    if inner == "zamba2" and _shares_blocks(of_text):
        raise _refusal(kind, "and cannot be tuned here: several of its layers are one block, which its files hold once")
    if family_of(config).turned and quantization_of(config) is not None:
        raise _refusal(kind, "published quantised, whose matrices would be read the other way round")
    heads = [name for name in classes if _OTHER_HEAD.search(name)]
    if heads and len(heads) == len(classes):
        raise _refusal(kind, f"published as {heads[0]}, whose head writes no text")
    refuse_values(of_text, tested=inner in TESTED)


def _shares_blocks(text: Mapping[str, Any]) -> bool:
    """True if a Zamba2 has more layers with attention than blocks of it."""
    kinds, blocks = text.get("layers_block_type"), text.get("num_mem_blocks", 1)
    return not isinstance(kinds, list) or kinds.count("hybrid") > (blocks if isinstance(blocks, int) else 1)


def untested(config: Mapping[str, Any]) -> str | None:
    """What is to be said of a base whose decoder no test of this version knows. None: one does."""
    kind = str(text_config(config).get("model_type"))[:80]
    if kind in TESTED:
        return None
    return (
        f"No test of this version knows bases of model type {kind!r}: it is tuned by the general rules, and tried before "
        "training (whether tokens see those behind them, and packed samples each other). Compare answers before and after "
        "(evaluation)."
    )


def _refusal(kind: str, why: str) -> SpecError:
    return SpecError(
        f"The base is a {kind} model, {why}. Use a decoder such as Llama, Qwen, Gemma or Mistral; docs/models.md has a list.",
        param="model",
    )
