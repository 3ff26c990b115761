"""The process that has imported this before transformers is one without torchao, as every rank is."""

from __future__ import annotations

from workers.patches.absent_torchao import keep_torchao_out

keep_torchao_out()
