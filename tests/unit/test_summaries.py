"""The task synthetic:summary and its gold scorer."""

from __future__ import annotations

from itertools import permutations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.schema import PreferenceConfig
from megarl.data.datasets import read_pairs
from megarl.data.synthetic import LETTERS, Summaries, SummaryPairs, score, synthetic_rows

POST = "bdfhjl"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bdfhjl", 1.0),
        ("", -1.0),
        ("bdf", 0.0),
        ("bdfhjll", 0.75),  # written twice
        ("bdfhajl", 0.75),  # not in the post
        ("dbfhjl", 0.75),  # b belongs before d
        ("ljhfdb", -0.25),  # five letters belong before another
        ("aaaa", -2.0),
        ("bdfhjl" + "\n\0é€" * 1000, -2.0),
    ],
)
def test_scores(text: str, expected: float) -> None:
    assert score(text, POST) == pytest.approx(expected, abs=1e-12)


@given(st.text(), st.permutations(POST).map("".join))
def test_score_does_not_depend_on_the_order_of_the_post(text: str, post: str) -> None:
    assert -2 <= score(text, post) == score(text, POST) <= 1


def test_the_best_of_all_orders_is_the_alphabetical_one() -> None:
    scores = {"".join(order): score("".join(order), POST) for order in permutations(POST)}
    assert [order for order, value in scores.items() if value >= 1] == [POST]


def test_rows_are_posts_whose_letters_no_other_split_has() -> None:
    held_out = Summaries("eval", 0)
    train = Summaries("train", 0)
    assert (len(held_out), len(train)) == (512, (8008 - 512) * 720)
    sets = {row.answer for row in held_out}
    assert len(sets) == 512
    assert len({row.prompt for row in map(train.__getitem__, range(2000))}) == 2000
    for row in map(train.__getitem__, range(0, len(train), 50_021)):
        assert "".join(sorted(row.prompt.removesuffix("="))) == row.answer
        assert row.answer not in sets
        assert len(set(row.answer)) == 6
        assert set(row.answer) <= set(LETTERS)
        assert 0 < len(row.demonstration) <= 18
    with pytest.raises(IndexError):
        held_out[512]


def test_a_row_depends_on_its_number_and_the_seed_alone() -> None:
    rows = [Summaries("train", seed)[7] for seed in (0, 0, 1)]
    assert rows[0] == rows[1]
    assert rows[0].prompt == rows[2].prompt
    assert rows[0] == synthetic_rows("synthetic:summary", "train", 0, "data.train")[7]
    different = [
        Summaries("train", 0)[place].demonstration != Summaries("train", 1)[place].demonstration
        for place in range(50)
    ]
    assert sum(different) > 30


def test_demonstrations_are_neither_hopeless_nor_perfect() -> None:
    scores = [
        score(str(row.demonstration), row.answer)
        for row in map(Summaries("train", 0).__getitem__, range(2000))
    ]
    assert 0.1 < fmean(scores) < 0.3
    assert 0.05 < fmean(value == 1 for value in scores) < 0.2
    assert min(scores) < -1


def test_gold_scorer_prefers_the_chosen_response() -> None:
    pairs, _ = read_pairs(
        PreferenceConfig(source="synthetic:summary", size=300), "reward_model.data", 3, None
    )
    posts = Summaries("train", 3)
    for pair, row in zip(pairs, posts, strict=False):
        assert pair.prompt == row.prompt
        assert score(pair.chosen, row.answer) > score(pair.rejected, row.answer)
    assert len(pairs) == 300
    assert pairs[5] == SummaryPairs(posts)[5] != SummaryPairs(Summaries("train", 4))[5]
