"""The process that has imported this before transformers is one without torchao, as every rank is,
and imports as quickly: it collects no garbage until it calls `end_imports`.
"""

from __future__ import annotations

from ft_service.host.quick_imports import begin_imports
from workers.patches.absent_torchao import keep_torchao_out

keep_torchao_out()
begin_imports()
