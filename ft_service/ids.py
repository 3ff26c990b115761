"""Identifiers in the shapes that OpenAI's clients know. They sort in no useful order; lists are ordered by creation."""

from __future__ import annotations

import secrets
import string

_ALPHABET = string.ascii_letters + string.digits


def new_id(prefix: str) -> str:
    """`prefix` and 24 random letters and digits (about 143 bits): `file-…`, `ftjob-…`, `ftckpt_…`, `ftevent-…`."""
    return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(24))
