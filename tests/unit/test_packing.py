"""Random groups are unchanged after they are packed, joined to shares of any samples, and split
again.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from megarl.base.kept_sets import KeptSets
from megarl.base.rollout_types import Failure, Group, Prompt, Sample
from megarl.messaging.messages import decode, encode
from megarl.rollouts.channel import join, pack, share_bytes, split, summary_of, texts_of


def kept_sets(ids: list[int], seed: int) -> KeptSets:
    """Sets around tokens of a vocabulary of 70, where 5 ids take less space than bits, and 7 more.

    Every third token has none.
    """
    random = np.random.default_rng(seed)
    rows = []
    for row_number, token in enumerate(ids):
        further_ids = random.permutation(70)[: random.integers(0, 12)]
        rows.append(np.union1d(further_ids, token) if row_number % 3 else np.empty(0))
    sizes = np.array([len(row) for row in rows], np.int32)
    return KeptSets.from_ids(
        70, np.array(ids, np.int32), sizes, np.concatenate([*rows, np.empty(0)]).astype(np.int32)
    )


@st.composite
def samples(draw) -> Sample:
    length = draw(st.integers(0, 9))
    ids = draw(st.lists(st.integers(0, 69), min_size=length, max_size=length))

    def numbers(values: st.SearchStrategy) -> list:
        return draw(st.lists(values, min_size=length, max_size=length))

    return Sample(
        ids,
        numbers(st.floats(width=32, max_value=0)),
        numbers(st.integers(0, 3)),
        draw(st.text(max_size=5)),
        draw(st.sampled_from([0.0, 1.0])),
        "stop",
        draw(st.one_of(st.just([]), st.just(numbers(st.booleans())))),
        [(0, 1)],
        {"calls": 2.0},
        draw(st.binary(max_size=9)),
        {},
        draw(st.sampled_from([[], [Failure("error", "no number", "text")]])),
        draw(st.one_of(st.none(), st.builds(kept_sets, st.just(ids), st.integers(0, 99)))),
        draw(st.sampled_from([b"", bytes(range(length)) * 12])),
    )


groups = st.builds(
    lambda ordinal, ids, members: Group(Prompt(ordinal, ids, "é", "7", {}), members),
    st.integers(0, 99),
    st.lists(st.integers(0, 2**31 - 1), max_size=5),
    st.lists(samples(), min_size=1, max_size=3),
)


@given(st.lists(groups, min_size=1, max_size=4), st.data())
@settings(max_examples=150, deadline=None)
def test_share_has_the_numbers_of_its_samples_alone(drawn_groups, data):
    flat = [(group.prompt, sample) for group in drawn_groups for sample in group.samples]
    places = sorted(data.draw(st.sets(st.integers(0, len(flat) - 1))))
    sent = [decode(encode(pack(group))) for group in drawn_groups]
    summaries = [summary_of(group) for group in sent]
    share = join(sent, [len(group.samples) for group in drawn_groups], places)
    assert len(share) == share_bytes(summaries, places)
    numbers_by_place = split(summaries, places, np.frombuffer(share, np.uint8))
    assert sorted(numbers_by_place) == places
    for place, numbers in numbers_by_place.items():
        prompt, sample = flat[place]
        assert numbers.prompt_ids.tolist() == prompt.token_ids
        assert numbers.token_ids.tolist() == sample.token_ids.tolist()
        assert numbers.logprobs.tobytes() == sample.logprobs.tobytes()
        assert numbers.routing == sample.routing
        assert numbers.kept == sample.kept
        assert numbers.teachers == sample.teachers
        mask = (
            [True] * len(sample.token_ids)
            if numbers.policy_mask is None
            else numbers.policy_mask.tolist()
        )
        assert mask == (
            [bool(of_policy) for of_policy in sample.policy_mask] or [True] * len(sample.token_ids)
        )


@given(groups)
@settings(max_examples=150, deadline=None)
def test_a_summary_says_what_a_walk_over_the_tokens_finds(group):
    sent = pack(group, begin_version=7)
    versions = []
    for sample, summary in zip(group.samples, summary_of(sent).samples, strict=True):
        mask = [bool(of_policy) for of_policy in sample.policy_mask]
        mask = mask or [True] * len(sample.token_ids)
        policy_versions = [version for version, policy in zip(sample.versions, mask) if policy]
        versions += policy_versions
        assert [
            version for version, count in summary.policy_versions for _ in range(count)
        ] == policy_versions
        assert (summary.tokens, summary.policy_tokens) == (len(mask), sum(mask))
        assert summary.turns == sum(
            policy and not before for before, policy in zip([False, *mask], mask)
        )
        assert (summary.reward, summary.metrics, summary.failures) == (
            sample.reward,
            sample.metrics,
            sample.failures,
        )
    assert sent.oldest == min(versions, default=7)
    assert texts_of(sent.texts).samples == [(sample.text, [(0, 1)]) for sample in group.samples]


@pytest.mark.parametrize(
    "wrong", [{"logprobs": [-1.0]}, {"versions": [0]}, {"policy_mask": [True]}]
)
def test_arrays_of_different_lengths_are_refused(wrong):
    sample = Sample([1, 2], [-1.0, -2.0], [0, 0], "", 0.0, "stop", [True, False])
    with pytest.raises(ValueError, match="2 token"):
        pack(Group(Prompt(0, [1], "", ""), [replace(sample, **wrong)]))


def test_only_the_beginning_of_a_long_reference_is_packed():
    sample = Sample([1], [-1.0], [0], "", 0.0, "stop")
    short, long = (
        texts_of(pack(Group(Prompt(0, [1], "", "x" * size), [sample])).texts).answer
        for size in (10_000, 10_001)
    )
    assert short == "x" * 10_000
    assert long == "x" * 10_000 + "… (10001 characters)"
