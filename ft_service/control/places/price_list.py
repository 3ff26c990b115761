"""The operator's prices (FT_PRICES): what a slot-hour costs in each place where jobs run, and on
kinds of hardware that plans speak of.

    currency: EUR
    slot_hour: 1.20             # of every place that is not named below
    grams_per_kwh: 340          # of CO2, likewise
    places:                     # name of a host, or of a profile
      spot: {slot_hour: 0.45}
    hardware:                   # names of `ft plan --hardware`
      H100: 2.90
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError

from ft_service.control.places.capacity import Capacity
from ft_service.errors import SpecError
from ft_service.launcher.kubernetes.profile import load_profiles
from ft_service.launcher.local_launcher import host_id
from ft_service.launcher.slurm.slurm_profile import load_slurm_profiles
from ft_service.money import MICROS, Rate, micros
from ft_service.plan.machines import find_machine
from ft_service.settings import Settings
from ft_service.spec import Strict, spec_error
from ft_service.spec.option_types import Number
from ft_service.spec.yaml_loader import read_yaml_setting
from ft_service.wording import did_you_mean

SETTING = "FT_PRICES"


def _whole_micros(price: float) -> float:
    """Raises ValueError for a price that money cannot hold exactly."""
    if Decimal(str(price)) * MICROS % 1:
        raise ValueError("has more than six digits behind the point: round it")
    return price


Price = Annotated[Number, Field(gt=0, le=1_000_000), AfterValidator(_whole_micros)]
Grams = Annotated[Number, Field(ge=0, le=10_000)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class PlacePrice(Strict):
    """What a place takes."""

    slot_hour: Price
    """Price of a slot for an hour, with at most six digits behind the point."""
    grams_per_kwh: Grams | None = None
    """Grams of CO2 of a kWh there; None: those of the whole file."""


class PriceFile(Strict):
    """The contents of FT_PRICES."""

    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")]
    """Three letters (ISO 4217), such as EUR."""
    slot_hour: Price | None = None
    """Price of a slot-hour in places that are not named; None: they have no price."""
    grams_per_kwh: Grams | None = None
    """Grams of CO2 of a kWh; None: not known."""
    places: dict[Name, PlacePrice] = Field(default_factory=dict)
    """By the name of a host, or of a profile."""
    hardware: dict[Name, Price] = Field(default_factory=dict)
    """Prices for plans, by a name of `ft plan --hardware`."""


@dataclass(frozen=True)
class PriceList:
    """The prices of a service. Without FT_PRICES nothing has one."""

    file: PriceFile | None = None
    here: str = ""
    """Name of the place of jobs that name no profile: this host, or the cluster's launcher."""

    @property
    def currency(self) -> str | None:
        """None: there are no prices."""
        return None if self.file is None else self.file.currency

    def rate(self, host: str) -> Rate | None:
        """What a host takes (`Launcher.host`); None: it has no price."""
        file = self.file
        if file is None:
            return None
        place = next((file.places[name] for name in _names(host) if name in file.places), None)
        price = file.slot_hour if place is None else place.slot_hour
        if price is None:
            return None
        own = None if place is None else place.grams_per_kwh
        grams = file.grams_per_kwh if own is None else own
        return Rate(micros(price), file.currency, grams)

    def rate_of(self, capacity: Capacity) -> Rate | None:
        """What the place of a job takes: of one that any host may start, this host."""
        return self.rate(capacity.host or self.here)

    def rate_of_hardware(self, machine: str) -> Rate | None:
        """What a kind of hardware takes, by its name in `ft_service.plan.machines`."""
        if self.file is None or machine not in self.file.hardware:
            return None
        return Rate(micros(self.file.hardware[machine]), self.file.currency)


def price_list(settings: Settings) -> PriceList:
    """The prices of the settings, read once.

    Raises SpecError that names the file and the field: an unknown key, a place that no profile is
    called, unknown hardware.
    """
    if settings.prices is None:
        return PriceList()
    prices = _read(settings.prices)
    known = _profiles(settings)
    for name in prices.places if known else ():
        if name not in known:
            raise _wrong(
                settings.prices,
                f"places.{name}: jobs run in no place of this name.{did_you_mean(name, known)} There "
                f"are {', '.join(sorted(known))}.",
            )
    return PriceList(prices, host_id() if settings.launcher == "local" else settings.launcher)


def refuse_other_currency(settings: Settings, recorded: str | None) -> None:
    """Raise SpecError if the costs that are recorded are in another currency than the prices.

    `recorded`: None: there are none.
    """
    currency = price_list(settings).currency
    if currency is None or recorded is None or currency == recorded:
        return
    assert settings.prices is not None, "there is a currency"
    raise _wrong(
        settings.prices,
        f"currency = {currency}: the costs in the database are in {recorded}, and are never "
        f"converted. Give prices in {recorded}.",
    )


@lru_cache(maxsize=16)
def _read(path: Path) -> PriceFile:
    given = read_yaml_setting(SETTING, path)
    try:
        file = PriceFile.model_validate({} if given is None else given)
    except ValidationError as error:
        raise _wrong(path, spec_error(error, PriceFile).message) from None
    hardware: dict[str, float] = {}
    for name, price in file.hardware.items():
        try:
            machine = find_machine(name).name
        except SpecError as error:
            said = error.message.removeprefix(f"--hardware = {name!r}: ")
            raise _wrong(path, f"hardware.{name}: {said}") from None
        if machine in hardware:
            raise _wrong(path, f"hardware.{name}: {machine} is given twice. Keep one.")
        hardware[machine] = price
    return file.model_copy(update={"hardware": hardware})


def _wrong(path: Path, why: str) -> SpecError:
    return SpecError(f"{SETTING} = {path}: {why}", param=SETTING)


def _names(host: str) -> Iterable[str]:
    """Names under which a host may stand in the file."""
    yield host
    if "/" in host:  # of a cluster: its profile, or its launcher where it has only one
        yield host.partition("/")[2]
        yield host.partition("/")[0]
    elif host == host_id():
        yield platform.node()


def _profiles(settings: Settings) -> set[str]:
    """Names of the cluster's profiles, and its launcher's name where it has only one, without a
    name; empty: jobs run on hosts, which may be called anything.
    """
    named: Iterable[str | None] = ()
    if settings.launcher == "kubernetes" and settings.pod_profile is not None:
        named = load_profiles(settings.pod_profile).by_name
    elif settings.launcher == "slurm" and settings.slurm_profile is not None:
        named = load_slurm_profiles(settings.slurm_profile).by_name
    return {name or settings.launcher for name in named}
