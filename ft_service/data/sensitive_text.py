"""Secrets and personal data in text, by patterns that rarely meet anything else: keys with fixed
beginnings, private keys, e-mail addresses, and card and account numbers whose check digits are
right. What is found is named by its kind and never shown. Pure.

Names, telephone numbers and postal addresses need a model of the language and are not looked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from ft_service.data.sample_kinds import Picture

_IBANS = (
    "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 "
    "EE20 EG29 "
    "ES24 FI18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 "
    "KW30 KZ20 "
    "LB28 LC32 LI21 LT20 LU20 LV21 MC27 MD24 ME22 MK19 MT31 MU30 NL18 NO15 PK24 PL28 PS29 PT25 "
    "QA29 RO24 "
    "RS22 SA24 SC31 SE24 SI19 SK24 SM27 ST25 SV28 TN24 TR26 UA29 VA22 VG24 XK20"
)
"""Countries, each with the characters of its account numbers (ISO 13616)."""
_IBAN_LENGTHS: Mapping[str, int] = {text[:2]: int(text[2:]) for text in _IBANS.split()}
_MADE_UP = re.compile(
    r"@(?:[\w-]+\.)*(?:example\.(?:com|org|net|edu)|(?:\w+\.)?(?:example|invalid|test|localhost))\Z"
)
"""The end of addresses that nobody has (RFC 2606)."""


def _is_address(text: str) -> bool:
    return _MADE_UP.search(text.lower()) is None


def _is_card(text: str) -> bool:
    """Luhn's sum, of digits that are not all the same."""
    digits = [int(sign) for sign in text if sign.isdigit()]
    doubled = (
        sum(divmod(2 * digit, 10)) if place % 2 else digit
        for place, digit in enumerate(reversed(digits))
    )
    return len(set(digits)) > 1 and sum(doubled) % 10 == 0


def _is_iban(text: str) -> bool:
    """The remainder of ISO 7064, of as many characters as the country's numbers have."""
    signs = text.replace(" ", "")
    length = _IBAN_LENGTHS.get(signs[:2], 0)
    if not length or len(signs) < length:
        return False
    turned = signs[4:length] + signs[:4]
    return int("".join(str(int(sign, 36)) for sign in turned)) % 97 == 1


_KINDS: Sequence[tuple[str, str, Callable[[str], bool] | None]] = (
    ("a private key", r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----", None),
    ("a key of AWS", r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b", None),
    (
        "a key of OpenAI, Anthropic or a like service",
        r"\bsk-(?:proj-|svcacct-|ant-|or-)?[A-Za-z0-9_-]{20,}",
        None,
    ),
    ("a token of GitHub", r"\b(?:gh[opsru]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,})", None),
    ("a token of GitLab", r"\bglpat-[A-Za-z0-9_-]{20,}", None),
    ("a token of Hugging Face", r"\bhf_[A-Za-z0-9]{30,}\b", None),
    ("a token of Slack", r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}", None),
    ("a key of Google", r"\bAIza[A-Za-z0-9_-]{35}", None),
    ("a key of Stripe", r"\b[rs]k_live_[A-Za-z0-9]{16,}\b", None),
    (
        "a token of npm or PyPI",
        r"\b(?:npm_[A-Za-z0-9]{36}\b|pypi-AgEIcHlwaS5vcmc[A-Za-z0-9_-]{16,})",
        None,
    ),
    (
        "a signed token (JWT)",
        r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
        None,
    ),
    ("a password within a URL", r"\b[a-z][a-z0-9+.-]{1,20}://[^\s/:@]{1,64}:[^\s/:@]{1,64}@", None),
    (
        "an e-mail address",
        r"\b[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b",
        _is_address,
    ),
    (
        "a card's number",
        r"(?<![\w.-])(?<![0-9] )[3-6][0-9]{3}(?:[ -]?[0-9]){9,15}(?![\w-]| [0-9])",
        _is_card,
    ),
    (
        "an account's number (IBAN)",
        r"\b[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b",
        _is_iban,
    ),
)
"""Kind, its pattern, and what else must be true of it."""
_PATTERNS = [(kind, re.compile(pattern), check) for kind, pattern, check in _KINDS]


def sensitive_kinds(record: Any) -> list[str]:
    """The kinds of secrets and personal data in a record's texts, each once."""
    texts = list(_texts(record))
    return [
        kind
        for kind, pattern, check in _PATTERNS
        if any(_holds(text, pattern, check) for text in texts)
    ]


def _holds(text: str, pattern: re.Pattern[str], check: Callable[[str], bool] | None) -> bool:
    return any(check is None or check(found[0]) for found in pattern.finditer(text))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for inner in value.values() for text in _texts(inner))
    elif isinstance(value, list | tuple):
        yield from (text for inner in value for text in _texts(inner))
    elif is_dataclass(value) and not isinstance(value, Picture):
        yield from (text for own in fields(value) for text in _texts(getattr(value, own.name)))
