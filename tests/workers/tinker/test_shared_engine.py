"""Clients' training loops in one engine: each leaves, bit for bit, what it leaves when it has its
ranks to itself.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import OutcomeKind
from ft_service.spec import JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.attempts import adapter, run_attempt
from tests.support.training.commands import Script, examples, loop_spec
from tests.support.training.engine_runs import engine_on_rank, new_engine, prepare
from tests.support.training.models import save_chat_base

PRECISION = {"default": "nf4", "compute": "fp32"}
STEPS = 2


def spec_of(base: Path, number: int) -> JobSpec:
    spec = loop_spec(base, ranks=2, lora={"r": 4 * number}, precision=PRECISION)
    return spec.model_copy(update={"job_id": f"ftjob-{number}", "seed": number})


def put(script: Script, number: int, step: int) -> None:
    script.losses(examples(3 + number, seed=10 * number + step))
    script.step()


def test_two_clients_that_take_turns_train_what_each_trains_alone(tmp_path: Path) -> None:
    base = save_chat_base(tmp_path / "base")
    alone = []
    for number in (1, 2):
        run = RunDir(tmp_path / f"alone-{number}")
        run.write("spec.json", spec_of(base, number))
        script = Script(run)
        for step in range(STEPS):
            put(script, number, step)
        script.add("finish")
        assert run_attempt(run, 1, 2).kind is OutcomeKind.SUCCEEDED
        alone.append(run)

    engine = new_engine(tmp_path / "engine", spec_of(base, 1))
    runs = [RunDir(tmp_path / f"shared-{number}") for number in (1, 2)]
    for run, number in zip(runs, (1, 2), strict=True):
        prepare(spec_of(base, number), run, engine)

    def clients() -> None:
        """The second client's next command comes when the first one's last is answered, and the
        other way round.
        """
        scripts = [Script(run) for run in runs]
        for step in range(STEPS):
            for script, number in zip(scripts, (1, 2), strict=True):
                put(script, number, step)
                while not script.log.has_result(script.seq):
                    if ended.wait(0.01):
                        return
        for script in scripts:
            script.add("finish")

    ended = threading.Event()
    thread = threading.Thread(target=clients)
    thread.start()
    try:
        run_on_ranks(engine_on_rank, 2, str(engine.root))
    finally:
        ended.set()
        thread.join()
    for run, other in zip(runs, alone, strict=True):
        assert {
            name: np.array_equal(tensor, adapter(other)[name])
            for name, tensor in adapter(run).items()
        } == dict.fromkeys(adapter(other), True)
