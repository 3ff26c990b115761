"""llama.cpp reads a GGUF file: `python llama_cpp.py`, with a request on stdin, by the bindings
`llama_cpp_py_sync`.

{model, adapter, ids, texts} in; {logits, ids, version} out: the logits after each of `ids`, as
little-endian fp32 in base64, and the tokens of each text without special tokens.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import numpy as np


def main() -> None:
    import llama_cpp_py_sync  # pyright: ignore[reportMissingImports]  # where it is installed
    from llama_cpp_py_sync._cffi_bindings import ffi, get_lib  # pyright: ignore[reportMissingImports]

    asked = json.load(sys.stdin)
    lib = get_lib()
    said: list[str] = []

    def note(level: int, text: Any, data: Any) -> None:
        said.append(ffi.string(text).decode(errors="replace").strip())

    hears = ffi.callback("void(enum ggml_log_level, const char *, void *)", note)
    lib.llama_log_set(hears, ffi.NULL)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(
        asked["model"].encode(), lib.llama_model_default_params()
    )
    if model == ffi.NULL:
        raise SystemExit(f"llama.cpp does not load the model: {said[-6:]}")
    vocab = lib.llama_model_get_vocab(model)
    logits = _logits(ffi, lib, model, asked) if asked["ids"] else b""
    told = [_tokens(ffi, lib, vocab, text) for text in asked["texts"]]
    version = llama_cpp_py_sync.__version__
    print(
        json.dumps({"logits": base64.b64encode(logits).decode(), "ids": told, "version": version})
    )


def _logits(ffi: Any, lib: Any, model: Any, asked: dict[str, Any]) -> bytes:
    ids = asked["ids"]
    settings = lib.llama_context_default_params()
    settings.n_ctx = 256
    settings.n_batch = 256
    settings.n_threads = 1
    settings.n_threads_batch = 1
    settings.type_k = settings.type_v = 0  # fp32, as the reference has them
    settings.flash_attn_type = 0
    context = lib.llama_init_from_model(model, settings)
    if asked["adapter"]:
        adapter = lib.llama_adapter_lora_init(model, asked["adapter"].encode())
        if adapter == ffi.NULL:
            raise SystemExit("llama.cpp does not load the adapter")
        lib.llama_set_adapters_lora(
            context,
            ffi.new("struct llama_adapter_lora *[1]", [adapter]),
            1,
            ffi.new("float[1]", [1.0]),
        )
    batch = lib.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for place, token in enumerate(ids):
        batch.token[place], batch.pos[place], batch.n_seq_id[place], batch.logits[place] = (
            token,
            place,
            1,
            1,
        )
        batch.seq_id[place][0] = 0
    if lib.llama_decode(context, batch) != 0:
        raise SystemExit("llama.cpp does not decode")
    words = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    rows = [
        np.frombuffer(ffi.buffer(lib.llama_get_logits_ith(context, i), 4 * words), np.float32)
        for i in range(len(ids))
    ]
    return np.stack(rows).astype("<f4").tobytes()


def _tokens(ffi: Any, lib: Any, vocab: Any, text: str) -> list[int]:
    body = text.encode()
    room = ffi.new(f"llama_token[{len(body) + 16}]")
    count = lib.llama_tokenize(vocab, body, len(body), room, len(body) + 16, False, False)
    return [room[i] for i in range(count)]


if __name__ == "__main__":
    main()
