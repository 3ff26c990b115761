from __future__ import annotations

import pytest

from ft_service.errors import SpecError
from ft_service.host.webhook_receiver import NotPublicError, address_of, parse_receiver


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://example.org/", "must begin with https://"),
        ("https:///path", "and a host"),
        ("https://user@example.org/", "neither a user name nor a fragment"),
        ("https://example.org:0/", "port 0 is not one from 1 to 65535"),
        ("https://10.0.0.1/", "10.0.0.1 is not a public address"),
        ("https://127.1/", "ends in a number and is not an IPv4 address"),
        ("https://exa~mple.org/", "is not the name of a host"),
        ("https://example.org/" + "a" * 2048, "at most 2048 characters"),
    ],
)
def test_a_url_that_nothing_can_be_delivered_to_is_refused(url: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        parse_receiver(url, allow_private=False)
    assert caught.value.param == "url"


def test_private_addresses_and_plain_http_are_taken_where_they_are_allowed() -> None:
    receiver = parse_receiver("http://10.0.0.1/hook", allow_private=True)
    assert (receiver.host, receiver.port) == ("10.0.0.1", 80)
    assert parse_receiver("https://example.org", allow_private=False).port == 443


def test_one_private_address_among_those_of_a_name_is_enough_to_refuse_it() -> None:
    receiver = parse_receiver("https://example.org/", allow_private=False)
    infos = [(2, 1, 6, "", (address, 443)) for address in ("93.184.215.14", "192.168.1.1")]
    assert address_of(receiver, infos[:1], allow_private=False) == "93.184.215.14"
    assert address_of(receiver, infos, allow_private=True) == "93.184.215.14"
    with pytest.raises(
        NotPublicError, match="resolves to an address that is not public"
    ) as refused:
        address_of(receiver, infos, allow_private=False)
    assert "192.168" not in str(refused.value), (
        "users do not learn addresses of the internal network"
    )
