"""Usage and keys of an organisation as views. Pure."""

from __future__ import annotations

from api.wire.organization_views import api_key_view, new_api_key_view, usage_csv, usage_view
from ft_service.store.records import ApiKey, Usage

MORE = {"cost": 2_250_000, "currency": "EUR", "joules": 7.5}
ROWS = [
    Usage(day=1, project_id="p", key_id=None, slot_seconds=1.5, tokens=10, bytes=3, jobs=2, **MORE)
]


def test_usage_has_a_bucket_for_every_day() -> None:
    page = usage_view(ROWS, 0, 2, next_page="3")
    assert [(bucket.start_time, bucket.end_time) for bucket in page.data] == [
        (0, 86_400),
        (86_400, 172_800),
        (172_800, 259_200),
    ]
    assert [len(bucket.results) for bucket in page.data] == [0, 1, 0]
    [result] = page.data[1].results
    assert result.model_dump(exclude={"object"}) == {
        "trained_tokens": 10,
        "gpu_seconds": 1.5,
        "uploaded_bytes": 3,
        "num_jobs": 2,
        "cost": {"value": 2.25, "currency": "EUR"},
        "energy_joules": 7.5,
        "co2_grams": None,
        "project_id": "p",
        "api_key_id": None,
    }
    assert (page.has_more, page.next_page) == (True, "3")


def test_usage_as_csv() -> None:
    assert usage_csv(ROWS) == (
        "day,project_id,api_key_id,trained_tokens,gpu_seconds,uploaded_bytes,num_jobs,"
        "cost,currency,energy_joules,co2_grams\n"
        "1970-01-02,p,,10,1.5,3,2,2.25,EUR,7.5,\n"
    )


def test_a_key_is_active_until_it_expires_or_is_revoked_and_its_secret_is_shown_once() -> None:
    key = ApiKey(
        id="key_1",
        project_id="p",
        name="n",
        scope="admin",
        prefix="ft-ab",
        created_at=1.5,
        expires_at=100.0,
    )
    view = new_api_key_view(key, "ft-abc", now=99.0)
    assert (view.value, view.redacted_value, view.owner_project_access) == (
        "ft-abc",
        "ft-ab\N{HORIZONTAL ELLIPSIS}",
        "active",
    )
    assert (view.owner.service_account.role, view.owner.service_account.id) == ("owner", "key_1")
    assert api_key_view(key, now=100.0).owner_project_access == "inactive"
    assert "value" not in api_key_view(key, now=1.0).model_dump()
