"""An agent that asks the model for a sum, checks the answer, and asks once more if it is wrong.

    ft rollout serve examples/sums_agent.py

Jobs train it with deploy/examples/agent.yaml. `client` is an openai.AsyncOpenAI as everywhere else;
what is trained is the model that answers it.
"""

from __future__ import annotations

from typing import Any

TRIES = 2


async def rollout(client: Any, item: dict[str, Any]) -> float:
    """Return 1 for a right answer, half of it at the second try, and 0 for none."""
    messages = list(item["messages"])
    for number in range(TRIES):
        answer = await client.chat.completions.create(model="trained", messages=messages)
        said = answer.choices[0].message.content or ""
        if said.strip() == item["answer"]:
            return 1.0 / (number + 1)
        messages.append({"role": "assistant", "content": said})
        messages.append(item["messages"][-1])
    return 0.0
