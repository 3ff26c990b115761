"""Comparisons, usage and answers, computed from answers of the API. Pure."""

from __future__ import annotations

from typing import Any

from api.page import job_form, summaries


def test_jobs_are_compared_by_what_differs() -> None:
    def job(**lora: Any) -> dict[str, Any]:
        return {
            "model": "m",
            "training_file": "f",
            "validation_file": None,
            "seed": 1,
            "priority": 0,
            "lora": lora,
        } | {
            **{section: {} for section in job_form.SECTIONS if section != "lora"},
            "method": {"type": "supervised"},
        }

    assert summaries.differing_options([job(r=8, alpha=1), job(r=16, alpha=1)]) == [
        ("lora.r", [8, 16])
    ]
    preferred = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.1, "batch_size": 4}}}
    assert summaries.differing_options([job(), job() | {"method": preferred}]) == [
        ("method.type", [None, "dpo"]),
        ("method.dpo.hyperparameters.beta", [None, 0.1]),
    ]


def test_results_of_jobs_have_one_measure() -> None:
    def series(**values: list[float]) -> dict[str, Any]:
        return {name: {"values": of} for name, of in values.items()}

    validated = series(valid_loss=[2.0, 1.0, 1.5], train_loss=[0.1])
    trained = series(train_loss=[0.5, 0.7])
    assert summaries.results_by_one_measure(
        {"a": validated, "b": validated, "queued": {}}, rewarded=False
    ) == ("Lowest validation loss", {"a": 1.0, "b": 1.0, "queued": None})
    assert summaries.results_by_one_measure({"a": validated, "b": trained}, rewarded=False) == (
        "Last training loss",
        {"a": 0.1, "b": 0.7},
    )
    graded = series(valid_mean_reward=[0.2, 0.9, 0.8], train_mean_reward=[0.3, 0.4])
    assert summaries.results_by_one_measure({"a": graded}, rewarded=True) == (
        "Highest validation reward",
        {"a": 0.9},
    )
    assert summaries.best_validated(validated) == summaries.Result(1.0, "loss")
    assert summaries.best_validated(graded) == summaries.Result(0.9, "reward")
    assert summaries.best_validated(trained) is None, "training losses are another measure"


def test_use_is_summed_by_day_project_and_key() -> None:
    def result(project: str, key: str | None, tokens: int, seconds: float) -> dict[str, Any]:
        return {
            "project_id": project,
            "api_key_id": key,
            "trained_tokens": tokens,
            "gpu_seconds": seconds,
            "uploaded_bytes": 10,
            "num_jobs": 1,
            "cost": {"value": seconds / 64, "currency": "EUR"} if key else None,
            "energy_joules": 3.0 if key else None,
            "co2_grams": None,
        }

    days = [
        [result("a", "k1", 5, 60.0), result("b", "k2", 7, 90.5)],
        [],
        [result("a", "k3", 1, 120.0), result("a", None, 2, 0.5)],
    ]
    found = summaries.usage_summary(
        [{"start_time": 86_400 * day, "results": results} for day, results in enumerate(days)]
    )
    assert found.total == summaries.Use(
        tokens=15, gpu_seconds=271.0, bytes=40, jobs=4, cost=270.5 / 64, joules=9.0
    )
    assert found.currency == "EUR"
    assert list(found.amounts)[-2:] == ["cost", "joules"]
    assert set(summaries.usage_summary([]).amounts).isdisjoint({"cost", "joules"})
    assert [one.tokens for one in found.days.values()] == [12, 0, 3]
    assert list(found.projects) == ["a", "b"], "who used most first"
    assert [(key, one.tokens) for key, one in found.keys.items()] == [
        (("a", "k3"), 1),
        (("b", "k2"), 7),
        (("a", "k1"), 5),
        (("a", ""), 2),
    ]
    assert [bar["share"] for bar in summaries.usage_bars(found.days, "tokens")] == [1.0, 0.0, 0.25]
    assert [bar["share"] for bar in summaries.usage_bars({0: summaries.Use()}, "jobs")] == [0.0]


def test_answers_at_a_step_beside_those_before_training() -> None:
    def evaluation(step: int, score: float, tuned: str | None) -> dict[str, Any]:
        messages = (
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": []}]
            if step == 8
            else None
        )
        sample = {
            "prompt": "p",
            "messages": messages,
            "reference": None,
            "base": "b",
            "tuned": tuned,
        }
        base = {"rouge_l": 0.1} if step else {}
        return {
            "step": step,
            "metrics": {"rouge_l": score},
            "base_metrics": base,
            "samples": [sample],
        }

    listed = [evaluation(8, 0.9, "later"), evaluation(4, 0.5, "half"), evaluation(0, 0.1, None)]
    found = summaries.answers_of(listed, 4)
    assert found == summaries.Answers(
        (4, 8),
        4,
        {"rouge_l": (0.1, 0.5, 0.9)},
        (summaries.AnswerRow((("", "p"),), None, "b", "half"),),
    )
    newest = summaries.answers_of(listed, 5)
    begun = summaries.answers_of(listed[2:], None)
    assert newest is not None
    assert newest.shown == 8
    assert newest.prompts[0].turns == (("user", "Hi"), ("assistant", "null"))
    assert begun is not None
    assert (begun.shown, begun.scores) == (None, {"rouge_l": (0.1,)})
    assert summaries.answers_of([], None) is None


def test_rewards_are_shown_over_time() -> None:
    def rollout(step: int, reward: float | None, prompts: int = 1) -> dict[str, Any]:
        graded = {
            "prompt": 0,
            "text": "1 + 1 =",
            "answers": [{"text": str(step), "reward": reward}],
        }
        validation = [] if reward is None else [graded]
        return {
            "step": step,
            "prompts": [graded] * prompts,
            "validation": validation,
            "valid_mean_reward": reward,
        }

    assert summaries.graded_over_time([]) is None
    newest_first = [
        rollout(9, 0.9, prompts=0),
        *(rollout(step, step / 10 if step % 2 else None) for step in range(8, 0, -1)),
    ]
    found = summaries.graded_over_time(newest_first)
    assert found is not None
    assert found.shown is not None
    assert found.shown["step"] == 8, "the last record only evaluates"
    assert (found.columns, found.means) == ((2, 4, 6, 8), (0.3, 0.5, 0.7, 0.9))
    [(text, cells)] = found.rows
    assert text == "1 + 1 ="
    assert [cell and cell["text"] for cell in cells] == ["3", "5", "7", "9"]


def test_what_each_way_of_serving_costs() -> None:
    loss = {"as_trained": 1.5, "adapter_on_bf16_base": 1.53, "merged": 1.51}
    compared = {"loss": loss}
    measured = {"adapter_on_base_as_trained": 1.25, "adapter_on_bf16_base": 9.0, "merged": 1.3}
    exports = {
        "merged-int4": {"report": {"validation_loss": measured}},
        "merged-fp8": {"report": {"validation_loss": {**measured, "merged": 1.26}}},
        "gguf": {"report": {"validation_loss": None}},
        "vllm": {"report": {}},
    }
    assert summaries.served_losses([{"served": None}, {"served": compared}], exports) == [
        summaries.ServedLoss("the adapter on the base in bf16", 1.5, 1.53, True),
        summaries.ServedLoss("merged, in bf16", 1.5, 1.51, False),
        summaries.ServedLoss("merged-int4", 1.25, 1.3, True),
        summaries.ServedLoss("merged-fp8", 1.25, 1.26, False),
    ]
    # A job without prompts has no evaluation.
    assert summaries.served_losses([], exports)[:2] == [
        summaries.ServedLoss("the adapter on the base in bf16", 1.25, 9.0, True),
        summaries.ServedLoss("merged-int4", 1.25, 1.3, True),
    ]
    assert summaries.served_losses([], {}) == []
