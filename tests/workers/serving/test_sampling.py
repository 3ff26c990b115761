"""What is drawn from logits: the tokens that the filters leave, as often as their shares say."""

from __future__ import annotations

import pytest
import torch

from ft_service.errors import SpecError
from workers.serving.sampling import Sampling, choose, distribution, scores

SHARES = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
"""Of five words: the likeliest are 1, 3, 4, 2, 0."""
DRAWS = 4000


def shares_of(sampling: Sampling, logits: torch.Tensor | None = None) -> list[float]:
    """Shares of the five words in what is drawn from; their sum is 1."""
    shares, tokens = distribution(SHARES.log() if logits is None else logits, sampling)
    whole = torch.zeros(5).index_add(0, torch.arange(5) if tokens is None else tokens, shares)
    return (whole / whole.sum()).tolist()


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), {0: 0.05, 1: 0.4, 2: 0.1, 3: 0.25, 4: 0.2}),
        (Sampling(top_k=-1), {0: 0.05, 1: 0.4, 2: 0.1, 3: 0.25, 4: 0.2}),
        (Sampling(top_k=9), {0: 0.05, 1: 0.4, 2: 0.1, 3: 0.25, 4: 0.2}),
        (Sampling(top_k=2), {1: 0.4, 3: 0.25}),
        (Sampling(top_p=0.64), {1: 0.4, 3: 0.25}),
        (Sampling(top_p=0.66), {1: 0.4, 3: 0.25, 4: 0.2}),
        (Sampling(top_p=1e-9), {1: 1.0}),
        (Sampling(top_p=1e-320), {1: 1.0}),  # 0 in fp32
        (
            Sampling(top_k=3, top_p=0.75),
            {1: 0.4, 3: 0.25},
        ),  # their shares among the three are 0.76; of all, 0.65
        (Sampling(temperature=0.5), {0: 0.0025, 1: 0.16, 2: 0.01, 3: 0.0625, 4: 0.04}),
        (Sampling(temperature=2.0, top_k=2), {1: 0.4**0.5, 3: 0.5}),
    ],
)
def test_filters_leave_the_likeliest_with_their_shares(
    sampling: Sampling, kept: dict[int, float]
) -> None:
    expected = [kept.get(word, 0.0) / sum(kept.values()) for word in range(5)]
    assert shares_of(sampling) == pytest.approx(expected, abs=1e-6)


def test_tokens_are_drawn_as_often_as_their_shares_say() -> None:
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(temperature=0.8, top_k=3)
    drawn = [choose(SHARES.log(), sampling, generator).token for _ in range(DRAWS)]
    counts = [drawn.count(word) / DRAWS for word in range(5)]
    assert counts == pytest.approx(shares_of(sampling), abs=0.03)
    assert {*drawn} == {1, 3, 4}


def test_log_probabilities_are_those_before_any_filter() -> None:
    sampling = Sampling(temperature=0.3, top_k=1, top_logprobs=2)
    choice = choose(SHARES.log() + 7, sampling, torch.Generator())
    assert choice.token == 1
    assert choice.logprob == pytest.approx(float(SHARES[1].log()), abs=1e-6)
    assert [token for token, _ in choice.top] == [1, 3]
    assert [logprob for _, logprob in choice.top] == pytest.approx(
        SHARES[[1, 3]].log().tolist(), abs=1e-6
    )


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-4])
def test_the_coldest_temperatures_draw_the_likeliest(temperature: float) -> None:
    assert (
        choose(
            1e4 * SHARES, Sampling(temperature=temperature), torch.Generator().manual_seed(1)
        ).token
        == 1
    )


def test_scores_are_log_probabilities_of_each_place() -> None:
    logits = torch.stack([SHARES.log(), SHARES.flip(0).log() - 3])
    logprobs, top = scores(logits, [2, 2], 1)
    assert logprobs == pytest.approx([float(SHARES[2].log())] * 2, abs=1e-6)
    assert [tokens for ((tokens, _),) in top] == [1, 3]
    assert scores(logits, [0, 0], 0)[1] == [[], []]


def test_log_probabilities_are_at_the_temperature_that_is_asked_for_whatever_is_drawn_from() -> (
    None
):
    at_half = SHARES.square().log() - SHARES.square().sum().log()
    choice = choose(
        SHARES.log(), Sampling(temperature=1e-4, top_logprobs=2, logprobs_at=0.5), torch.Generator()
    )
    assert (choice.token, choice.logprob) == (1, pytest.approx(float(at_half[1]), abs=1e-6))
    assert [logprob for _, logprob in choice.top] == pytest.approx(
        at_half[[1, 3]].tolist(), abs=1e-6
    )
    assert scores(SHARES.log()[None], [2], 0, 0.5)[0] == pytest.approx(
        [float(at_half[2])], abs=1e-6
    )


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_refused(wrong: float) -> None:
    logits = torch.tensor([0.0, wrong, 1.0])
    with pytest.raises(SpecError, match="no finite numbers"):
        choose(logits, Sampling(), torch.Generator())
    with pytest.raises(SpecError, match="no finite numbers"):
        scores(logits[None], [0], 0)
    masked = torch.tensor([0.0, float("-inf"), 1.0])
    assert choose(masked, Sampling(temperature=0.0), torch.Generator()).token == 2
