"""Two examples at the end of each command's help; a test parses each by the command's own
options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXAMPLES: Mapping[str, tuple[str, str]] = {
    "submit": ("job.yaml --watch", "train.jsonl --model tiny-llama --suffix mine"),
    "jobs": ("--state running", "--name mine -n 5"),
    "get": ("last", "mine --json"),
    "watch": ("last", "mine"),
    "logs": ("last --follow", "mine --rank 0 -n 50"),
    "events": ("last", "mine -n 10"),
    "checkpoints": ("last", "mine --json"),
    "files": ("-n 10", "--json"),
    "compare": ("mine faster", "mine last --json"),
    "eval": ("last", "mine --suite arithmetic"),
    "rollouts": ("last", "mine --step 20 -n 4"),
    "pause": ("last", "--all"),
    "resume": ("last", "mine --nproc-per-node 2"),
    "cancel": ("last", "mine"),
    "rename": ("last refunds-v2", 'mine --note "The first with cleaned data"'),
    "rm": ("file-7T44Ba5A", "mine --job --yes"),
    "download": ("last --out my-adapter", "mine --checkpoint 50 --out step-50"),
    "sweep submit": ("sweep.yaml --watch", "sweep.yaml --set training.n_epochs=1"),
    "sweep list": ("-n 5", "--json"),
    "sweep show": ("last", "last --json"),
    "sweep cancel": ("last", "last --json"),
    "sweep rm": ("last --keep-best", "last --yes"),
    "engines": ("", "--json"),
    "plan": ("job.yaml --hardware RTX-4090", "job.yaml --set lora.r=64 --verbose"),
    "run": (
        "job.yaml --run-dir my-run",
        "train.jsonl --model tiny-llama --set training.max_steps=20",
    ),
    "convert": ("axolotl.yaml --gpus 8 --out job.yaml", "train.sh --gpus 1"),
    "data check": (
        "train.jsonl --model tiny-llama",
        "train.jsonl --validation validation.jsonl --drop clean.jsonl",
    ),
    "data show": ("train.jsonl --model tiny-llama -n 3", "train.jsonl --model tiny-llama --ids"),
    "data stats": (
        "train.jsonl --model tiny-llama",
        "train.jsonl --model tiny-llama --validation-split 0.1",
    ),
    "data convert": ("alpaca.csv train.jsonl", "chats.parquet train.jsonl --each-answer"),
    "data from-chats": (
        "--since 7d --label good -o chats.jsonl",
        "--as dpo --metadata app=support -o pairs.jsonl",
    ),
    "models": ("", "--json"),
    "pull": ("Qwen/Qwen3-8B", "--data HuggingFaceH4/no_robots"),
    "chat": ("last", 'mine "Where is parcel 7?" --compare'),
    "merge": (
        "last --to bf16 --out merged",
        "my-adapter --to fp8 --base models/my-base --out merged",
    ),
    "export": ("last --format gguf --out mine", "mine --format merged-int4 --out mine"),
    "verify": ("last", "my-adapter"),
    "serve": ("", "--port 8001"),
    "rollout serve": ("agent.py", "agent.py --port 8901 --secret-file secret"),
    "quickstart": ("", "--copy my-quickstart"),
    "open": ("", "last"),
    "mcp add": ("claude-code", "codex --variable MY_FT_KEY"),
    "mcp skill": ("", "--json"),
    "keys create": ("--name laptop --scope submit", "--scope read --expires-days 30"),
    "keys list": ("", "--project vision"),
    "keys rotate": ("key_7T44Ba5A", "key_7T44Ba5A --keep-hours 1"),
    "keys revoke": ("key_7T44Ba5A", "key_7T44Ba5A --json"),
    "login": ("https://ft.example.com", "https://ft.example.com --project proj_7T44Ba5A"),
    "logout": ("", "https://ft.example.com"),
    "projects create": ("vision", "vision --limit max_slots=8 --limit max_queued=200"),
    "projects list": ("", "--archived"),
    "projects update": ("proj_7T44Ba5A --limit max_slots=4", "proj_7T44Ba5A --limit max_slots="),
    "projects archive": ("proj_7T44Ba5A", "proj_7T44Ba5A --json"),
    "projects delete": ("proj_7T44Ba5A", "proj_7T44Ba5A --yes"),
    "audit": ("-n 20", "--project vision"),
    "prune": ("--dry-run", "--checkpoints-days 30"),
    "doctor": ("", "--json"),
    "reconcile": ("", "--json"),
    "migrate": ("", "--json"),
    "version": ("", "--json"),
}
"""Name of a command, without `ft` → what follows it."""


def add_examples(command: Any, name: str) -> None:
    """Put its examples below the help of a command, or of each command of a group."""
    for part, below in getattr(command, "commands", {}).items():
        add_examples(below, f"{name} {part}")
    if name in EXAMPLES:
        lines = (f"ft {name} {rest}".rstrip() for rest in EXAMPLES[name])
        command.epilog = "\n\n".join(("Examples:", *lines))
