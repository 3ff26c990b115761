"""Chat templates by name, for bases without one, written after those that each family has
published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_SYSTEM_FIRST = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set "
    "turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
)

TEMPLATES: Mapping[str, str] = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
        "message['content'] + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama-3": (
        "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
        "'<|end_header_id|>\\n\\n' "
        "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' "
        "}}{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}" + _SYSTEM_FIRST + "{% for message in turns %}"
        "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) "
        "+ '\\n' }}"
        "{% if loop.first and system %}{{ system | trim + '\\n\\n' }}{% endif %}"
        "{{ message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}"
        + _SYSTEM_FIRST
        + "{% for message in turns %}{% if message['role'] == 'assistant' %}"
        "{{ ' ' + message['content'] | trim + eos_token }}{% else %}"
        "{{ '[INST] ' + (system + '\\n\\n' if loop.first and system else '') + message['content'] "
        "+ ' [/INST]' }}"
        "{% endif %}{% endfor %}"
    ),
    "zephyr": (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + "
        "eos_token + '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    ),
    "vicuna": (
        "{{ bos_token }}"
        + _SYSTEM_FIRST
        + "{% if system %}{{ system + ' ' }}{% endif %}{% for message in turns %}"
        "{% if message['role'] == 'assistant' %}{{ 'ASSISTANT: ' + message['content'] + eos_token "
        "}}"
        "{% else %}{{ 'USER: ' + message['content'] + ' ' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
    ),
    "alpaca": (
        "{{ bos_token }}"
        + _SYSTEM_FIRST
        + "{% if system %}{{ system + '\\n\\n' }}{% endif %}{% for message in turns %}"
        "{% if message['role'] == 'assistant' %}{{ '### Response:\\n' + message['content'] + "
        "eos_token + '\\n\\n' }}"
        "{% else %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}{% endif %}{% "
        "endfor %}"
        "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
    ),
}
"""Name → text. The last three end a turn with the base's end of text and need no special token; the
others need a base whose tokenizer has their tokens.
"""

_NAME = re.compile(r"[A-Za-z0-9._-]+")


def named_template(given: str) -> str:
    """The text of a template that is given by name or as text."""
    return TEMPLATES.get(given, given)


def check_template(given: str) -> str:
    """Return the name or text of a template unchanged. Raises ValueError for anything else."""
    if given in TEMPLATES or "{{" in given or "{%" in given:
        return given
    names = ", ".join(TEMPLATES)
    what = (
        "no standard template has this name"
        if _NAME.fullmatch(given)
        else "is not a template: it has no {{ and no {%"
    )
    raise ValueError(f"{what}; there are {names}, or give a template's text")
