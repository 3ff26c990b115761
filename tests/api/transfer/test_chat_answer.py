"""The last line of OpenAI's quickstart, answered by the preview's own process on a real base."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from ft_service.jobs.states import State
from ft_service.rundir.evaluations import PROBES, Probe, Probes
from ft_service.serving.preview import Preview
from ft_service.settings import Settings
from ft_service.store.records import NewKey
from tests.support.bases import SAMPLE
from tests.support.rest.service import Service, put, run_dir, wait_until

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is my order 51943?"},
]
LIMIT = 10
PROBED = [5, 70, 9, 200, 31, 8, 6]


@pytest.fixture
def settings(settings: Settings) -> Settings:
    shutil.copytree(SAMPLE, settings.home / "models" / SAMPLE.name)
    return settings


def tuned_name(
    service: Service, client: openai.OpenAI, training_file: str, seed: int, **options: Any
) -> str:
    """The name of a job that has succeeded with a random adapter."""
    job = client.fine_tuning.jobs.create(
        model=SAMPLE.name, training_file=training_file, suffix=f"s{seed}", extra_body=options
    )
    base = AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32)
    model = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    run = run_dir(service, job.id)
    model.save_pretrained(str(run.path("adapter")))
    tuned = logprobs(model)
    with model.disable_adapter():
        document = Probes(step=1, probes=[Probe(tokens=PROBED, tuned=tuned, base=logprobs(model))])
    run.put(PROBES, document.model_dump_json().encode())
    return put(service, job.id, state=State.SUCCEEDED, attempt=1).spec.tuned_name


def logprobs(model: Any) -> list[float]:
    ids = torch.tensor(PROBED)
    with torch.no_grad():
        logs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    return logs.gather(1, ids[1:, None])[:, 0].tolist()


def verdicts(service: Service, name: str) -> list[str]:
    """What the job's events say of the preview's answers."""
    events = service.client().fine_tuning.jobs.list_events("ftjob-" + name.rpartition(":")[2]).data
    return [event.message for event in events if event.message.startswith("In the preview")]


def by_peft(service: Service, name: str | None) -> str:
    """What plain transformers and PEFT answer."""
    tokenizer: Any = AutoTokenizer.from_pretrained(SAMPLE)
    model: Any = AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32)
    if name is not None:
        job_id = "ftjob-" + name.rpartition(":")[2]
        model = PeftModel.from_pretrained(model, str(run_dir(service, job_id).path("adapter")))
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    batch = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    out = model.generate(**batch, max_new_tokens=LIMIT, do_sample=False)
    return tokenizer.decode(out[0, batch["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def test_tuned_models_and_their_base_answer_as_themselves(
    service: Service,
    client: openai.OpenAI,
    training_file: str,
    preview: Preview,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [tuned_name(service, client, training_file, seed) for seed in (1, 2)]
    expected = {name: by_peft(service, name) for name in (*names, None)}
    assert len(set(expected.values())) == 3

    def ask(name: str | None, **options: Any) -> Any:
        model = name or SAMPLE.name
        return client.chat.completions.create(
            model=model, messages=MESSAGES, temperature=0, max_tokens=LIMIT, **options
        )

    with ThreadPoolExecutor(3) as asking:
        answers = list(asking.map(ask, expected))
    assert [answer.choices[0].message.content for answer in answers] == list(expected.values())
    pid = preview.pid
    wait_until(lambda: all(verdicts(service, name) for name in names))
    for name in names:
        (verdict,) = verdicts(service, name)
        assert verdict.startswith(
            "In the preview: served, verified: 1 prompts' log-probabilities lie 0.000 nats"
        )

    whole = ask(names[0], n=2, logprobs=True, top_logprobs=2)
    assert [choice.message.content for choice in whole.choices] == [expected[names[0]]] * 2
    assert whole.model == names[0]
    assert whole.usage.completion_tokens >= 2
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    told = whole.choices[0].logprobs.content
    assert len(told[0].top_logprobs) == 2
    assert told[0].top_logprobs[0].logprob == told[0].logprob, "the likeliest was taken"

    chunks = list(ask(names[1], stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == expected[names[1]]
    assert len([text for text in texts if text]) > 2
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in (
        "stop",
        "length",
    )
    assert chunks[-1].usage.total_tokens > chunks[-1].usage.completion_tokens > 0

    said = client.responses.create(
        model=names[0],
        instructions=MESSAGES[0]["content"],
        input=MESSAGES[1]["content"],
        temperature=0,
        max_output_tokens=LIMIT,
        include=["message.output_text.logprobs"],
    )
    assert said.output_text == expected[names[0]]
    assert said.usage is not None
    assert said.usage.input_tokens == whole.usage.prompt_tokens
    item: Any = said.output[0]
    assert item.content[0].logprobs[0].logprob == pytest.approx(told[0].logprob, abs=1e-5)
    with client.responses.stream(
        model=names[1], input=MESSAGES, temperature=0, max_output_tokens=LIMIT
    ) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(texts) == expected[names[1]]

    service.use(service.settings.model_copy(update={"stored_chats_days": 1}))
    ask(names[0], store=True, tools=[])
    list(ask(names[1], store=True, stream=True))
    kept = [chat.choices[0].message.content for chat in client.chat.completions.list()]
    assert kept == [expected[name] for name in names]

    with pytest.raises(openai.BadRequestError, match="512 tokens") as caught:
        client.chat.completions.create(model=names[0], messages=MESSAGES, max_tokens=600)
    assert caught.value.code == "context_length_exceeded"

    in_fp8 = tuned_name(service, client, training_file, 1, precision={"default": "fp8"})
    assert ask(in_fp8).choices[0].message.content
    assert ask(names[0]).choices[0].message.content == expected[names[0]]
    assert preview.pid == pid, "one process for a base in any format"

    assert not preview.release_slots(range(service.settings.slots or 0))
    with pytest.raises(openai.InternalServerError, match="made way for a training job") as busy:
        ask(names[0])
    assert busy.value.status_code == 503
    assert int(busy.value.response.headers["retry-after"]) > 1
    wait_until(lambda: preview.release_slots(range(service.settings.slots or 0)))
    assert preview.pid != pid

    monkeypatch.setattr(service.store.leases, "free_slots", lambda *_: [])
    with pytest.raises(openai.InternalServerError, match="All 4 slots are busy training"):
        ask(names[0])
    assert (
        ask(names[0], extra_body={"processor": True}).choices[0].message.content
        == expected[names[0]]
    ), "during training"


def test_nobody_else_finds_out_what_there_is(
    service: Service, client: openai.OpenAI, training_file: str, preview: Preview
) -> None:
    job = client.fine_tuning.jobs.create(model=SAMPLE.name, training_file=training_file)
    name = put(service, job.id, state=State.SUCCEEDED, attempt=1).spec.tuned_name
    service.store.projects.ensure_project("other", "rival")
    other = service.client(
        service.store.keys.create_key(NewKey(project_id="other", name="k", scope="user"))[1]
    )
    never = f"{name[:-3]}abc"
    said = []
    for asked in (name, never):
        with pytest.raises(openai.NotFoundError) as caught:
            other.chat.completions.create(model=asked, messages=MESSAGES)
        said.append(str(caught.value).replace(asked, ""))
    assert said[0] == said[1]
    with pytest.raises(openai.NotFoundError, match="no such base model"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(
            model=name, messages=MESSAGES, response_format={"type": "json_object"}
        )
    assert preview.pid is None, "nothing of this is a reason to start it"
