"""Conversations rendered in a process of its own: as transformers renders, within limits, and one
bad one costs no other.
"""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from ft_service.data import limited_process
from ft_service.data.limited_process import RenderLimits
from ft_service.data.line_errors import LineError
from ft_service.data.template_process import TemplateProcess
from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.data.tokens.tokenize import load_tokenizer
from ft_service.host import processes
from ft_service.host.helper_process import HelperFailed, HelperProcess
from ft_service.shared_work.losses import TRIES

TINY = Path(__file__).parents[3] / "examples/models/tiny-llama"
HOSTILE = """\
{%- set said = messages[0].content %}
{%- if said == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}
{%- if said == 'compare' %}{% set of = namespace(one=[1], other=[1]) %}{% for n in range(30) %}
{% set of.one = [of.one, of.one] %}{% set of.other = [of.other, of.other] %}{% endfor %}{{ of.one == of.other }}{% endif %}
{%- if said == 'grow' %}{{ (said * 10 ** 9) | length }}{% endif %}
{%- if said == 'write' %}{% for n in range(8) %}{{ said * 10 ** 6 }}{% endfor %}{% endif %}
{%- if said == 'refuse' %}{{ raise_exception('no ' + said) }}{% endif %}
{{- said }} on {{ strftime_now('%Y-%m-%d') }}"""
DAY = date(2026, 3, 2)


def say(*contents: str) -> list[dict[str, Any]]:
    return [
        {"role": "assistant" if number % 2 else "user", "content": content}
        for number, content in enumerate(contents)
    ]


@pytest.fixture(scope="module")
def hostile() -> Iterator[TemplateProcess]:
    process = TemplateProcess(
        {"default": HOSTILE}, {}, RenderLimits(seconds=0.3, memory_bytes=256 * 2**20)
    )
    yield process
    process.close()
    assert process.pid is None


def test_it_is_what_transformers_renders() -> None:
    tokenizer: Any = load_tokenizer(str(TINY))
    template = ChatTemplate.of(tokenizer)
    assert template is not None
    process = TemplateProcess(template.sources, template.special_tokens)
    for prompt in (False, True):
        expected = tokenizer.apply_chat_template(
            say("hé?", "ñ", "3"), tokenize=False, add_generation_prompt=prompt
        )
        assert process.write(say("hé?", "ñ", "3"), None, DAY, prompt=prompt) == expected
    pid = process.pid
    assert pid is not None
    identity = processes.of(pid)
    del process
    gc.collect()
    assert not processes.is_alive(identity), "it ends with the process that used it"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "loop",
            "the chat template took longer than 0.3 seconds of a processor for this conversation",
        ),
        ("grow", "the chat template needed more than 256 MiB of memory for this conversation"),
        ("write", "the chat template wrote more than 33,554,432 characters for this conversation"),
        ("refuse", "the base's chat template refuses this conversation: no refuse"),
    ],
)
def test_what_exceeds_a_limit_fails_alone_and_the_process_is_used_again(
    hostile: TemplateProcess, said: str, reason: str
) -> None:
    assert hostile.write(say("hello"), None, DAY) == "hello on 2026-03-02"
    pid = hostile.pid
    with pytest.raises(LineError) as refused:
        hostile.write(say(said), None, DAY)
    assert refused.value.reason == reason
    assert hostile.write(say("hello"), None, DAY) == "hello on 2026-03-02"
    assert hostile.pid == pid


def test_one_long_operation_of_the_interpreters_own_ends_the_process_and_the_next_conversation_gets_another(
    hostile: TemplateProcess,
) -> None:
    hostile.write(say("hello"), None, DAY)
    pid = hostile.pid
    with pytest.raises(LineError, match=r"took longer than 0\.3 seconds of a processor"):
        hostile.write(say("compare"), None, DAY)
    assert hostile.write(say("hello"), None, DAY) == "hello on 2026-03-02"
    assert hostile.pid != pid


def test_a_conversation_whose_process_is_killed_is_rendered_again(
    hostile: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is idle, when it starts, and in the middle; if it is killed each time, the
    conversation is not to blame.
    """
    hostile.write(say("hello"), None, DAY)
    assert hostile.pid is not None
    os.kill(hostile.pid, signal.SIGKILL)
    assert hostile.write(say("hello"), None, DAY) == "hello on 2026-03-02"
    monkeypatch.setattr(limited_process, "FIRST_PAUSE_SECONDS", 0.01)
    begin = HelperProcess.ask
    kills = [1]

    def killed(process: HelperProcess, *request: Any) -> Any:
        if kills:
            kills.pop()
            process.kill()
        return begin(process, *request)

    monkeypatch.setattr(HelperProcess, "ask", killed)
    assert hostile.write(say("hello"), None, DAY) == "hello on 2026-03-02"
    kills += [1] * TRIES
    with pytest.raises(HelperFailed, match="killed by signal 9") as lost:
        hostile.write(say("hello"), None, DAY)
    assert (lost.value.is_lost, lost.value.retry_after, kills) == (True, 10, [])
    assert hostile.write(say("hello"), None, DAY) == "hello on 2026-03-02"


def test_it_knows_no_secret(hostile: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile.close()
    monkeypatch.setenv("FT_WANDB_API_KEY", "secret-of-another")
    hostile.write(say("hello"), None, DAY)
    assert b"secret-of-another" not in Path(f"/proc/{hostile.pid}/environ").read_bytes()
    assert os.environ["FT_WANDB_API_KEY"]


def test_only_two_processes_render() -> None:
    """All rendering goes through them: only their module calls transformers' functions for that."""
    root = Path(__file__).parents[3]
    sources = {
        path: path.read_text()
        for folder in ("ft_service", "api", "workers")
        for path in (root / folder).rglob("*.py")
    }
    rendering = {
        path.relative_to(root).as_posix()
        for path, text in sources.items()
        if any(
            f".{name}(" in text
            for name in ("apply_chat_template", "render_jinja_template", "_compile_jinja_template")
        )
    }
    assert rendering == {
        "ft_service/data/tokens/chat_template.py",
        "ft_service/rundir/model_card.py",
    }, "the card shows how to"
    callers = {
        path.relative_to(root).as_posix()
        for path, text in sources.items()
        if "tokens.tokenize import" in text
        and re.search(r"\b(tokenize|as_texts|load_dataset|file_samples)\(", text)
    }
    assert callers == {"ft_service/data/tokens/examine.py", "ft_service/data/tokens/sample_view.py"}
