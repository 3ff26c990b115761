"""Answers that the ranks write while a job runs: those of transformers' own greedy generation, on
any number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from ft_service.data.answer_format import Answer, AnswerFormat
from ft_service.data.tokens.sample import ImageUse, Picture
from ft_service.rundir.attempt_seal import Fence
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Outcome, OutcomeKind
from ft_service.rundir.evaluations import (
    EvaluatedPrompt,
    Evaluation,
    evaluated_steps,
    evaluation_key,
)
from ft_service.rundir.events import read_segments
from ft_service.spec import EvaluationOptions
from tests.support.ranks import run_on_ranks
from tests.support.training.attempts import losses, run_attempt
from tests.support.training.looked_up import CHANCES, LookedUp
from tests.support.training.models import save_chat_base, save_chats, save_tiny_llama, spec_for
from workers.data.micro_batches import MicroBatchLimits
from workers.ranks.sharding import Gradients
from workers.training import evaluation_answers
from workers.training import evaluation_answers as module
from workers.training.context import TrainingContext
from workers.training.evaluation_answers import Evaluator, GreedyDecoding, greedy, messages, room_of
from workers.training.evaluation_prompts import Asked, Question
from workers.training.packing import TOKENS

CPU = torch.device("cpu")


def test_tokens_are_those_of_greedy_generation(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_tiny_llama(tmp_path), dtype=torch.float32)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(5, 250, length).astype(np.int32) for length in (3, 11, 7)]
    whole = [_generated(model, prompt, 12) for prompt in prompts]
    runtime = cast("Any", SimpleNamespace(rank=0, world=1, device=CPU))
    padded = MicroBatchLimits(2048, packed=False)
    assert greedy(runtime, model, prompts, GreedyDecoding(12, (), padded)) == whole
    end = whole[1][4]
    shorter = [own[: own.index(end)] if end in own else own for own in whole]
    assert len(shorter[1]) <= 4
    assert greedy(runtime, model, prompts, GreedyDecoding(12, {end}, padded)) == shorter


def test_a_forward_has_no_more_tokens_than_a_micro_batch_and_the_answers_are_the_same(
    tmp_path: Path,
) -> None:
    model = _with_positions(64, "cpu")
    prompts = [np.arange(5, 5 + length, dtype=np.int32) for length in (9, 14, 11, 6)]
    seen = _widths(model)
    runtime = cast("Any", SimpleNamespace(rank=0, world=1, device=CPU))
    together = greedy(
        runtime, model, prompts, GreedyDecoding(5, (), MicroBatchLimits(2048, packed=False))
    )
    assert max(seen) == 4 * (14 + 4), "all at once, padded to the longest"
    seen.clear()
    assert (
        greedy(runtime, model, prompts, GreedyDecoding(5, (), MicroBatchLimits(32, packed=False)))
        == together
    )
    assert max(seen) <= 32


def test_ranks_with_unequal_numbers_of_forwards_make_as_many() -> None:
    by_rank = run_on_ranks(_answers_of_rank, 2, [(9, 14, 11), (6,)])
    assert [len(answers) for answers, _ in by_rank] == [3, 1]
    assert by_rank[0][1] == by_rank[1][1] == 3 * 4, "three forwards for each token"


def _answers_of_rank(
    rank: int, world: int, lengths: list[tuple[int, ...]]
) -> tuple[list[list[int]] | None, int]:
    """A rank's answers, and the number of its forwards."""
    model = _with_positions(64, "cpu")
    seen = _widths(model)
    prompts = [np.arange(5, 5 + length, dtype=np.int32) for length in lengths[rank]]
    runtime = cast("Any", SimpleNamespace(rank=rank, world=world, device=CPU))
    answers = greedy(
        runtime, model, prompts, GreedyDecoding(4, (), MicroBatchLimits(20, packed=False))
    )
    return answers, len(seen)


def test_an_answer_ends_where_the_base_has_no_more_positions() -> None:
    model = _with_positions(16, "cpu")
    prompts = [np.arange(5, 5 + length, dtype=np.int32) for length in (13, 4, 20)]
    runtime = cast("Any", SimpleNamespace(rank=0, world=1, device=CPU))
    answers = greedy(
        runtime,
        model,
        prompts,
        GreedyDecoding(8, (), MicroBatchLimits(2048, packed=False), room=16),
    )
    assert answers is not None
    assert [len(own) for own in answers] == [3, 8, 0]


def test_a_prompt_without_room_for_an_answer_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation_answers, "greedy", lambda *args, **options: [[], []])
    told = Told()
    assert evaluator(RunDir(tmp_path), 1, told, tokens=16).begin()
    assert (
        "prompt 1 (and 1 more) leaves no room for an answer in the base's context of 16 tokens"
        in told.said[0]
    )


def test_a_base_with_rotary_positions_has_room_for_samples_as_long_as_the_jobs() -> None:
    for model, room in (
        (_with_positions(16), 16),
        (_with_rotary_positions(16), 64),
        (_with_rotary_positions(128), 128),
    ):
        spec = SimpleNamespace(training=SimpleNamespace(max_length=64))
        assert (
            room_of(cast(Any, SimpleNamespace(model=model, runtime=SimpleNamespace(spec=spec))))
            == room
        )


def _with_rotary_positions(count: int) -> LlamaForCausalLM:
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(max_position_embeddings=count, vocab_size=64, **sizes))


def _with_positions(count: int, device: str = "meta") -> GPT2LMHeadModel:
    """A model that has learned a vector for each of so many positions."""
    torch.manual_seed(0)
    with torch.device(device):
        return GPT2LMHeadModel(
            GPT2Config(n_positions=count, n_embd=8, n_layer=1, n_head=1, vocab_size=64)
        ).eval()


def _widths(model: Any) -> list[int]:
    """A list that takes the tokens of each forward of a model, padding included."""
    seen: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["input_ids"].numel()), with_kwargs=True
    )
    return seen


def _generated(model: Any, prompt: np.ndarray, most: int) -> list[int]:
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    options = {
        "do_sample": False,
        "max_new_tokens": most,
        "min_new_tokens": most,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[
        0, len(prompt) :
    ].tolist()


class Letters:
    """A tokenizer of one letter a token."""

    eos_token_id = 0

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, tokens))


class Told:
    def __init__(self) -> None:
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.said.append(text)


def evaluator(
    run: RunDir,
    attempt: int,
    told: Told,
    references: tuple[str | None, ...] = ("b", None),
    tokens: int = 1,
) -> Evaluator:
    """`tokens`: of each prompt."""
    start = SimpleNamespace(attempt=attempt)
    spec = SimpleNamespace(training=SimpleNamespace(max_length=64))
    runtime: Any = SimpleNamespace(
        rank=0, world=1, device=CPU, run=run, fence=Fence(run, attempt), start=start, spec=spec
    )
    questions = [
        Question(np.array([97] * tokens, dtype=np.int32), "a", reference)
        for reference in references
    ]
    options = EvaluationOptions(metrics=["exact_match", "json_valid"])
    model = cast(Any, _with_positions(16))
    reporter, stop = (cast(Any, own) for own in (told, SimpleNamespace(agreed=lambda: False)))
    context = TrainingContext(
        runtime, model, MicroBatchLimits(1, packed=False), reporter, stop, Gradients(model, 1)
    )
    return Evaluator(
        context, Asked(questions, AnswerFormat(), frozenset({0})), cast(Any, Letters()), options
    )


def test_answers_of_another_model_end_where_their_time_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def greedy(
        runtime: Any, model: Any, prompts: Any, decoding: GreedyDecoding, goes_on: Any, **_: Any
    ) -> list[list[int]] | None:
        asked.extend(token for token in range(1, decoding.max_new_tokens + 1) if goes_on(token))
        return None if len(asked) < decoding.max_new_tokens else [[97] for _ in prompts]

    monkeypatch.setattr(evaluation_answers, "greedy", greedy)
    own = evaluator(RunDir(tmp_path), 1, Told())
    assert own.ask(3, torch.nn.Identity(), seconds=-1.0) is None
    assert 8 not in asked
    asked.clear()
    assert own.ask(3, torch.nn.Identity()) == [Answer("a")] * 2


def test_each_step_is_asked_once_and_its_document_has_both_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    told = Told()
    said: list[list[list[int]] | None] = [[[98], [99]], None, [[49], [123]]]
    monkeypatch.setattr(evaluation_answers, "greedy", lambda *args, **options: said.pop())
    asked = evaluator(run, 1, told)
    assert asked.begin()
    assert asked.at(5, last=False) is None, "it was stopped"
    assert list(evaluated_steps(run)) == [0]
    assert asked.at(5, last=True) == {"exact_match": 1.0, "json_valid": 0.0}
    assert asked.at(5, last=True) == {"exact_match": 1.0, "json_valid": 0.0}, "not asked again"
    first, second = (run.read(key, Evaluation) for key in evaluated_steps(run).values())
    assert first is not None
    assert second is not None
    assert (first.metrics, first.samples[0].tuned) == (
        {"exact_match": 0.0, "json_valid": 0.5},
        None,
    )
    assert [(own.base, own.tuned) for own in second.samples] == [("1", "b"), ("{", "c")]
    assert [own.scores for own in second.samples] == [
        {"exact_match": 1.0, "json_valid": 0.0},
        {"json_valid": 0.0},
    ]
    assert second.base_metrics == first.metrics
    assert "exact_match 1.00 (before: 0.00)" in told.said[0]
    assert "Asked: a\nExpected: b\nBefore: 1\nAfter: b" in told.said[1]


def test_a_later_attempt_keeps_the_answers_before_training_and_asks_at_its_own_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    calls = []

    def write(*args: Any, **options: Any) -> list[list[int]]:
        calls.append(1)
        return [[98], [98]]

    monkeypatch.setattr(evaluation_answers, "greedy", write)
    for attempt in (1, 2):
        run.write(f"attempts/{attempt}/start.json", EvaluationOptions())
        asked = evaluator(run, attempt, Told())
        assert asked.begin()
        asked.at(5, last=False)
    assert len(calls) == 3, "before training once, at step 5 by each attempt"
    assert evaluated_steps(run) == {0: evaluation_key(0, 1), 5: evaluation_key(5, 2)}
    assert evaluator(run, 2, Told(), ("b", "c")).begin()
    assert len(calls) == 4, "of other questions nothing is known"


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_job_shows_answers_before_and_after(world: int, tmp_path: Path) -> None:
    base = save_chat_base(tmp_path / "base")
    spec = spec_for(
        base,
        save_chats(tmp_path / "train.jsonl", 8),
        valid=save_chats(tmp_path / "valid.jsonl", 3),
        ranks=world,
        precision={"compute": "fp32"},
        training={"max_steps": 30, "batch_size": 8, "learning_rate": 2e-2, "eval_steps": 20},
        lora={"r": 8},
        evaluation={
            "prompts": 3,
            "max_new_tokens": 16,
            "metrics": ["exact_match", "rouge_l"],
            "on_validation": True,
        },
    )
    run = RunDir(tmp_path / "run")
    run.write("spec.json", spec)
    assert run_attempt(run, 1, world) == Outcome(kind=OutcomeKind.SUCCEEDED)
    assert list(evaluated_steps(run)) == [0, 20, 30]
    found = run.read(evaluation_key(30, 1), Evaluation)
    assert found is not None
    assert [own.reference for own in found.samples] == ["it is 0", "it is 7!", "it is 14!!"]
    assert [own.messages for own in found.samples] == [
        [{"role": "user", "content": f"say {n}"}] for n in range(3)
    ]
    assert found.metrics.keys() == found.base_metrics.keys() == {"exact_match", "rouge_l"}
    in_table = losses(run, "evaluation/exact_match")
    assert list(in_table) == [20, 30]
    assert in_table[30] == found.metrics["exact_match"]
    assert any(own.base != own.tuned for own in found.samples)
    tokenizer = AutoTokenizer.from_pretrained(base)
    stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tuned = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), run.path("adapter")
    )
    for own, ask in zip(found.samples, ("say 0", "say 1", "say 2"), strict=True):
        assert ask in own.prompt
        text = f"<|im_start|>user\n{ask}<|im_end|>\n<|im_start|>assistant\n"
        prompt = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
        for model, answer in ((stock, own.base), (tuned, own.tuned)):
            tokens = _generated(model, prompt, 16)
            tokens = (
                tokens[: tokens.index(tokenizer.eos_token_id)]
                if tokenizer.eos_token_id in tokens
                else tokens
            )
            assert tokenizer.decode(tokens, skip_special_tokens=True).strip() == answer
    told = [event.message for segment in read_segments(run, 1) for event in segment.events]
    assert any(
        message.startswith("Evaluation after step 30, 3 prompts: exact_match") for message in told
    )
    assert sum("\nBefore: " in message for message in told) == 3


@pytest.mark.slow
def test_a_job_is_asked_prompts_of_its_own(tmp_path: Path) -> None:
    base = save_chat_base(tmp_path / "base")
    checked = {
        "type": "string_check",
        "name": "right",
        "input": "{{ sample.output_text }}",
        "operation": "eq",
    }
    spec = spec_for(
        base,
        save_chats(tmp_path / "train.jsonl", 8),
        ranks=2,
        precision={"compute": "fp32"},
        training={"max_steps": 30, "batch_size": 8, "learning_rate": 2e-2},
        lora={"r": 8},
        evaluation={
            "prompts": [
                {"messages": [{"role": "user", "content": "say 0"}], "item": {"wanted": "it is 0"}},
                {
                    "messages": [{"role": "user", "content": "say 1"}],
                    "reference": "it is 7!",
                    "item": {"wanted": "it is 7!"},
                },
                {"prompt": "once"},
            ],
            "max_new_tokens": 16,
            "metrics": ["exact_match", {**checked, "reference": "{{ item.wanted }}"}],
        },
    )
    run = RunDir(tmp_path / "run")
    run.write("spec.json", spec)
    assert run_attempt(run, 1, 2) == Outcome(kind=OutcomeKind.SUCCEEDED)
    found = run.read(evaluation_key(30, 1), Evaluation)
    assert found is not None
    assert [(own.prompt, own.reference) for own in found.samples] == [
        ("user\nsay 0\nassistant", None),
        ("user\nsay 1\nassistant", "it is 7!"),
        ("once", None),
    ]
    assert [own.scores.keys() for own in found.samples] == [
        {"right"},
        {"exact_match", "right"},
        set(),
    ]
    wanted = ("it is 0", "it is 7!")
    right = [float(own.tuned == text) for own, text in zip(found.samples, wanted, strict=False)]
    assert found.metrics == {"right": sum(right) / 2, "exact_match": right[1]}
    assert all(own.tuned and "assistant" not in own.tuned for own in found.samples[:2]), (
        "an answer, and no further turn"
    )
    assert found.samples[1].messages == [{"role": "user", "content": "say 1"}]


def test_scores_are_means_over_the_prompts_that_have_them_and_told_with_the_first_prompts() -> None:
    scores = [{"a": 1.0, "b": 2.0}, {"a": 3.0}, {}]
    assert evaluation_answers.mean_scores(scores) == {"a": 2.0, "b": 2.0}
    assert evaluation_answers.mean_scores([]) == {}
    row = EvaluatedPrompt(
        prompt="?",
        messages=None,
        reference=None,
        base="b" * 300,
        tuned="t" * 301,
        scores={},
        base_scores={},
    )
    found = Evaluation(
        step=4, time=0.0, metrics={"a": 2.0}, base_metrics={"b": 1.0}, samples=[row] * 9
    )
    first, *others = evaluation_answers.messages(found, everything=True)
    assert first == "Evaluation after step 4, 9 prompts: a 2.00 (before: 0.00)."
    assert others == [f"Asked: ?\nExpected: \nBefore: {'b' * 300}\nAfter: {'t' * 299}…"] * 8
    none = found.model_copy(update={"metrics": {}})
    assert evaluation_answers.messages(none, everything=False) == [
        "Evaluation after step 4, 9 prompts: no metric applies."
    ]


@pytest.mark.parametrize(
    ("seconds", "stopped", "went_on"),
    [
        (None, False, list(range(1, 18))),
        (None, True, list(range(1, 8))),
        (7.9, False, list(range(1, 8))),
        (8.0, False, list(range(1, 16))),
        (16.0, False, list(range(1, 18))),
    ],
)
def test_time_and_a_stop_are_looked_at_every_few_tokens(
    seconds: float | None,
    stopped: bool,
    went_on: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token takes a second; a report is due at the fifth."""
    now = [0.0]
    told = Told()
    monkeypatch.setattr(evaluation_answers.time, "monotonic", lambda: now[0])
    own = evaluator(RunDir(tmp_path), 1, told)
    own._reported_at = 5.0 - evaluation_answers.REPORT_SECONDS
    own._context.stop.agreed = lambda: stopped  # type: ignore[method-assign]
    goes_on = own._goes_on(3, seconds)
    found: list[int] = []
    for token in range(1, 18):
        now[0] = float(token)
        if not goes_on(token):
            break
        found.append(token)
    assert found == went_on
    reports = [text for text in told.said if text.startswith("Evaluation at step 3")]
    assert len(reports) == 1
    assert "have 5 of at most" in reports[0]


RUNTIME: Any = SimpleNamespace(rank=0, world=1, device=torch.device("cpu"))
CHAIN = torch.tensor([[0.1, 0.7, 0.1, 0.1], [0.1, 0.1, 0.7, 0.1], [0.1, 0.1, 0.1, 0.7]])
NEXT = LookedUp(torch.cat([CHAIN, torch.tensor([[0.7, 0.1, 0.1, 0.1]])]))
"""0 is followed by 1, that by 2, that by 3, and that by 0."""


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("most", "ends", "room", "written"),
    [
        (3, set(), None, [[1, 2, 3], [0, 1, 2], [3, 0, 1]]),
        (3, {3}, None, [[1, 2], [0, 1, 2], []]),
        (9, {3, 2}, None, [[1], [0, 1], []]),
        (9, {3}, 3, [[1, 2], [0], []]),
        (1, set(), None, [[1], [0], [3]]),
    ],
)
def test_the_likeliest_word_follows_until_an_end(
    packed: bool, most: int, ends: set[int], room: int | None, written: list[list[int]]
) -> None:
    limits = MicroBatchLimits(64, packed=packed)
    prompts = [ids(0), ids(1, 3), ids(0, 1, 2)]
    if room is not None:
        written = [*written[:2], []]
    found = greedy(RUNTIME, NEXT, prompts, GreedyDecoding(most, ends, limits, room))
    assert found == written
    assert [len(own) for own in prompts] == [1, 2, 3]


def test_pictures_go_with_their_prompts_and_tokens_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    freed: list[Any] = []
    seen: list[Any] = []
    monkeypatch.setattr(module, "reshard", freed.append)

    def following(runtime: Any, model: Any, rows: Any, decoding: Any) -> list[int]:
        seen.append([(row.ids.tolist(), row.ids.dtype, row.images) for row in rows])
        return [7] * len(rows)

    monkeypatch.setattr(module, "_next_tokens", following)
    use = (ImageUse(0, 1, Picture.of(b"picture")),)
    decoding = GreedyDecoding(3, {9}, MicroBatchLimits(64))
    tokens: list[int] = []

    def goes_on(token: int) -> bool:
        tokens.append(token)
        return token < 3

    assert greedy(RUNTIME, NEXT, [ids(4), ids(5)], decoding, goes_on, images=[(), use]) is None
    assert (tokens, freed) == ([1, 2, 3], [NEXT])
    int32 = np.dtype(np.int32)
    assert [sorted(own, key=str) for own in seen] == [
        [([4], int32, ()), ([5], int32, use)],
        [([4, 7], int32, ()), ([5, 7], int32, use)],
    ]


def test_a_forward_has_as_many_tokens_as_usual_and_any_number_of_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "room_of", lambda context: 77)
    for tokens in (TOKENS - 1, TOKENS + 1):
        context: Any = SimpleNamespace(limits=MicroBatchLimits(tokens, 3, packed=False))
        own = GreedyDecoding.of(context, 5, {9})
        assert own.limits == MicroBatchLimits(max(tokens, TOKENS), None, packed=False)
        assert (own.max_new_tokens, own.ends, own.room) == (5, {9}, 77)
    forwards = module._forwards({3: 4, 5: 4, 8: 2}, MicroBatchLimits(6))
    assert sorted(map(sorted, forwards)) in ([[3], [5, 8]], [[3, 8], [5]])
    assert module._forwards({}, MicroBatchLimits(6)) == []
    assert LookedUp().table.shape == CHANCES.shape


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("training", [True, False])
def test_ranks_answer_in_turn_and_all_know_all_answers(
    rank: int, training: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = evaluator(RunDir(tmp_path), 1, Told(), ("a", "b", "c"))
    own._runtime.rank, own._runtime.world = rank, 2  # type: ignore[misc]
    for number, question in enumerate(own._questions):
        question.ids[:] = number
    given: list[Any] = []

    def write(
        runtime: Any, model: Any, prompts: Any, decoding: Any, goes_on: Any, images: Any
    ) -> Any:
        given.append(([own.tolist() for own in prompts], model.training, images, decoding))
        return [[100 + int(own[0])] for own in prompts]

    of_all = [[Answer("d"), Answer("f")], [Answer("e")]]

    def from_all(value: Any) -> Any:
        assert value == of_all[rank]
        return of_all

    monkeypatch.setattr(module, "greedy", write)
    monkeypatch.setattr(module, "from_all", from_all)
    model = own._context.model
    model.train(training)
    assert own.ask(3) == [Answer("d"), Answer("e"), Answer("f")]
    prompts = [[0], [2]] if rank == 0 else [[1]]
    ((asked, mode, images, decoding),) = given
    assert (asked, mode, images) == (prompts, False, [()] * len(prompts))
    assert (decoding.ends, decoding.max_new_tokens) == ({0}, own._options.max_new_tokens)
    assert (model.training, own.on_validation) == (training, own._options.on_validation)


@pytest.mark.parametrize(
    ("tokens", "prompts", "told"),
    [(15, 2, None), (16, 1, "prompt 1 leaves no room"), (17, 3, "prompt 1 (and 2 more) leaves")],
)
def test_prompts_as_long_as_the_context_are_told_of(
    tokens: int, prompts: int, told: str | None, tmp_path: Path
) -> None:
    said = Told()
    own = evaluator(RunDir(tmp_path), 1, said, (None,) * prompts, tokens=tokens)
    own._tell_of_room()
    assert len(said.said) == (told is not None)
    assert told is None or told in said.said[0]


def test_a_conversation_is_shown_with_its_roles_and_a_metric_without_a_before() -> None:
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    row = EvaluatedPrompt(
        **{"prompt": "x", "messages": turns, "reference": "r", "base": "", "tuned": "t"},
        scores={},
        base_scores={},
    )
    found = Evaluation(
        step=4, time=0.0, metrics={"a": 0.5, "b": 1}, base_metrics={"b": 0.25}, samples=[row]
    )
    first, second = messages(found, everything=True)
    assert first.endswith("1 prompt: a 0.50 (before: 0.00), b 1.00 (before: 0.25).")
    assert second == "Asked: system: be brief\nuser: hi\nExpected: r\nBefore: \nAfter: t"
    assert messages(found, everything=False) == [first]
