"""Recorded experts, from an engine's answer to the trainer's microbatch: packed, joined, kept in a
sample, laid end to end.
"""

from __future__ import annotations

import base64
import json

import msgspec
import numpy as np
import pytest
import torch
from batches import batch_of
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.batches import to_train_sequences
from megarl.base.rollout_types import Group, Prompt, Sample, TrainSequence
from megarl.config.schema import ModelConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.generator.completions import (
    Completion,
    EngineError,
    Sampling,
    completions_of,
    generation,
)
from megarl.generator.fleet import Draft
from megarl.models.routing import RoutingFormat
from megarl.rollouts.buffer import Ledger
from megarl.rollouts.channel import pack
from megarl.rollouts.environments.base import Transcript
from megarl.trainer.microbatch import MicrobatchPlan, build

FORMAT = RoutingFormat(layers=3, dense_layers=1, top_k=2, num_experts=8)
WIDE = RoutingFormat(layers=2, dense_layers=0, top_k=3, num_experts=300)
VERSION = {"weight_version": "3"}


def ids(positions: int, format: RoutingFormat = FORMAT, seed: int = 0) -> np.ndarray:
    """[positions, layers, top_k], all layers; distinct for each token and layer."""
    scores = np.random.default_rng(seed).random((positions, format.layers, format.num_experts))
    return scores.argsort(axis=-1)[..., : format.top_k].astype(np.int32)


def packed(positions: int, seed: int = 0) -> bytes:
    return FORMAT.from_engine(ids(positions, seed=seed).tobytes())


@given(st.sampled_from([FORMAT, WIDE]), st.integers(0, 9))
def test_packed_experts_are_restored(format: RoutingFormat, positions: int) -> None:
    answered = ids(positions, format)
    answered[:, : format.dense_layers] = 77  # a layer without experts may have anything
    bytes_ = format.from_engine(answered.tobytes())
    assert len(bytes_) == positions * format.position_bytes
    assert format.positions(bytes_) == positions
    np.testing.assert_array_equal(format.unpack(bytes_), answered[:, format.dense_layers :])


def test_up_to_256_experts_take_a_byte_each() -> None:
    assert [RoutingFormat(48, 0, 8, experts).position_bytes for experts in (128, 256, 257)] == [
        384,
        384,
        768,
    ]


def test_impossible_choices_of_a_router_are_refused() -> None:
    answered = ids(5)
    answered[3, 2] = 0  # as if nothing was recorded
    with pytest.raises(ValueError, match="the same expert twice for a token in layer 2"):
        FORMAT.from_engine(answered.tobytes())
    for wrong in (-1, 8):
        answered[3, 2] = (3, wrong)
        with pytest.raises(ValueError, match="of 8 experts"):
            FORMAT.from_engine(answered.tobytes())
    with pytest.raises(ValueError):
        FORMAT.from_engine(answered.tobytes()[:-4])


def answer(prompt: int, tokens: int, finish: str, positions: int | None) -> bytes:
    meta = {**VERSION, "prompt_tokens": prompt, "finish_reason": {"type": finish}}
    meta["output_token_logprobs"] = [[-0.5, 7, None]] * tokens
    if positions is not None:
        meta["routed_experts"] = base64.b64encode(ids(positions).tobytes()).decode()
    return json.dumps([{"meta_info": meta}]).encode()


def complete(*arguments) -> Completion:
    [completion] = completions_of("engine", answer(*arguments), [Sampling(8)], FORMAT)
    return completion


def test_completion_has_experts_of_all_positions_but_the_last() -> None:
    assert generation([[1]], [Sampling(8)], 0, FORMAT)["return_routed_experts"] is True
    assert "return_routed_experts" not in generation([[1]], [Sampling(8)], 0)
    assert complete(5, 3, "stop", 7).routing == packed(7)
    for wrong in (6, 8, None):
        with pytest.raises(
            EngineError,
            match=r"engine engine answered with the experts of \d positions; there were 5 \+ 3 tokens",
        ):
            complete(5, 3, "stop", wrong)


def test_an_aborted_answer_keeps_no_token_without_experts() -> None:
    cut = complete(5, 3, "abort", 7)
    assert len(cut.token_ids) == 2 and cut.routing == packed(7)[: 6 * FORMAT.position_bytes], (
        "the last token is sampled again"
    )
    for forgotten in (None, 4):  # aborted during a wait for memory, or before it began
        assert complete(5, 3, "abort", forgotten) == Completion([], [], [], "abort", prefill=(5, 0))


def test_tokens_keep_the_experts_they_were_sampled_with() -> None:
    """The prompt has 5 tokens.

    The second request recomputes the first piece, with weights that choose other experts.
    """
    draft = Draft(Sampling(5))
    later = packed(9, seed=1)
    draft.add(Completion([7] * 2, [0.0] * 2, [0] * 2, "abort", packed(6)))
    draft.add(Completion([], [], [], "abort"))
    draft.add(Completion([7] * 3, [0.0] * 3, [1] * 3, "length", later))
    cut = 6 * FORMAT.position_bytes
    assert draft.completion().routing == packed(6) + later[cut:]


def test_experts_of_turns_and_environment_are_joined() -> None:
    tokenizer = load_tokenizer(ModelConfig(path="configs/models/tiny-llama"))
    transcript = Transcript(Prompt(0, [5] * 3, "", ""), tokenizer, max_tokens=20)
    transcript.add_policy(Completion([7, 8], [0.0] * 2, [0] * 2, "stop", packed(4)))
    transcript.add_environment([9] * 3)
    # 3 of the prompt, 2 of the first turn, 3 of the environment, all but the last of the second
    # turn
    later = packed(8, seed=1)
    transcript.add_policy(Completion([7], [0.0], [1], "stop", later))
    sample = transcript.sample(1.0)
    assert sample.routing == packed(4) + later[4 * FORMAT.position_bytes :]
    assert FORMAT.positions(sample.routing) == 3 + len(sample.token_ids) - 1


def group(routing: bytes) -> Group:
    samples = [
        Sample([7, 8], [-0.5] * 2, [0, 0], "", float(i), "stop", routing=routing) for i in range(2)
    ]
    return Group(Prompt(0, [1, 2, 3], "", ""), samples)


def test_experts_travel_as_bytes_and_survive_a_resume() -> None:
    """In messages, in a checkpoint's ledger, in the batch, up to the trained sequences."""
    routed = group(packed(4))
    ready = pack(routed)
    without = pack(group(b""))
    sizes = [sum(map(len, packed_group.pieces)) for packed_group in (ready, without)]
    assert sizes[0] - sizes[1] == 2 * (4 * FORMAT.position_bytes), "a byte an id"
    [restored] = msgspec.msgpack.decode(Ledger(groups=[ready]).encode(), type=Ledger).groups
    assert restored == ready
    sequences = to_train_sequences(batch_of([routed]), torch.ones(1, 2), skip_zero=True).values()
    assert [bytes(s.routing) for s in sequences] == [packed(4)] * 2


def test_a_microbatch_has_experts_where_they_are_known() -> None:
    def sequence(length: int, routing: bytes) -> TrainSequence:
        return TrainSequence([7] * length, [True] * length, [0.0] * length, [1.0] * length, routing)

    # the last one ends with an environment's token
    sequences = [sequence(4, packed(3)), sequence(5, b""), sequence(6, packed(3, seed=1))]
    plan = MicrobatchPlan((2, 0), (0, 5, 9))  # the second one has a position of padding
    batch = build(plan, sequences, torch.device("cpu"), routing=FORMAT)
    assert batch.routing.shape == (9, 2, 2)
    assert batch.routing.dtype == torch.int16
    for start, end, seed in ((0, 5, 1), (5, 9, 0)):
        assert batch.routing[start : start + 3].tolist() == FORMAT.unpack(packed(3, seed)).tolist()
        assert (batch.routing[start + 3 : end] == -1).all()
    assert (
        build(MicrobatchPlan((), (0, 3)), [], torch.device("cpu"), routing=FORMAT).routing == -1
    ).all()
    assert build(plan, sequences, torch.device("cpu")).routing is None
    with pytest.raises(ValueError, match="experts of 4 positions in a sequence of 4 tokens"):
        build(
            MicrobatchPlan((0,), (0, 3)),
            [sequence(4, packed(4))],
            torch.device("cpu"),
            routing=FORMAT,
        )
