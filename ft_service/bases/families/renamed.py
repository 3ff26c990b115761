"""Families whose files only call things by other names than their model does."""

from ft_service.bases.families.family import DEFAULT, Family

AXK2 = Family(
    types=("axk2",),
    renamed={r"\bW_down\.": "mlp.fc1.", r"\bW_up\.": "mlp.fc2.", r"\bself_attn\.q_b_proj\.": "self_attn.q_gate_proj."},
)
BAILING = Family(
    types=("bailing_hybrid",),
    renamed={
        r"\bword_embeddings\.": "embed_tokens.",
        r"\.attention\.": ".self_attn.",
        r"\bself_attn\.(f_proj|dt_bias|A_log)\b": r"self_attn.forget_gate.\1",
        r"\b[qkv]_conv1d\.": "conv1d.",
        r"\bself_attn\.dense\.": "self_attn.o_proj.",
        r"\bmlp\.gate\.expert_bias$": "mlp.gate.e_score_correction_bias",
    },
)
HUNYUAN_3 = Family(
    types=("hy_v3",),
    renamed={
        r"\bmlp\.router\.gate\.": "mlp.gate.",
        r"\bmlp\.shared_mlp\.": "mlp.shared_experts.",
        r"\bmlp\.expert_bias$": "mlp.gate.e_score_correction_bias",
    },
)
HUNYUAN_4 = Family(types=("hy_v4",), renamed={r"\.linear_gate\b": ".gate_proj", r"\.learnable_sink_param$": ".sinks"})
LAGUNA = Family(
    types=("laguna",),
    renamed={
        r"\bmlp\.experts\.e_score_correction_bias$": "mlp.gate.e_score_correction_bias",
        r"\bmlp\.shared_expert\.": "mlp.shared_experts.",
    },
    parameters=("e_score_correction_bias",),
    names_in_adapter={".mlp.shared_experts.": ".mlp.shared_expert."},
)
LFM3 = Family(types=("lfm3",), renamed={r"\bself_attn\.gate_proj\.": "self_attn.g_proj."})
KOLIBRI = Family(types=("kolibri1",), renamed={r"\bmoe\.router\.expert_bias$": "mlp.gate.e_score_correction_bias"})
COSMOS_3 = Family(
    types=("cosmos3_edge", "cosmos3_omni"),
    renamed={r"\.to_([qkv])\.": r".\1_proj.", r"\.to_out\.": ".o_proj.", r"\.norm_([qk])\.": r".\1_norm."},
)
COSMOS_3_EDGE = Family(
    types=("cosmos3_edge_text",),
    renamed={**COSMOS_3.renamed, r"\bmlp\.up_proj\.": "mlp.fc1.", r"\bmlp\.down_proj\.": "mlp.fc2."},
)
MISTRAL_LARGE_4 = Family(
    types=("mistral_large4", "mistral_large4_text"),
    renamed={
        r"^model\.language_model\.output\.": "lm_head.",
        r"\btok_embeddings\.": "embed_tokens.",
        r"\blerope\.alpha$": "rotary_emb.alpha",
        r"\.attention\.": ".self_attn.",
        r"\.attention_norm\.": ".input_layernorm.",
        r"\.ffn_norm\.": ".post_attention_layernorm.",
        r"\.kv_a_norm\.": ".kv_a_layernorm.",
        r"\bself_attn\.wq\.": "self_attn.q_proj.",
        r"\bself_attn\.wo\.": "self_attn.o_proj.",
        r"\.wkv_a_with_mqa\.": ".kv_a_proj_with_mqa.",
        r"\.wkv_b\.": ".kv_b_proj.",
        r"\.ssmax_scaling\.s$": ".softmax_scaling.scale",
        r"\.ssmax_scaling\.b$": ".softmax_scaling.bias",
        r"\.feed_forward\.": ".mlp.",
        r"\.(gate|experts|shared_experts)\.": r".mlp.\1.",
        r"\.(mlp|shared_experts)\.w1\.": r".\1.gate_proj.",
        r"\.(mlp|shared_experts)\.w2\.": r".\1.down_proj.",
        r"\.(mlp|shared_experts)\.w3\.": r".\1.up_proj.",
    },
    names_in_adapter={".mlp.shared_experts.": ".shared_experts.", ".mlp.experts.": ".experts."},
)
MINIMAX_3 = Family(
    types=("minimax_m3_vl",),
    renamed={
        **DEFAULT.renamed,
        r"\b(mlp|shared_experts)\.(gate|up)_proj\.": r"\1.gate_up_proj.",
        r"\bself_attn\.index_([qk])_(proj|norm)\.": r"self_attn.indexer.\1_\2.",
    },
)
DEEPSEEK_OCR = Family(
    types=("deepseek_ocr2",),
    names_in_adapter={"base_model.model.model.language_model.": "base_model.model.model."},
)
QIANFAN = Family(types=("qianfan_ocr",), renamed={r"\bencoder\.layers\.": "layers."})
FAMILIES = (
    AXK2,
    BAILING,
    COSMOS_3,
    COSMOS_3_EDGE,
    DEEPSEEK_OCR,
    MINIMAX_3,
    QIANFAN,
    HUNYUAN_3,
    HUNYUAN_4,
    KOLIBRI,
    LAGUNA,
    LFM3,
    MISTRAL_LARGE_4,
)
