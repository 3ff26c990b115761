"""Public internet addresses by IANA's registries of special-purpose addresses.

The lists are spelled out, since the result of `ipaddress.is_global` differs between patch releases
of Python. An IPv6 address that embeds an IPv4 address is public if that address is and the
embedding is in public use (IPv4-mapped, NAT64's well-known prefix). All other embeddings
(compatible, translated, local NAT64, 6to4, Teredo) lead into unknown networks and are not public.

https://www.iana.org/assignments/iana-ipv4-special-registry,
https://www.iana.org/assignments/iana-ipv6-special-registry,
https://www.iana.org/assignments/ipv6-address-space, as of November 2026.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

NOT_PUBLIC_V4: dict[str, str] = {
    "0.0.0.0/8": "this network",
    "10.0.0.0/8": "private use",
    "100.64.0.0/10": "shared address space (carrier-grade NAT)",
    "127.0.0.0/8": "loopback",
    "169.254.0.0/16": "link local",
    "172.16.0.0/12": "private use",
    "192.0.0.0/24": "IETF protocol assignments",
    "192.0.2.0/24": "documentation",
    "192.31.196.0/24": "AS112",
    "192.52.193.0/24": "AMT",
    "192.88.99.0/24": "6to4 relay anycast, deprecated",
    "192.168.0.0/16": "private use",
    "192.175.48.0/24": "AS112, direct delegation",
    "198.18.0.0/15": "benchmarking",
    "198.51.100.0/24": "documentation",
    "203.0.113.0/24": "documentation",
    "224.0.0.0/4": "multicast",
    "240.0.0.0/4": "reserved, and limited broadcast",
}
"""Network → its use."""
PUBLIC_V6 = IPv6Network("2000::/3")
"""Global unicast addresses that IANA has allocated.

All others (loopback, unique local, link local, site local, multicast, segment routing's 5f00::/16,
discard-only 100::/64, unallocated) are not public, except the embeddings below.
"""
NOT_PUBLIC_V6: dict[str, str] = {
    "2001::/23": "IETF protocol assignments: Teredo, benchmarking, ORCHID, AMT, AS112, and others",
    "2001:db8::/32": "documentation",
    "2002::/16": "6to4",
    "2620:4f:8000::/48": "AS112, direct delegation",
    "3ffe::/16": "6bone, returned",
    "3fff::/20": "documentation",
}
"""Network within PUBLIC_V6 → its use."""
EMBEDDING: dict[str, str] = {
    "::ffff:0:0/96": "IPv4-mapped",
    "64:ff9b::/96": "NAT64, well-known prefix",
}
"""Networks whose addresses embed an IPv4 address in the last 32 bits."""

_NOT_PUBLIC_V4 = [IPv4Network(network) for network in NOT_PUBLIC_V4]
_NOT_PUBLIC_V6 = [IPv6Network(network) for network in NOT_PUBLIC_V6]
_EMBEDDING = [IPv6Network(network) for network in EMBEDDING]


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether an address belongs to the public internet."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_V4)
    if any(address in network for network in _EMBEDDING):
        return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
    return address in PUBLIC_V6 and not any(address in network for network in _NOT_PUBLIC_V6)
