"""Gated delta nets whose files hold a convolution for each of queries, keys and values, where the model has one."""

from ft_service.bases.families.family import Family

_CONVOLUTIONS = {r"\.[qkv]_conv1d\.": ".conv1d."}
OLMO = Family(
    types=("olmo_hybrid",),
    renamed={
        **_CONVOLUTIONS,
        r"\battention_layer_norm\b": "input_layernorm",
        r"\bfeedforward_layer_norm\b": "post_attention_layernorm",
    },
)
KIMI = Family(
    types=("kimi_linear",),
    renamed={
        **_CONVOLUTIONS,
        r"\.block_sparse_moe\.": ".mlp.",
        r"\bself_attn\.(f_a_proj|f_b_proj|dt_bias|A_log)\b": r"self_attn.forget_gate.\1",
    },
)
GLM_5_NEXT = Family(
    types=("glm5_next", "glm5_next_text"),
    renamed={
        **_CONVOLUTIONS,
        r"\bself_attn\.(f_a_proj|f_b_proj|dt_bias|A_log)\b": r"self_attn.forget_gate.\1",
        r"\.hc_(attn|ffn)_(fn|base|scale)$": r".\1_hc.\2",
    },
)
