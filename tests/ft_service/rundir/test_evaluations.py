from __future__ import annotations

from pathlib import Path

from ft_service.rundir.directory import RunDir
from ft_service.rundir.evaluations import ServedQuality, evaluated_steps, prompt_turns


def test_the_turns_of_a_prompt_are_shown_with_their_roles() -> None:
    call = [{"type": "text", "text": "ä"}]
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": call}]
    assert prompt_turns("as text", messages) == (
        ("user", "Hello"),
        ("assistant", '[{"type": "text", "text": "ä"}]'),
    )
    assert prompt_turns("as text", None) == (("", "as text"),)


def test_of_a_step_that_was_trained_again_the_newest_attempt_counts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for name in ("step-20-a1", "step-3-a2", "step-3-a10", "step-x-a1"):
        run.put(f"evaluations/{name}.json", b"{}")
    steps = evaluated_steps(run)
    assert list(steps.items()) == [
        (3, "evaluations/step-3-a10.json"),
        (20, "evaluations/step-20-a1.json"),
    ]


def test_only_a_loss_above_the_bound_counts_as_worse() -> None:
    loss = {"as_trained": 1.0, "merged": 1.25, "adapter_on_bf16_base": 1.5}
    assert ServedQuality(
        step=1, samples=4, loss=loss, bound=0.25, answers={}, metrics={}
    ).beyond == ["adapter_on_bf16_base"]
