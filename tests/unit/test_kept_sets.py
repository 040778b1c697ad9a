"""The sets from which tokens were drawn, from an engine's answer to the trainer's microbatch:
packed, cut, joined, laid end to end.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from batches import batch_of
from hypothesis import given, settings
from hypothesis import strategies as st
from resolving import config, problems_of

from megarl.algorithms.batches import batch_metrics, to_train_sequences
from megarl.base.kept_sets import MOST_KEPT, KeptSets, join_kept_sets
from megarl.base.rollout_types import Group, Prompt, Sample, TrainSequence
from megarl.config.schema import ModelConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.generator.completions import (
    Completion,
    EngineError,
    Sampling,
    StopStrings,
    completions_of,
    generation,
)
from megarl.generator.fleet import Draft
from megarl.rollouts.buffer import Ledger
from megarl.rollouts.channel import pack
from megarl.rollouts.environments.base import Transcript, sample_problems
from megarl.trainer.microbatch import MicrobatchPlan, build

V = 40
SAMPLING = Sampling(8, top_p=0.9)


def kept_sets(
    sets: list[list[int]], vocab_size: int = V, tokens: list[int] | None = None
) -> KeptSets:
    """Kept sets. By default each token is the first of its set."""
    if tokens is None:
        tokens = [ids[0] for ids in sets]
    sizes = np.array([len(ids) for ids in sets], np.int32)
    flat_ids = np.array([token for ids in sets for token in ids], np.int32)
    return KeptSets.from_ids(vocab_size, np.array(tokens, np.int32), sizes, flat_ids)


def sets_of(packed: KeptSets | None) -> list[list[int]]:
    assert packed is not None
    if not len(packed):
        return []
    return [ids.tolist() for ids in np.split(packed.ids(), np.cumsum(packed.counts)[:-1])]


@st.composite
def sets(draw) -> tuple[int, list[list[int]]]:
    """Random sets.

    They are packed as ids of 2 or 4 bytes, or as bits; the sizes are near the point where both
    forms are equally small.
    """
    vocab_size = draw(st.sampled_from([2, 31, 33, 64, 65, 500, 65_536, 65_537, 200_000]))
    seeds = draw(
        st.lists(
            st.tuples(
                st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 3, 4, 5, 9, 40, 4096, 9000])
            ),
            max_size=6,
        )
    )
    rows = [
        np.random.default_rng(seed).permutation(vocab_size)[:size].tolist() for seed, size in seeds
    ]
    return vocab_size, rows


@given(sets(), sets(), st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_sets_survive_packing_joining_and_cutting(first_sets, second_sets, cut) -> None:
    vocab_size, rows = first_sets
    later_rows = [row for row in second_sets[1] if max(row) < vocab_size]
    packed = kept_sets(rows, vocab_size)
    expected = [sorted(row) for row in rows]
    assert sets_of(packed) == expected
    assert sets_of(packed.first(min(cut, len(rows)))) == expected[:cut]
    ids_bytes = 2 if vocab_size <= 65_536 else 4
    bits_bytes = 4 * math.ceil(vocab_size / 32)
    smaller_form_bytes = sum(min(ids_bytes * len(row), bits_bytes) for row in rows)
    assert len(packed.records) == smaller_form_bytes
    # two tokens of the environment lie between
    with_environment = join_kept_sets(packed, len(rows), None, 2)
    joined = join_kept_sets(
        with_environment, len(rows) + 2, kept_sets(later_rows, vocab_size), len(later_rows)
    )
    if rows or later_rows:
        assert sets_of(joined) == [*expected, [], [], *(sorted(row) for row in later_rows)]
    summary = packed.summary()
    assert summary.total == sum(map(len, rows))
    assert summary.largest == sum(len(row) >= MOST_KEPT for row in rows)
    assert summary.bytes == len(packed.sizes) + len(packed.records)
    assert summary.vocab_size == vocab_size


@pytest.mark.parametrize(
    "sets, tokens, problem",
    [
        ([[3, 4], [5, 6]], [3, 7], "1 of 2 sampled tokens are not in their own sets"),
        ([[3, 4, 3]], [3], "a token is twice in a set"),
        ([[3, V]], [3], f"token ids from 3 to {V} in a vocabulary of {V}"),
        ([[3]], [3, 4], "1 sets of 1 token ids in all for 2 tokens"),
    ],
)
def test_impossible_sets_are_refused(sets, tokens, problem) -> None:
    with pytest.raises(ValueError, match=problem):
        kept_sets(sets, tokens=tokens)
    meta = {
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "output_token_sampling_mask": sets,
    }
    meta["output_token_sampling_logprobs"] = [-0.25] * len(tokens)
    with pytest.raises(
        EngineError, match=f"engine e answered with impossible sets of kept tokens: {problem}"
    ):
        completions_of("e", answer(meta), [SAMPLING], None, V)


def answer(meta: dict, finish: str = "stop", separators: tuple = (",", ":")) -> bytes:
    """An engine's answer, by default in SGLang's form: JSON without spaces."""
    common = {"finish_reason": {"type": finish}, "weight_version": "3", "prompt_tokens": 4}
    return json.dumps([{"meta_info": common | meta}], separators=separators).encode()


THREE = {
    "output_token_logprobs": [[-0.5, token, None] for token in (5, 6, 7)],
    "output_token_sampling_mask": [[5, 1, 39], [6], list(range(V))],
    "output_token_sampling_logprobs": [-0.25, 0.0, -1.0],
}


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_completion_has_the_set_of_each_token(separators: tuple[str, str]) -> None:
    raw = answer(THREE, separators=separators)
    [stopped] = completions_of("e", raw, [SAMPLING], None, V)
    assert sets_of(stopped.kept) == [[1, 5, 39], [6], list(range(V))]
    assert stopped.logprobs.tolist() == [-0.25, 0.0, -1.0]
    raw_aborted = answer(THREE, "abort", separators=separators)
    [aborted] = completions_of("e", raw_aborted, [SAMPLING], None, V)
    assert aborted.token_ids.tolist() == [5, 6], "the last token is sampled again"
    assert sets_of(aborted.kept) == [[1, 5, 39], [6]]
    assert completions_of("e", raw, [SAMPLING])[0].kept is None
    assert completions_of("e", raw, [Sampling(8)], None, V)[0].kept is None


def test_answer_that_lacks_a_set_is_refused() -> None:
    assert generation([[1]], [SAMPLING], 0)["return_sampling_mask"] is True
    two_sets = THREE | {"output_token_sampling_mask": [[5, 1, 39], [6]]}
    with pytest.raises(EngineError, match="2 sets of 4 token ids"):
        completions_of("e", answer(two_sets), [SAMPLING], None, V)


@pytest.mark.parametrize(
    "sampling", [Sampling(8, top_p=0.9), Sampling(8, min_p=0.05), Sampling(8, top_k=20)]
)
def test_engine_samples_from_no_more_than_it_records(sampling: Sampling) -> None:
    parameters = sampling.parameters()
    assert parameters["top_k"] == (20 if sampling.top_k == 20 else MOST_KEPT)
    assert parameters["min_p"] == sampling.min_p
    assert Sampling(8, temperature=0.0, top_p=0.9).parameters()["top_k"] == -1, "greedy"


def completion(sets: list[list[int]], finish: str = "stop") -> Completion:
    tokens = [ids[0] for ids in sets]
    logprobs = [-0.5] * len(tokens)
    versions = [0] * len(tokens)
    packed = kept_sets(sets) if sets else None
    return Completion(tokens, logprobs, versions, finish, b"", packed)


def test_draft_joins_pieces_and_stops_at_a_string() -> None:
    draft = Draft(Sampling(4))
    for piece in (
        completion([[7, 1], [8]], "abort"),
        completion([], "abort"),
        completion([[9, 2, 3], [4, 30]], "length"),
    ):
        draft.add(piece)
    assert sets_of(draft.completion().kept) == [[1, 7], [8], [2, 3, 9], [4, 30]]
    draft.stop_at(StopStrings(["9"], lambda ids: " ".join(map(str, ids))), prompt_tokens=5)
    assert draft.completion() == completion([[7, 1], [8], [9, 2, 3]])


def two_turns() -> Sample:
    tokenizer = load_tokenizer(ModelConfig(path="configs/models/tiny-llama"))
    transcript = Transcript(Prompt(0, [5] * 3, "", ""), tokenizer, max_tokens=20)
    transcript.add_policy(completion([[7, 1], [8]]))
    transcript.add_environment([9] * 3)
    transcript.add_policy(completion([[6, *range(10, 25)]]))
    return transcript.sample(1.0)


SETS = [[1, 7], [8], [], [], [], [6, *range(10, 25)]]


def test_environment_tokens_between_turns_have_empty_sets() -> None:
    assert sets_of(two_turns().kept) == SETS
    assert sample_problems([two_turns()], 1, 20, V, replayed=True) == []
    without_sets = msgspec.structs.replace(two_turns(), kept=None)
    assert sample_problems([without_sets], 1, 20, V) == []
    [problem] = sample_problems([without_sets], 1, 20, V, replayed=True)
    assert problem.startswith(
        "sample 0: 3 tokens of the policy lack the sets they were drawn from, which "
        "rollout.replay_mask needs"
    )
    one_set = msgspec.structs.replace(two_turns(), kept=kept_sets([[7]]))
    [problem] = sample_problems([one_set], 1, 20, V, replayed=True)
    assert problem == "sample 0: 6 token ids, but 1 kept"


def test_sets_reach_messages_ledger_and_train_sequences() -> None:
    samples = [two_turns(), msgspec.structs.replace(two_turns(), reward=0.0)]
    group = Group(Prompt(0, [5] * 3, "", ""), samples)
    without_sets = Group(
        group.prompt, [msgspec.structs.replace(sample, kept=None) for sample in samples]
    )
    packed = pack(group)
    packed_without_sets = pack(without_sets)
    set_bytes = sum(map(len, packed.pieces)) - sum(map(len, packed_without_sets.pieces))
    padding = 2  # without sets, it pads a piece to a multiple of 4 bytes
    # sizes, two sets of ids, one of bits
    assert set_bytes == 2 * (6 * 4 + 3 * 2 + 8 - padding)
    [resumed] = msgspec.msgpack.decode(Ledger(groups=[packed]).encode(), type=Ledger).groups
    assert resumed == packed
    batch = batch_of([group])
    for sequence in to_train_sequences(batch, torch.ones(1, 2), skip_zero=True).values():
        assert sets_of(sequence.kept) == SETS and len(sequence) == 9
    metrics = batch_metrics(batch, version=0)
    assert metrics["mask/kept_mean"] == pytest.approx((2 + 1 + 16) / 3)
    assert metrics["mask/overflow"] == 0
    assert metrics["mask/bytes_per_token"] == pytest.approx((24 + 6 + 8) / 3)
    metrics_without_sets = batch_metrics(batch_of([without_sets]), version=0)
    assert not any(key.startswith("mask/") for key in metrics_without_sets)


def train_sequence(mask: list[int], packed: KeptSets | None, tokens: list[int]) -> TrainSequence:
    """A sequence that ends with the tokens; the ids before them are 1."""
    length = len(mask)
    ids = [1] * (length - len(tokens)) + tokens
    return TrainSequence(ids, mask, [0.0] * length, [1.0] * length, kept=packed)


def test_microbatch_has_the_sets_of_its_positions() -> None:
    """The sets of a position are those of the token that it predicts."""
    one_turn = train_sequence(
        [0, 1, 0, 1],
        join_kept_sets(kept_sets([[2, 0], [3]]), 2, kept_sets([[4, 1], [5, 6, 7]]), 2),
        [2, 3, 4, 5],
    )
    two_branches = train_sequence(
        [0, 0, 0, 1, 0, 1],
        join_kept_sets(join_kept_sets(kept_sets([[8, 9]]), 1, None, 1), 2, kept_sets([[10]]), 1),
        [8, 1, 10],
    )
    cpu = torch.device("cpu")
    plan = MicrobatchPlan((1, 0), (0, 6, 9))  # the first one has a position of padding
    rows = build(plan, [one_turn, two_branches], cpu).kept
    assert rows is not None and rows.sizes.tolist() == [0, 0, 2, 0, 1, 0, 1, 2, 3]
    sizes, ids = rows.of(np.array([2, 4, 6, 8]), cpu)
    assert sizes.tolist() == [2, 1, 1, 3]
    assert ids.tolist() == [8, 9, 10, 3, 5, 6, 7]
    assert ids.dtype == torch.int32
    without_sets = train_sequence([0, 1, 1, 1], None, [])
    assert build(MicrobatchPlan((0,), (0, 3)), [without_sets], cpu).kept is None
    assert build(MicrobatchPlan((), (0, 3)), [], cpu).kept is None
    with pytest.raises(ValueError, match="3 of 5 tokens of the loss lack the sets"):
        build(plan, [without_sets, two_branches], cpu)
    with pytest.raises(ValueError, match="1 of 2 sampled tokens are not in their own sets"):
        wrong_token = train_sequence([0, 0, 0, 1, 0, 1], two_branches.kept, [8, 1, 11])
        build(MicrobatchPlan((0,), (0, 5)), [wrong_token], cpu)


def test_settings_that_engines_cannot_record_are_refused(tmp_path: Path) -> None:
    overrides = [
        "rollout.min_p=0.1",
        "generator.server_args.sampling_backend=ascend",
        "generator.server_args.sampling_mask_max_tokens=64",
    ]
    assert problems_of(tmp_path, *overrides) == [
        "generator.server_args.sampling_backend=ascend: must be left out; each sample has a seed, "
        "which only SGLang's sampler in PyTorch takes with top_p, top_k or min_p",
        "generator.server_args.sampling_mask_max_tokens=64: must be left out; the launcher "
        "decides it",
    ]


@pytest.mark.parametrize(
    ("overrides", "replays_mask"),
    [
        ([], False),
        (["rollout.top_p=0.9"], True),
        (["rollout.top_k=5", "rollout.replay_mask=false"], False),
    ],
)
def test_top_p_replays_the_mask(tmp_path: Path, overrides: list[str], replays_mask: bool) -> None:
    assert config(tmp_path, *overrides).rollout.replays_mask == replays_mask
