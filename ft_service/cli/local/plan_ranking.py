"""`ft plan --hardware all`: a job on every known GPU, the best first."""

from __future__ import annotations

from collections.abc import Iterator

from ft_service.bases.description import Description
from ft_service.cli.local.job_inputs import JobData, describe_job, examine_data
from ft_service.cli.output import print_json, print_note, print_table, print_text
from ft_service.control.places.price_list import PriceList, price_list
from ft_service.errors import SpecError
from ft_service.host.hardware import gpu_count
from ft_service.ids import new_id
from ft_service.money import micros, money_text
from ft_service.plan.auto_options import within_context
from ft_service.plan.job import MOST_PER_HOST, plan_job, training_cost, training_time
from ft_service.plan.machines import MACHINES
from ft_service.plan.ranking import Choice, ranked
from ft_service.settings import Settings
from ft_service.spec import JobSpec
from ft_service.spec_files.spec_file import SpecFile, resolve_spec_file
from ft_service.wording import bytes_text, counted, duration_text

ALL = "all"
"""The name that stands for every GPU of the table."""


def rank_hardware(loaded: SpecFile, settings: Settings, *, as_json: bool) -> None:
    """Show the GPUs by money where FT_PRICES knows one, else by time.

    Raises SpecError for a SPEC without data, whose time nobody knows, and for a sweep.
    """
    if not loaded.has_data:
        raise SpecError(
            "--hardware all: it orders GPUs by what the training takes there, which depends on the "
            "data. Give a SPEC or a data file, or name one GPU.",
            param="hardware",
        )
    if loaded.sweep is not None:
        raise SpecError(
            "--hardware all: it compares one job. Leave sweep out of the SPEC, or name one GPU.",
            param="hardware",
        )
    gpus = max(1, gpu_count())
    found = resolve_spec_file(
        loaded, settings, job_id=new_id("ftjob-"), seed=0, to_train=False, gpus=gpus
    )
    base = describe_job(found, settings, print_note)
    spec = within_context(base, found)
    data = examine_data(spec, settings, print_note, base, need_counts=False)
    choices = ranked(_choices(base, spec, data, price_list(settings)))
    if as_json:
        print_json([choice.as_dict() for choice in choices])
        return
    _show(choices, spec.world_size)


def _choices(
    base: Description, spec: JobSpec, data: JobData, prices: PriceList
) -> Iterator[Choice]:
    for name, machine in MACHINES.items():
        try:
            plan = plan_job(base, spec, machine, data.lengths(spec), MOST_PER_HOST)
        except SpecError as error:
            yield Choice(name, None, why_not=error.message)
            continue
        time = training_time(plan, spec, data.examples)
        cost = training_cost(time, spec.world_size, prices.rate_of_hardware(name))
        yield Choice(name, plan, time, cost)


def _show(choices: list[Choice], ranks: int) -> None:
    priced = any(choice.price is not None for choice in choices)
    order = "by cost, then those without a price by time" if priced else "by time"
    print_text(f"On {counted(ranks, 'GPU')} of each kind, {order}; what may not fit comes last.")
    print_table(
        ("HARDWARE", "FITS", "PER RANK", "TIME", *(("COST",) if priced else ())),
        [_row(choice, priced) for choice in choices],
    )
    if not priced:
        print_text("Prices in FT_PRICES (hardware) order them by cost.")


def _row(choice: Choice, priced: bool) -> list[str]:
    plan = choice.plan
    size = "" if plan is None else bytes_text(plan.rank.total)
    time = "" if choice.seconds is None else duration_text(choice.seconds)
    row = [choice.hardware, "yes" if choice.fits else "no", size, time]
    if not priced:
        return row
    cost = choice.cost
    if cost is None or choice.price is None:
        return [*row, ""]
    return [*row, money_text(micros(choice.price), cost["currency"])]
