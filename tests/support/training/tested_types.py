"""Model types of decoders that the tests hold to the published class (test_causal_types.py, test_composite_types.py)."""

TESTED = frozenset(
    {
        *("afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "bamba", "beam", "biogpt", "bitnet"),
        *("bloom", "chameleon", "codegen", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "cosmos3_edge_text"),
        *("ctrl", "cwm", "dbrx", "deepseek_ocr2_text", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4"),
        *("diffllama", "doge", "dots1", "dots3_note_text", "emu3_text_model", "ernie4_5", "ernie4_5_moe", "evolla", "exaone4"),
        *("exaone_moe", "falcon", "falcon_h1", "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "gemma3n_text"),
        *("gemma4_text", "gemma4_unified_text", "git", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text"),
        *("glm4v_text", "glm5_next_text", "glm_moe_dsa", "glm_ocr_text", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo"),
        *("gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granite", "granite4_vision_text", "granite_docling_text"),
        *("granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense"),
        *("hunyuan_v1_moe", "hunyuan_vl_text", "hy_v3", "hy_v4", "hyperclovax", "internlm3", "iquestcoder", "jais2", "jamba"),
        *("kimi_k2", "kimi_linear", "kolibri1", "laguna", "lfm2", "lfm2_moe", "lfm3", "llama", "llama4_text", "mellum"),
        *("mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral"),
        *("mistral4", "mistral_large4_text", "mixtral", "mllama_text_model", "modernbert-decoder", "moshi", "mpt"),
        *("muse_glimmer_text", "muse_spark_text", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3"),
        *(
            "olmo_hybrid",
            "olmoe",
            "openai-gpt",
            "opt",
            "paddleocr_vl_text",
            "persimmon",
            "phi",
            "phi3",
            "phi4_multimodal",
            "qwen2",
        ),
        *("qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_5_moe_text", "qwen3_5_text"),
        *("qwen3_moe", "qwen3_next", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text", "qwen4_exp_text", "seed_oss"),
        *("smollm3", "solar_open", "stablelm", "starcoder2", "step3p5", "vaultgemma", "xglm", "youtu", "zamba2", "zaya"),
    }
)
