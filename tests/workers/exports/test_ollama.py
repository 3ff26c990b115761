"""Chat templates in Ollama's language: said only where they write the same."""

from __future__ import annotations

from collections.abc import Sequence

import jinja2

from workers.exports.ollama import Message, Render, modelfile, turns_of

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_DEFAULT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    + CHATML
)
LLAMA_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% else %}{{ raise_exception('no') }}{% "
    "endif %}{% endfor %}"
)
COUNTING = "{% for m in messages %}{{ loop.index }} {{ m.role }}: {{ m.content }}\n{% endfor %}"


def render(template: str) -> Render:
    def fail(message: str) -> None:
        raise ValueError(message)

    compiled = jinja2.Environment().from_string(template)

    def text(messages: Sequence[Message], answer: bool) -> str:
        return compiled.render(
            messages=messages, add_generation_prompt=answer, bos_token="<s>", raise_exception=fail
        )

    return text


def test_turns_with_fixed_text_around_them_become_a_template() -> None:
    text = modelfile(["FROM ./model.gguf"], turns_of(render(CHATML), "<s>"))
    assert text == (
        'FROM ./model.gguf\nTEMPLATE """{{ range .Messages }}'
        '{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
        '{{ end }}{{ end }}<|im_start|>assistant\n"""\nPARAMETER stop "<|im_end|>"\n'
    )


def test_a_default_for_the_system_message_stays() -> None:
    assert "{{ if not .System }}<|im_start|>system\nBe kind.<|im_end|>\n{{ end }}" in modelfile(
        [], turns_of(render(WITH_DEFAULT), "<s>")
    )


def test_a_beginning_of_text_is_left_to_ollama_and_a_role_that_is_refused_is_left_out() -> None:
    turns = turns_of(render(LLAMA_2), "<s>")
    assert turns is not None
    assert (turns.bos, set(turns.around)) == ("<s>", {"user", "assistant"})
    assert "<s>" not in modelfile([], turns)


def test_a_template_that_does_more_is_not_said_at_all() -> None:
    assert turns_of(render(COUNTING), "<s>") is None
    assert "cannot be said in Ollama's language" in modelfile([], None)
