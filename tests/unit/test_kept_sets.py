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


def kept(sets: list[list[int]], vocab_size: int = V, tokens: list[int] | None = None) -> KeptSets:
    """Kept sets. By default each token is the first of its set."""
    sizes = np.array([len(each) for each in sets], np.int32)
    ids = np.array([token for each in sets for token in each], np.int32)
    return KeptSets.from_ids(
        vocab_size,
        np.array(tokens if tokens is not None else [each[0] for each in sets], np.int32),
        sizes,
        ids,
    )


def sets_of(known: KeptSets | None) -> list[list[int]]:
    assert known is not None
    return (
        [part.tolist() for part in np.split(known.ids(), np.cumsum(known.counts)[:-1])]
        if len(known)
        else []
    )


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
def test_what_is_packed_joined_and_cut_is_what_comes_out(made, other, cut) -> None:
    (vocab_size, rows), more = made, [row for row in other[1] if max(row) < made[0]]
    known = kept(rows, vocab_size)
    later = kept(more, vocab_size)
    wanted = [sorted(row) for row in rows]
    assert sets_of(known) == wanted and sets_of(known.first(min(cut, len(rows)))) == wanted[:cut]
    ids_bytes = 2 if vocab_size <= 65_536 else 4
    bits_bytes = 4 * math.ceil(vocab_size / 32)
    assert len(known.records) == sum(min(ids_bytes * len(row), bits_bytes) for row in rows), (
        "whichever is smaller"
    )
    # two tokens of the environment lie between
    both = join_kept_sets(
        join_kept_sets(known, len(rows), None, 2), len(rows) + 2, later, len(more)
    )
    if rows or more:
        assert sets_of(both) == [*wanted, [], [], *(sorted(row) for row in more)]
    summary = known.summary()
    assert (summary.total, summary.largest) == (
        sum(map(len, rows)),
        sum(len(row) >= MOST_KEPT for row in rows),
    )
    assert (
        summary.bytes == len(known.sizes) + len(known.records) and summary.vocab_size == vocab_size
    )


@pytest.mark.parametrize(
    "sets, tokens, problem",
    [
        ([[3, 4], [5, 6]], [3, 7], "1 of 2 sampled tokens are not in their own sets"),
        ([[3, 4, 3]], [3], "a token is twice in a set"),
        ([[3, V]], [3], f"token ids from 3 to {V} in a vocabulary of {V}"),
        ([[3]], [3, 4], "1 sets of 1 token ids in all for 2 tokens"),
    ],
)
def test_sets_that_cannot_be_are_refused(sets, tokens, problem) -> None:
    with pytest.raises(ValueError, match=problem):
        kept(sets, tokens=tokens)
    meta = {
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "output_token_sampling_mask": sets,
    }
    meta["output_token_sampling_logprobs"] = [-0.25] * len(tokens)
    with pytest.raises(
        EngineError, match=f"engine e answered with impossible sets of kept tokens: {problem}"
    ):
        completions_of("e", answer(meta), [SAMPLING], None, V)


def answer(meta: dict, finish: str = "stop", **how) -> bytes:
    whole = {"finish_reason": {"type": finish}, "weight_version": "3", "prompt_tokens": 4, **meta}
    return json.dumps([{"meta_info": whole}], **{"separators": (",", ":"), **how}).encode()


THREE = {
    "output_token_logprobs": [[-0.5, token, None] for token in (5, 6, 7)],
    "output_token_sampling_mask": [[5, 1, 39], [6], list(range(V))],
    "output_token_sampling_logprobs": [-0.25, 0.0, -1.0],
}


def test_a_completion_has_the_set_of_each_token() -> None:
    assert generation([[1]], [SAMPLING], 0)["return_sampling_mask"] is True
    for how in ({}, {"separators": (", ", ": ")}):  # in SGLang's form, and in another
        [found] = completions_of("e", answer(THREE, **how), [SAMPLING], None, V)
        assert sets_of(found.kept) == [
            [1, 5, 39],
            [6],
            list(range(V)),
        ] and found.logprobs.tolist() == [-0.25, 0.0, -1.0]
        [cut] = completions_of("e", answer(THREE, "abort", **how), [SAMPLING], None, V)
        assert cut.token_ids.tolist() == [5, 6] and sets_of(cut.kept) == [[1, 5, 39], [6]], (
            "the last token is sampled again"
        )
        assert completions_of("e", answer(THREE, **how), [SAMPLING])[0].kept is None
        assert completions_of("e", answer(THREE, **how), [Sampling(8)], None, V)[0].kept is None
    with pytest.raises(EngineError, match="2 sets of 4 token ids"):
        completions_of(
            "e",
            answer(THREE | {"output_token_sampling_mask": [[5, 1, 39], [6]]}),
            [SAMPLING],
            None,
            V,
        )


@pytest.mark.parametrize(
    "sampling", [Sampling(8, top_p=0.9), Sampling(8, min_p=0.05), Sampling(8, top_k=20)]
)
def test_an_engine_is_asked_for_no_more_than_it_records(sampling: Sampling) -> None:
    asked = sampling.parameters()
    assert (
        asked["top_k"] == (20 if sampling.top_k == 20 else MOST_KEPT)
        and asked["min_p"] == sampling.min_p
    )
    assert Sampling(8, temperature=0.0, top_p=0.9).parameters()["top_k"] == -1, "greedy"


def completion(sets: list[list[int]], finish: str = "stop") -> Completion:
    ids = [each[0] for each in sets]
    return Completion(
        ids, [-0.5] * len(ids), [0] * len(ids), finish, b"", kept(sets) if sets else None
    )


def test_pieces_of_a_response_and_its_end_at_a_stop_string() -> None:
    draft = Draft(Sampling(4))
    for piece in (
        completion([[7, 1], [8]], "abort"),
        completion([], "abort"),
        completion([[9, 2, 3], [4, 30]], "length"),
    ):
        draft.add(piece)
    assert sets_of(draft.completion().kept) == [[1, 7], [8], [2, 3, 9], [4, 30]]
    draft.stop_at(StopStrings(["9"], lambda ids: " ".join(map(str, ids))), prompt_tokens=5)
    assert draft.completion() == Completion(
        [7, 8, 9], [-0.5] * 3, [0] * 3, "stop", b"", kept([[7, 1], [8], [9, 2, 3]])
    )


def two_turns() -> Sample:
    tokenizer = load_tokenizer(ModelConfig(path="configs/models/tiny-llama"))
    transcript = Transcript(Prompt(0, [5] * 3, "", ""), tokenizer, max_tokens=20)
    transcript.add_policy(completion([[7, 1], [8]]))
    transcript.add_environment([9] * 3)
    transcript.add_policy(completion([[6, *range(10, 25)]]))
    return transcript.sample(1.0)


SETS = [[1, 7], [8], [], [], [], [6, *range(10, 25)]]


def test_turns_of_a_sample_and_what_the_environment_wrote_between_them() -> None:
    assert sets_of(two_turns().kept) == SETS
    assert sample_problems([two_turns()], 1, 20, V, replayed=True) == []
    bare = msgspec.structs.replace(two_turns(), kept=None)
    assert sample_problems([bare], 1, 20, V) == []
    [problem] = sample_problems([bare], 1, 20, V, replayed=True)
    assert problem.startswith(
        "sample 0: 3 tokens of the policy lack the sets they were drawn from, which "
        "rollout.replay_mask needs"
    )
    [problem] = sample_problems(
        [msgspec.structs.replace(two_turns(), kept=kept([[7]]))], 1, 20, V, replayed=True
    )
    assert problem == "sample 0: 6 token ids, but 1 kept"


def test_sets_travel_as_bytes_and_survive_a_resume() -> None:
    """In messages, in a checkpoint's ledger, in the batch, up to the trained sequences."""
    samples = [two_turns(), msgspec.structs.replace(two_turns(), reward=0.0)]
    made = Group(Prompt(0, [5] * 3, "", ""), samples)
    without = Group(made.prompt, [msgspec.structs.replace(each, kept=None) for each in samples])
    ready = pack(made)
    sizes = [sum(map(len, each.pieces)) for each in (ready, pack(without))]
    padding = 2  # without sets, it pads a piece to a multiple of 4 bytes
    assert sizes[0] - sizes[1] == 2 * (6 * 4 + 3 * 2 + 8 - padding), (
        "sizes, two sets of ids, one of bits"
    )
    [held] = msgspec.msgpack.decode(Ledger(groups=[ready]).encode(), type=Ledger).groups
    assert held == ready
    batch = batch_of([made])
    for sequence in to_train_sequences(batch, torch.ones(1, 2), skip_zero=True).values():
        assert sets_of(sequence.kept) == SETS and len(sequence) == 9
    found = batch_metrics(batch, version=0)
    assert (
        found["mask/kept_mean"] == pytest.approx((2 + 1 + 16) / 3) and found["mask/overflow"] == 0
    )
    assert found["mask/bytes_per_token"] == pytest.approx((24 + 6 + 8) / 3)
    assert not any(key.startswith("mask/") for key in batch_metrics(batch_of([without]), version=0))


def sequence(
    length: int, mask: list[int], known: KeptSets | None, tokens: list[int]
) -> TrainSequence:
    ids = [1] * (length - len(tokens)) + tokens
    return TrainSequence(ids, mask, [0.0] * length, [1.0] * length, kept=known)


def test_a_microbatch_has_the_sets_of_what_its_positions_predict() -> None:
    # its first token too
    whole = sequence(
        4,
        [0, 1, 0, 1],
        join_kept_sets(kept([[2, 0], [3]]), 2, kept([[4, 1], [5, 6, 7]]), 2),
        [2, 3, 4, 5],
    )
    turns = sequence(
        6,
        [0, 0, 0, 1, 0, 1],
        join_kept_sets(join_kept_sets(kept([[8, 9]]), 1, None, 1), 2, kept([[10]]), 1),
        [8, 1, 10],
    )
    plan = MicrobatchPlan((1, 0), (0, 6, 9))  # the first one has a position of padding
    rows = build(plan, [whole, turns], torch.device("cpu")).kept
    assert rows is not None and rows.sizes.tolist() == [0, 0, 2, 0, 1, 0, 1, 2, 3]
    sizes, ids = rows.of(np.array([2, 4, 6, 8]), torch.device("cpu"))
    assert (
        sizes.tolist() == [2, 1, 1, 3]
        and ids.tolist() == [8, 9, 10, 3, 5, 6, 7]
        and ids.dtype == torch.int32
    )
    lacking = sequence(4, [0, 1, 1, 1], None, [])
    assert build(MicrobatchPlan((0,), (0, 3)), [lacking], torch.device("cpu")).kept is None
    assert build(MicrobatchPlan((), (0, 3)), [], torch.device("cpu")).kept is None
    with pytest.raises(ValueError, match="3 of 5 tokens of the loss lack the sets"):
        build(MicrobatchPlan((1, 0), (0, 6, 9)), [lacking, turns], torch.device("cpu"))
    with pytest.raises(ValueError, match="1 of 2 sampled tokens are not in their own sets"):
        build(
            MicrobatchPlan((0,), (0, 5)),
            [sequence(6, [0, 0, 0, 1, 0, 1], turns.kept, [8, 1, 11])],
            torch.device("cpu"),
        )


def test_a_run_that_engines_cannot_record_is_refused(tmp_path: Path) -> None:
    asked = [
        "rollout.min_p=0.1",
        "generator.server_args.sampling_backend=ascend",
        "generator.server_args.sampling_mask_max_tokens=64",
    ]
    assert problems_of(tmp_path, *asked) == [
        "generator.server_args.sampling_backend=ascend: must be left out; each sample has a seed, "
        "which only SGLang's sampler in PyTorch takes with top_p, top_k or min_p",
        "generator.server_args.sampling_mask_max_tokens=64: must be left out; the launcher "
        "decides it",
    ]
    wanted = {
        (): False,
        ("rollout.top_p=0.9",): True,
        ("rollout.top_k=5", "rollout.replay_mask=false"): False,
    }
    assert {
        overrides: config(tmp_path, *overrides).rollout.replays_mask for overrides in wanted
    } == wanted
