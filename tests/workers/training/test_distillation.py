"""Distillation: its formula written out, on real gloo ranks; and whole attempts of it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.plan.teacher import teaching_spec
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.rundir.documents import Outcome, OutcomeKind
from ft_service.spec import DataFileRef, DistillationOptions, JobSpec
from ft_service.spec.teachers import TeacherRef
from tests.support.ranks import run_on_ranks
from tests.support.training.attempts import adapter, losses, run_attempt, table, trained
from tests.support.training.models import (
    VOCABULARY,
    reference,
    save_chat_base,
    save_tiny_llama,
    spec_for,
)
from tests.support.training.parity import CPU, Step, assert_parity, constructed, full
from workers.attempt.prepared_teacher import teaching_base
from workers.base.load import adapters, plain_name
from workers.data.batches import collate
from workers.data.micro_batches import MicroBatchLimits
from workers.model.divergence import (
    Divergence,
    Likeliest,
    divergence_gradient,
    divergence_sums,
)
from workers.ranks.sharding import make_mesh
from workers.training.distillation import Taught, TaughtSums
from workers.training.objective import RankShare
from workers.training.step import forward_backward
from workers.training.teachers import Teacher, factors_of

STEPS = 2
COUNT = 5
KINDS = (("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.3))
CONTEXT = "Say only the number. "
MORE_WORDS = 8
"""Rows of another base's embedding beyond those of the student's."""


class Case(NamedTuple):
    """A loss and its teacher."""

    kind: str
    beta: float
    who: str = "base"
    """Or tuned: an adapter on it; or other: another base, wider and with more words."""
    top_k: int | None = None


CASES = (
    *(Case(kind, beta) for kind, beta in KINDS),
    Case("reverse_kl", 0.5, "tuned"),
    Case("jsd", 0.3, "tuned", 5),
    Case("forward_kl", 0.5, "other"),
    Case("reverse_kl", 0.5, "other", 7),
)


def options_of(kind: str, beta: float, top_k: int | None = None) -> DistillationOptions:
    return DistillationOptions(
        loss_type=kind,  # pyright: ignore[reportArgumentType]
        beta=beta,
        with_context=CONTEXT,
        top_k=top_k,
    )


def teachers_beside(folder: Path) -> dict[str, TeacherRef]:
    """A tuned model on the base of that folder, and another base, beside it."""
    other = save_tiny_llama(
        folder.with_name("other"), hidden_size=96, vocab_size=VOCABULARY + MORE_WORDS
    )
    tuned = folder.with_name("tuned")
    config = LoraConfig(r=3, lora_alpha=9, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config
    )
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(str(tuned))
    return {
        "tuned": TeacherRef(kind="adapter", name="tuned", path=str(tuned), job_id="ftjob-1"),
        "other": TeacherRef(kind="base", name="other", path=str(other)),
    }


def drawn_samples() -> TokenSet:
    """What the student reads, then the same behind a context; one context is so long that the cut
    leaves only some of its answer.
    """
    generator = torch.Generator().manual_seed(2)

    def drawn(length: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()

    samples: list[Tokens] = []
    for i in range(COUNT):
        answer = drawn(9 - i)
        for before in (drawn(3 + i), drawn(12 + 3 * i)):
            ids = np.array(before + answer, dtype=np.int32)
            samples.append(Tokens(ids, np.arange(len(ids)) >= len(before)))
    return TokenSet.of(samples).cut(28, pairs=True)


@torch.no_grad()
def descend(parameters: dict[str, Any]) -> None:
    for parameter in parameters.values():
        parameter.sub_(parameter.grad, alpha=0.05)
        parameter.grad = None


def our_steps(
    rank: int, world: int, spec: JobSpec, packed: bool, refs: dict[str, TeacherRef]
) -> list[list[Step]]:
    """Steps by the real worker code in each case."""
    built = constructed(spec, world)
    mesh = make_mesh("cpu", world, spec.distributed.replicate)
    teachers = {
        "base": Teacher(),
        "tuned": Teacher(factors_of(built.peft_model, refs["tuned"], torch.float32, CPU)),
        "other": Teacher(base=teaching_base(spec, refs["other"], mesh, CPU)),
    }
    parameters = dict(adapters(built.peft_model))
    begun = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    share = RankShare(rank, world, CPU, MicroBatchLimits(60, None, packed))
    found = []
    for kind, beta, who, top_k in CASES:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(begun[name])
        objective = Taught(drawn_samples(), options_of(kind, beta, top_k), teachers[who])
        items = list(range(COUNT))
        steps = []
        for _ in range(STEPS):
            sums = forward_backward(
                built.peft_model,
                share.batches(objective, items),
                objective.divisor(items),
                world,
                loss_of=objective.loss_of(items),
            )
            read = objective.read(sums.tolist(), items)
            grads = {name: full(p.grad) for name, p in parameters.items()}
            steps.append(Step(read.mean_loss, grads))
            descend(parameters)
        found.append(steps)
    return found


def written_out(model: Path, spec: JobSpec, case: Case, refs: dict[str, TeacherRef]) -> list[Step]:
    """The same by the formula: whole logits, plain autograd, one unsharded process."""
    kind, beta, who, top_k = case
    peft_model: Any = reference(model, spec)
    parameters = {plain_name(n): p for n, p in peft_model.named_parameters() if p.requires_grad}
    teacher = peft_model
    if who == "tuned":
        peft_model.load_adapter(refs["tuned"].path, "teacher")
        peft_model.set_adapter("default")
    if who == "other":
        other = Path(refs["other"].path)
        teacher = reference(other, teaching_spec(spec, str(other), "other"))
    samples = drawn_samples()
    steps = []
    for _ in range(STEPS):
        divergences: list[Tensor] = []
        for i in range(COUNT):
            with torch.no_grad(), _speaking(teacher, who):
                t = _answer(teacher, samples[2 * i + 1])[:, :VOCABULARY].log_softmax(-1)
            s = _answer(peft_model, samples[2 * i]).log_softmax(-1)
            s = s[: len(t)]  # what the cut leaves of both
            if top_k is not None:
                s, t = _grouped(s, t, top_k)
            m = (beta * t.exp() + (1 - beta) * s.exp()).log()
            forward = (t.exp() * (t - s)).sum(-1)
            reverse = (s.exp() * (s - t)).sum(-1)
            mixed = beta * (t.exp() * (t - m)).sum(-1) + (1 - beta) * (s.exp() * (s - m)).sum(-1)
            divergences.append({"forward_kl": forward, "reverse_kl": reverse, "jsd": mixed}[kind])
        loss = torch.cat(divergences).mean()
        loss.backward()
        grads = {name: full(p.grad) for name, p in parameters.items()}
        steps.append(Step(loss.item(), grads))
        descend(parameters)
    return steps


@contextmanager
def _speaking(teacher: Any, who: str) -> Iterator[None]:
    if who != "tuned":
        with teacher.disable_adapter():
            yield
        return
    teacher.set_adapter("teacher")
    yield
    teacher.set_adapter("default")


def _grouped(s: Tensor, t: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The teacher's likeliest words, and all others as one."""
    likeliest = t.topk(k).indices
    others = torch.ones_like(t, dtype=torch.bool).scatter(1, likeliest, value=False)
    of_both = [
        torch.cat(
            [logs.gather(1, likeliest), (logs.exp() * others).sum(1, keepdim=True).log()], dim=1
        )
        for logs in (s, t)
    ]
    return of_both[0], of_both[1]


def _answer(model: torch.nn.Module, sample: Tokens) -> Tensor:
    batch = collate([sample], CPU)
    return model(input_ids=batch.ids).logits.double().flatten(0, 1)[batch.places]


@pytest.mark.parametrize(
    ("world", "storage", "packed"),
    [
        (2, "nf4", True),
        pytest.param(1, "nf4", False, marks=pytest.mark.slow),
        pytest.param(3, "nf4", True, marks=pytest.mark.slow),
        pytest.param(2, "fp8", False, marks=pytest.mark.slow),
        pytest.param(2, "bf16", True, marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_are_those_of_the_formula(
    world: int, storage: str, packed: bool, tmp_path: Path
) -> None:
    model = save_tiny_llama(tmp_path / "base")
    spec = spec_for(
        model, ranks=world, precision={"default": storage, "compute": "fp32"}, lora={"r": 4}
    )
    refs = teachers_beside(model)
    expected = [written_out(model, spec, case, refs) for case in CASES]
    assert len({steps[0].loss for steps in expected}) == len(CASES)
    for rank in run_on_ranks(our_steps, world, spec, packed, refs):
        for ours, truth in zip(rank, expected, strict=True):
            assert_parity(ours, truth)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_a_gradient_is_that_of_the_sum(kind: str, beta: float) -> None:
    generator = torch.Generator().manual_seed(3)
    student, teacher = (
        3 * torch.randn(4, 11, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    student.requires_grad_()
    teacher = teacher.log_softmax(-1)
    divergence = Divergence(kind, beta)
    targets = torch.tensor([0, 3, 10, 5])
    own = student.log_softmax(-1)
    sums = divergence_sums(own, teacher, targets, divergence)
    sums[0].backward()
    assert student.grad is not None
    assert divergence_gradient(own, teacher, divergence).tolist() == [
        pytest.approx(row, abs=1e-12) for row in student.grad.tolist()
    ]
    assert sums[5].item() == pytest.approx(teacher.gather(1, targets[:, None]).sum().item())
    same = divergence_sums(teacher, teacher, targets, divergence)
    assert (same[0].item(), same[4].item()) == (pytest.approx(0, abs=1e-12), 4)
    assert (sums[7].item(), same[7].item()) == (4, 4)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_words_that_are_one_together_share_its_gradient(kind: str, beta: float) -> None:
    generator = torch.Generator().manual_seed(3)
    student, teacher = (
        3 * torch.randn(4, 11, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    student.requires_grad_()
    teacher = teacher.log_softmax(-1)
    targets = torch.tensor([0, 3, 10, 5])
    own = student.log_softmax(-1)
    whole = divergence_sums(own, teacher, targets, Divergence(kind, beta))
    for k in (1, 4, 11, 20):
        divergence = Divergence(kind, beta, k)
        kept = Likeliest.of(teacher, targets, k)
        sums = divergence_sums(own, kept, targets, divergence)
        (expected,) = torch.autograd.grad(sums[0], student, retain_graph=True)
        assert divergence_gradient(own, kept, divergence).tolist() == [
            pytest.approx(row, abs=1e-12) for row in expected.tolist()
        ]
        assert sums[0] <= whole[0] + 1e-12
        assert sums[[1, 4, 5, 6]].tolist() == pytest.approx(whole[[1, 4, 5, 6]].tolist())
        most = teacher.exp().topk(min(k, 11)).values.sum().item()
        assert sums[7].item() == pytest.approx(most)


def test_what_a_server_tells_of_a_teacher_is_what_ranks_keep_of_it() -> None:
    teacher = torch.randn(5, 11, generator=torch.Generator().manual_seed(4)).log_softmax(-1)
    targets = torch.tensor([0, 3, 10, 5, 1])
    kept = Likeliest.of(teacher, targets, 4)
    back = torch.tensor([2, 0, 3, 1])  # servers add a token to their likeliest in any order
    told = Likeliest.of_told(kept.words[:, back], kept.logs[:, :-1][:, back], kept.targets)
    assert told.words.equal(kept.words)
    torch.testing.assert_close(told.logs, kept.logs, rtol=1e-5, atol=1e-6)
    certain = Likeliest.of_told(targets[:, None], torch.zeros(5, 1), torch.zeros(5))
    assert certain.logs[:, -1].tolist() == [pytest.approx(math.log(1e-6), abs=1e-4)] * 5
    both = Likeliest.together([told.rows(slice(0, 2)), told.rows(slice(2, 5))], 4)
    assert both.logs.equal(told.logs)
    assert Likeliest.together([], 4).logs.shape == (0, 5)


def test_only_what_the_cut_leaves_of_both_is_learned() -> None:
    objective = Taught(drawn_samples(), options_of("forward_kl", 0.5), Teacher())
    counts = objective.samples.target_counts.reshape(-1, 2).tolist()
    assert counts == [[9, 9], [8, 8], [7, 7], [6, 6], [5, 4]]
    assert objective.divisor(range(COUNT)) == 34
    batch = objective.micro_batch(objective.members([4]), CPU, None, packed=True)
    assert batch.student.targets.tolist() == batch.teacher.targets.tolist()
    assert len(batch.student.targets) == 4
    assert objective.share_out([0, 4], 1, MicroBatchLimits(28, None, True)) == [[[1]], [[0]]]


def spec_of(folder: Path, *, ranks: int, **training: Any) -> JobSpec:
    def save(name: str, count: int) -> DataFileRef:
        path = folder / name
        lines = [
            {
                "messages": [
                    {"role": "user", "content": f"say {i}"},
                    {"role": "assistant", "content": f"it is {i * 7}" + "!" * (i % 5)},
                ]
            }
            for i in range(count)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return DataFileRef(name=name, path=str(path), sha256=sha256_of(path))

    hyperparameters = {"loss_type": "forward_kl", "batch_size": 6}
    method = {"with_context": CONTEXT, "hyperparameters": hyperparameters}
    return spec_for(
        save_chat_base(folder / "base"),
        save("train.jsonl", 13),
        valid=save("valid.jsonl", 4),
        ranks=ranks,
        method={"type": "distillation", "distillation": method},
        precision={"default": "nf4", "compute": "fp32"},
        training={
            "max_steps": 4,
            "tokens_per_micro_batch": 128,
            "learning_rate": 5e-3,
            "eval_steps": 2,
            **training,
        },
        checkpoint={"save_steps": 2, "save_total_limit": 10},
        lora={"r": 4, "lora_dropout": 0.1},
    )


@pytest.mark.slow
def test_a_context_is_learned_alike_on_ranks_and_resumed(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, ranks=2)
    finished = trained(spec, tmp_path / "finished", 2)
    rows = table(finished)
    for row in rows:
        assert float(row["train_loss"]) == pytest.approx(float(row["kl/forward"]), rel=1e-6)
    assert 0 < float(rows[-1]["valid_loss"]) < float(rows[1]["valid_loss"])
    assert "valid_teacher/gap" in rows[-1]

    alone = trained(spec, tmp_path / "alone", 1)
    assert losses(alone) == pytest.approx(losses(finished), rel=1e-5, abs=1e-7)

    run = RunDir(tmp_path / "resumed")
    shutil.copytree(finished.path("attempts"), run.path("attempts"))
    shutil.copytree(finished.path("checkpoints/step-2-a1"), run.path("checkpoints/step-2-a1"))
    for name in ("spec.json", "origins.json"):
        shutil.copy(finished.path(name), run.path(name))
    assert run_attempt(run, 2, 2, "step-2-a1") == Outcome(kind=OutcomeKind.SUCCEEDED)
    assert losses(run) == losses(finished)
    for name, matrix in adapter(finished).items():
        assert torch.equal(adapter(run)[name], matrix), name


def test_sums_over_answers_are_read_as_means_over_their_tokens() -> None:
    one = TaughtSums((6.0, 3.0, 8.0, 4.0, 2.0, -10.0, -14.0, 3.0), 4)
    assert (one.loss, one.mean_loss, one.accuracy, one.is_impossible) == (6.0, 1.5, 0.75, False)
    means = {"kl/forward": 2.0, "kl/reverse": 1.0, "teacher/agreement": 0.5}
    logs = {"teacher/logps": -2.5, "student/logps": -3.5, "teacher/gap": 1.0}
    assert one.more == {**means, **logs}
    some = TaughtSums(one.sums, 4, of_some_words=True)
    assert some.more == {**means, **logs, "teacher/kept": 0.75}
    both = some.plus(TaughtSums((1.0,) * 8, 2, of_some_words=True))
    assert (both.sums[0], both.sums[5], both.targets, both.of_some_words) == (7.0, -9.0, 6, True)
    nothing = TaughtSums((0.0,) * 8, 0)
    assert (nothing.mean_loss, nothing.accuracy, nothing.more["kl/forward"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("with_context", [True, False])
def test_an_item_is_what_the_student_reads_and_what_its_teacher_does(with_context: bool) -> None:
    options = options_of("forward_kl", 0.5).model_copy(
        update={"with_context": CONTEXT if with_context else None}
    )
    samples = drawn_samples()
    objective = Taught(samples, options, Teacher())
    of_item = 2 if with_context else 1
    assert len(objective) == len(samples) // of_item
    members = objective.members([2, 1])
    assert members == ([4, 5, 2, 3] if with_context else [2, 1])
    batch = objective.micro_batch(members, CPU, [10, 11, 12, 13][: len(members)], packed=True)
    lengths = samples.lengths.tolist()
    assert batch.student.ids.shape[1] == sum(lengths[i] for i in members[::of_item])
    assert batch.teacher.ids.shape[1] == sum(lengths[i] for i in members[of_item - 1 :: of_item])
    assert (batch.told, batch.teacher.keys) == (None, None)
    read = objective.read([1.0] * 8, [2, 1])
    assert isinstance(read, TaughtSums)
    assert (read.targets, read.of_some_words) == (objective.divisor([2, 1]), False)
