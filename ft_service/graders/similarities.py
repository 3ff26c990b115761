"""Similarities of two texts, as OpenAI's text_similarity has them. Pure.

Those that need a model are not available. ROUGE and GLEU are implemented here in a few lines each,
since their packages require a language toolkit or are not maintained.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

MOST_COMPARED = 65_536
"""Characters of a text to compare, at most: the time is quadratic."""


_WORD = re.compile(
    r"[^\s\x00-/:-@\[-`{-\x7f\xa1-\xbf\u2010-\u205e\u3000-\u303f\uff01-\uff0f\uff1a-\uff20]+"
)
"""A word of ROUGE: as the package rouge_score has it in ASCII, letters and digits without
punctuation. That drops all other letters; here they count, so that texts in other scripts can be
compared.
"""


def rouge_l(answer: str, expected: str) -> float:
    """ROUGE-L's F1: the longest common subsequence of words, in lower case, without punctuation."""
    from rapidfuzz.distance import LCSseq  # in C++: in Python it may take minutes

    ours = _words(answer)
    theirs = _words(expected)
    common = LCSseq.similarity(ours, theirs)
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def rouge_n(answer: str, expected: str, n: int) -> float:
    """ROUGE-N's F1: common sequences of n words, in lower case, without punctuation."""
    ours = _grams(_words(answer), n)
    theirs = _grams(_words(expected), n)
    common = (ours & theirs).total()
    return 2 * common / (ours.total() + theirs.total()) if common else 0.0


def bleu(answer: str, expected: str) -> float:
    """BLEU of one sentence, by sacrebleu, with sequences of up to four words, or as many as the
    shorter text has.
    """
    from sacrebleu import sentence_bleu  # a slow import that most jobs do not need
    from sacrebleu.tokenizers import tokenizer_13a, tokenizer_re

    try:
        # Its mean of equal texts may round to more than 1.
        return min(1.0, sentence_bleu(answer, [expected]).score / 100)
    finally:  # they keep 65,536 texts for tokenizers that are used once: gigabytes
        for tokenizer in (tokenizer_13a.Tokenizer13a, tokenizer_re.TokenizerRegexp):
            tokenizer.__call__.cache_clear()


def gleu(answer: str, expected: str) -> float:
    """Google's BLEU of one sentence: the share of common sequences of one to four words, for the
    text that has more of them.
    """
    ours = answer.split()
    theirs = expected.split()
    grams = [(_grams(ours, n), _grams(theirs, n)) for n in range(1, 5)]
    common = sum((own & other).total() for own, other in grams)
    most = max(sum(own.total() for own, _ in grams), sum(other.total() for _, other in grams))
    return common / most if most else 0.0


def fuzzy_match(answer: str, expected: str) -> float:
    """1 minus the share of characters to insert or delete, by rapidfuzz."""
    from rapidfuzz import fuzz

    return fuzz.ratio(answer, expected) / 100


SIMILARITIES: Mapping[str, Callable[[str, str], float]] = {
    "fuzzy_match": fuzzy_match,
    "bleu": bleu,
    "gleu": gleu,
    "rouge_l": rouge_l,
    **{
        f"rouge_{n}": lambda answer, expected, n=n: rouge_n(answer, expected, n)
        for n in range(1, 6)
    },
}


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _grams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
