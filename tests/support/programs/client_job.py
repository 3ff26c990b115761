"""What OpenAI's guides do, by an openai client of any version: a file, a job, its events and
checkpoints, then its model, by chat completions, responses and an eval against the base.

URL and key come from the environment (OPENAI_BASE_URL, OPENAI_API_KEY); the data file, the base and
the options of the job that OpenAI has no field for, as JSON, from the command line. It prints, as
JSON, the client's version and what came of all that.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import openai

OVER = ("succeeded", "failed", "cancelled")
SYSTEM = "Turn the message into one line of JSON."
QUESTION = "Where is my order number 26508?"


def conversation(question: str) -> Any:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def trained(client: openai.OpenAI, file_id: str, base: str, options: Any) -> Any:
    job = client.fine_tuning.jobs.create(
        model=base, training_file=file_id, suffix="clients", extra_body=options
    )
    while job.status not in OVER:
        time.sleep(0.5)
        job = client.fine_tuning.jobs.retrieve(job.id)
    return job


def judged(client: openai.OpenAI, file_id: str, models: list[str]) -> list[dict[str, Any]]:
    """How often answers of models begin as JSON does, and are what the sample says."""
    made = client.evals.create(
        name="clients",
        data_source_config={
            "type": "custom",
            "item_schema": {"type": "object", "required": ["question", "answer"]},
            "include_sample_schema": True,
        },
        testing_criteria=[
            {
                "type": "string_check",
                "name": "json",
                "input": "{{ sample.output_text }}",
                "reference": "{",
                "operation": "like",
            }
        ],
    )
    messages: Any = conversation("{{ item.question }}")
    found = []
    for model in models:
        run = client.evals.runs.create(
            made.id,
            data_source={
                "type": "completions",
                "model": model,
                "source": {"type": "file_id", "id": file_id},
                "input_messages": {"type": "template", "template": messages},
                "sampling_params": {"temperature": 0, "max_completion_tokens": 12},
            },
        )
        while run.status in ("queued", "in_progress"):
            time.sleep(0.5)
            run = client.evals.runs.retrieve(run.id, eval_id=made.id)
        items = list(client.evals.runs.output_items.list(run.id, eval_id=made.id))
        counts = run.result_counts
        found.append(
            {
                "model": run.model,
                "status": run.status,
                "counts": [counts.total, counts.passed, counts.failed, counts.errored],
                "answers": [item.sample.output[0].content for item in items],
            }
        )
    client.evals.delete(made.id)
    return found


def main(data: str, items: str, base: str, options: str) -> None:
    client = openai.OpenAI()
    file = client.files.create(file=Path(data), purpose="fine-tune")
    job = trained(client, file.id, base, json.loads(options))
    told = {"version": openai.__version__, "status": job.status, "model": job.fine_tuned_model}
    events = client.fine_tuning.jobs.list_events(job.id, limit=2)
    told["events"] = [event.message for event in events]
    points = client.fine_tuning.jobs.checkpoints.list(job.id)
    told["checkpoints"] = [point.step_number for point in points]
    asked: Any = {
        "model": job.fine_tuned_model,
        "messages": conversation(QUESTION),
        "temperature": 0,
        "max_tokens": 12,
    }
    told["chat"] = client.chat.completions.create(**asked).choices[0].message.content
    chunks = client.chat.completions.create(**asked, stream=True)
    told["streamed"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    answer = client.responses.create(
        model=job.fine_tuned_model,
        instructions=SYSTEM,
        input=QUESTION,
        temperature=0,
        max_output_tokens=16,
    )
    told["response"] = answer.output_text
    held = client.files.create(file=Path(items), purpose="evals")
    told["evals"] = judged(client, held.id, [base, job.fine_tuned_model])
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
