"""Which addresses are public: every entry of IANA's registries by name, the same on every version
of Python.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from ft_service.host.public_addresses import EMBEDDING, NOT_PUBLIC_V4, NOT_PUBLIC_V6, is_public

PUBLIC = {
    "1.1.1.1": "a public resolver",
    "192.0.1.1": "next to the IETF's assignments",
    "172.32.0.1": "behind private use",
    "100.63.255.255": "before shared address space",
    "100.128.0.1": "behind it",
    "198.17.255.255": "before benchmarking",
    "223.255.255.255": "before multicast",
    "2606:4700::1111": "a public resolver",
    "2001:200::1": "of a regional registry, behind the IETF's assignments",
    "2001:db9::1": "behind documentation",
    "2003::1": "behind 6to4",
    "::ffff:1.1.1.1": "IPv4-mapped",
    "64:ff9b::1.1.1.1": "NAT64, well-known prefix",
}
NOT_PUBLIC = {
    "0.0.0.0": "this host",
    "0.1.2.3": "this network",
    "10.1.2.3": "private use",
    "100.64.0.1": "shared address space",
    "127.0.0.1": "loopback",
    "127.255.255.255": "loopback",
    "169.254.169.254": "link local: metadata of clouds",
    "172.16.0.1": "private use",
    "172.31.255.255": "private use",
    "192.0.0.1": "IETF protocol assignments",
    "192.0.0.8": "dummy address",
    "192.0.0.9": "port control protocol anycast",
    "192.0.0.170": "NAT64 discovery",
    "192.0.0.192": "metadata of a cloud",
    "192.0.2.1": "documentation",
    "192.31.196.1": "AS112",
    "192.52.193.1": "AMT",
    "192.88.99.1": "6to4 relay anycast",
    "192.168.1.1": "private use",
    "192.175.48.1": "AS112, direct delegation",
    "198.18.0.1": "benchmarking",
    "198.19.255.255": "benchmarking",
    "198.51.100.1": "documentation",
    "203.0.113.1": "documentation",
    "224.0.0.1": "multicast",
    "239.255.255.255": "multicast",
    "240.0.0.1": "reserved",
    "255.255.255.255": "limited broadcast",
    "::": "unspecified",
    "::1": "loopback",
    "::127.0.0.1": "IPv4-compatible",
    "::1.1.1.1": "IPv4-compatible, of a public address",
    "::ffff:127.0.0.1": "IPv4-mapped",
    "::ffff:10.0.0.1": "IPv4-mapped",
    "::ffff:192.0.0.192": "IPv4-mapped",
    "::ffff:0:127.0.0.1": "IPv4-translated (SIIT)",
    "::ffff:0:1.1.1.1": "IPv4-translated, of a public address",
    "64:ff9b::127.0.0.1": "NAT64, well-known prefix",
    "64:ff9b::10.0.0.1": "NAT64, well-known prefix",
    "64:ff9b:1::127.0.0.1": "NAT64, local use",
    "64:ff9b:1::1.1.1.1": "NAT64, local use, of a public address",
    "100::1": "discard only",
    "100:0:0:1::1": "dummy prefix",
    "200::1": "not allocated (OSI)",
    "400::1": "not allocated",
    "2001::1": "Teredo",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2": "Teredo",
    "2001:1::1": "port control protocol anycast",
    "2001:2::1": "benchmarking",
    "2001:3::1": "AMT",
    "2001:4:112::1": "AS112",
    "2001:10::1": "ORCHID, deprecated",
    "2001:20::1": "ORCHIDv2",
    "2001:30::1": "drone remote identification",
    "2001:db8::1": "documentation",
    "2002:7f00:1::": "6to4 of loopback",
    "2002:101:101::": "6to4 of a public address",
    "2620:4f:8000::1": "AS112, direct delegation",
    "3ffe::1": "6bone",
    "3fff::1": "documentation",
    "4000::1": "not allocated",
    "5f00::1": "segment routing",
    "fc00::1": "unique local",
    "fd00:ec2::254": "unique local: metadata of a cloud",
    "fe80::1": "link local",
    "febf::1": "link local",
    "fec0::1": "site local, deprecated",
    "feff::1": "site local, deprecated",
    "ff02::1": "multicast",
    "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff": "multicast",
}


@pytest.mark.parametrize("address", PUBLIC)
def test_public(address: str) -> None:
    assert is_public(ip_address(address))


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_not_public(address: str) -> None:
    assert not is_public(ip_address(address)), NOT_PUBLIC[address]


def test_every_network_of_the_lists_is_tried_to_its_ends() -> None:
    for listed in (NOT_PUBLIC_V4, NOT_PUBLIC_V6):
        for network in map(ip_network, listed):
            assert not is_public(network[0])
            assert not is_public(network[-1])
            tried = [ip_address(address) for address in NOT_PUBLIC]
            assert any(
                address in network for address in tried if address.version == network.version
            ), network
    assert all(
        any(ip_address(address) in ip_network(network) for address in PUBLIC if ":" in address)
        for network in EMBEDDING
    )


def test_what_pythons_own_list_says_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changed in patch releases: 3.11.10, 3.12.4, 3.13.0."""
    for kind in (type(ip_address("1.1.1.1")), type(ip_address("::1"))):
        for name in (
            "is_global",
            "is_private",
            "is_reserved",
            "is_multicast",
            "is_loopback",
            "is_link_local",
            "is_unspecified",
        ):
            monkeypatch.setattr(kind, name, property(lambda self: pytest.fail(f"asked {self}")))
        for name in ("ipv4_mapped", "sixtofour", "teredo", "is_site_local"):
            if hasattr(kind, name):
                monkeypatch.setattr(kind, name, property(lambda self: pytest.fail(f"asked {self}")))
    assert all(is_public(ip_address(address)) for address in PUBLIC)
    assert not any(is_public(ip_address(address)) for address in NOT_PUBLIC)
