from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest

from ft_service.control.checkup import Verdict, prices
from ft_service.control.places.capacity import capacity_of
from ft_service.control.places.price_list import price_list, refuse_other_currency
from ft_service.errors import SpecError
from ft_service.launcher.local_launcher import host_id
from ft_service.money import Rate
from ft_service.settings import Settings

WHOLE = """\
currency: EUR
slot_hour: 1.20
grams_per_kwh: 340
places:
  spot: {slot_hour: 0.45, grams_per_kwh: 20}
  slurm/big: {slot_hour: 3}
hardware:
  h100: 2.90
  NVIDIA A100-SXM4-80GB: 1.75
"""


def settings_with(folder: Path, text: str, **changes: object) -> Settings:
    path = folder / "prices.yaml"
    path.write_text(text)
    return Settings(home=folder, prices=path).model_copy(update=changes)


def test_places_hardware_and_the_rest_have_their_prices(tmp_path: Path) -> None:
    known = price_list(settings_with(tmp_path, WHOLE))
    assert known.rate("somewhere") == Rate(1_200_000, "EUR", 340.0)
    assert known.rate("spot") == known.rate("kubernetes/spot") == Rate(450_000, "EUR", 20.0)
    assert known.rate("slurm/big") == Rate(3_000_000, "EUR", 340.0)
    assert known.rate("kubernetes/big") == Rate(1_200_000, "EUR", 340.0)
    assert known.rate_of_hardware("H100") == Rate(2_900_000, "EUR")
    assert known.rate_of_hardware("A100") == Rate(1_750_000, "EUR")
    assert known.rate_of_hardware("L4") is None


def test_a_host_is_named_by_its_id_or_its_name(tmp_path: Path) -> None:
    text = f"currency: USD\nplaces:\n  {platform.node()}: {{slot_hour: 2}}\n"
    settings = settings_with(tmp_path, text)
    known = price_list(settings)
    assert known.rate(host_id()) == Rate(2_000_000, "USD")
    assert known.rate("another") is None
    assert known.rate_of(capacity_of(settings)) == known.rate(host_id())
    assert known.rate_of(replace(capacity_of(settings), host="slurm/x")) is None
    assert prices(settings).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "currency"),
        ("currency: euro\n", "currency"),
        ("currency: EUR\nslot_hours: 1\n", "slot_hour"),
        ("currency: EUR\nslot_hour: 0\n", "slot_hour"),
        ("currency: EUR\nslot_hour: 1.2345678\n", "slot_hour"),
        ("currency: EUR\nslot_hour: .inf\n", "slot_hour"),
        ("currency: EUR\ngrams_per_kwh: -1\n", "grams_per_kwh"),
        ("currency: EUR\nplaces: {a: {slot_hour: 1, grams: 3}}\n", "places.a.grams"),
        ("currency: EUR\nplaces: {a: 1}\n", "places.a"),
        ("currency: EUR\nhardware: {H1000: 1}\n", "hardware.H1000"),
        ("currency: EUR\nhardware: {H100: 1, h-100: 2}\n", "hardware.h-100"),
        ("currency: EUR\ncurrency: USD\n", "currency"),
        ("[1]\n", "FT_PRICES"),
    ],
)
def test_a_fault_is_refused_by_its_place(tmp_path: Path, text: str, said: str) -> None:
    settings = settings_with(tmp_path, text)
    with pytest.raises(SpecError) as caught:
        price_list(settings)
    assert caught.value.param == "FT_PRICES"
    assert str(settings.prices) in caught.value.message
    assert said in caught.value.message
    found = prices(settings)
    assert (found.verdict, found.found) == (Verdict.FAULT, caught.value.message)


def test_a_misspelt_key_is_answered_with_the_one_that_was_meant(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="slot_hour"):
        price_list(settings_with(tmp_path, "currency: EUR\nslot_huor: 1\n"))


@pytest.mark.parametrize(
    ("profiles", "place"),
    [("profiles: {big: {}, spot: {}}\n", "spot"), ("", "slurm")],
)
def test_places_of_a_cluster_are_its_profiles(tmp_path: Path, profiles: str, place: str) -> None:
    (tmp_path / "slurm.yaml").write_text(f"ranks_per_node: 1\n{profiles}")
    cluster = {"launcher": "slurm", "slurm_profile": tmp_path / "slurm.yaml"}
    text = f"currency: EUR\nplaces: {{{place}: {{slot_hour: 1}}}}\n"
    known = price_list(settings_with(tmp_path, text, **cluster))
    capacity = capacity_of(Settings(home=tmp_path))
    host = None if place == "slurm" else f"slurm/{place}"
    assert known.rate_of(replace(capacity, host=host)) == Rate(1_000_000, "EUR")
    assert known.rate("slurm/other") == (known.rate("slurm") if host is None else None)
    (tmp_path / "other").mkdir()
    with pytest.raises(SpecError, match=rf"places\.{place}t: .*{place}") as caught:
        price_list(settings_with(tmp_path / "other", text.replace(place, f"{place}t"), **cluster))
    assert caught.value.param == "FT_PRICES"


def test_a_missing_file_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="FT_PRICES"):
        price_list(Settings(home=tmp_path, prices=tmp_path / "none.yaml"))
    without = Settings(home=tmp_path)
    assert price_list(without).rate("any") is None
    assert price_list(without).currency is None
    assert prices(without).verdict is Verdict.OK


def test_costs_keep_their_currency(tmp_path: Path) -> None:
    settings = settings_with(tmp_path, WHOLE)
    for recorded in (None, "EUR"):
        refuse_other_currency(settings, recorded)
    with pytest.raises(SpecError, match="USD") as caught:
        refuse_other_currency(settings, "USD")
    assert caught.value.param == "FT_PRICES"
    refuse_other_currency(Settings(home=tmp_path), "USD")


def test_a_host_without_a_price_is_worth_a_look(tmp_path: Path) -> None:
    text = "currency: EUR\nplaces: {elsewhere: {slot_hour: 1}}\n"
    assert prices(settings_with(tmp_path, text)).verdict is Verdict.LOOK
