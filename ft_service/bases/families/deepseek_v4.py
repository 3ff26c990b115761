"""DeepSeek V4: names of its own for nearly everything, and a table from a token to its experts."""

from ft_service.bases.families.family import Family

FAMILY = Family(
    types=("deepseek_v4",),
    renamed={
        r"^(?:model\.)?embed\.": "model.embed_tokens.",
        r"^(?:model\.)?head\.": "lm_head.",
        r"^(?:model\.)?norm\.": "model.norm.",
        r"^(?:model\.)?hc_head_": "model.hc_head.hc_",
        r"^layers\.": "model.layers.",
        r"\.attn\.": ".self_attn.",
        r"\.ffn\.": ".mlp.",
        r"\.attn_norm\.": ".input_layernorm.",
        r"\.ffn_norm\.": ".post_attention_layernorm.",
        r"\.indexer\.compressor\.": ".compressor.indexer.",
        r"\.indexer\.weights_proj\.": ".compressor.indexer.scorer.weights_proj.",
        r"\.indexer\.wq_b\.": ".compressor.indexer.q_b_proj.",
        r"\.hc_(attn|ffn)_(fn|base|scale)$": r".\1_hc.\2",
        r"\.attn_sink$": ".sinks",
        r"\.wq_a\.": ".q_a_proj.",
        r"\.wq_b\.": ".q_b_proj.",
        r"\.wkv\.": ".kv_proj.",
        r"\.wgate\.": ".gate_proj.",
        r"\.wo_a\.": ".o_a_proj.",
        r"\.wo_b\.": ".o_b_proj.",
        r"\.q_norm\.": ".q_a_norm.",
        r"(\.self_attn\..*)\.?\bnorm\.": r"\1kv_norm.",
        r"\.ape$": ".position_bias",
        r"\.shared_experts\.w1\.": ".shared_experts.gate_proj.",
        r"\.shared_experts\.w2\.": ".shared_experts.down_proj.",
        r"\.shared_experts\.w3\.": ".shared_experts.up_proj.",
        r"\.gate\.bias$": ".gate.e_score_correction_bias",
    },
    other_layers=("o_a_proj",),
)
