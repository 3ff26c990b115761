"""Samples that hold the same tokens, by digests of these."""

from __future__ import annotations

import hashlib

import numpy as np

from ft_service.data.tokens.token_set import TokenSet


def content_digests(samples: TokenSet, *, together: int = 1) -> np.ndarray:
    """uint64 [records]: of each record's tokens, uncut; equal ones are equal records. Reads every token once.

    `together`: samples of a record, 2 of a pair. What is learned of a record does not count: with another weight it is still
    the same text.
    """
    ids = samples.ids
    digests = np.empty(len(samples) // together, np.uint64)
    begins, lengths = samples.begins.tolist(), samples.lengths.tolist()
    for record in range(len(digests)):
        digest = hashlib.blake2b(digest_size=8)
        for sample in range(record * together, (record + 1) * together):
            begin, length = begins[sample], lengths[sample]
            digest.update(length.to_bytes(8, "little"))
            digest.update(ids[begin : begin + length].astype("<i4", copy=False).data)
        digests[record] = int.from_bytes(digest.digest(), "little")
    return digests
