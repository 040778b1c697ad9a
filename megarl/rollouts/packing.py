"""The form of groups between generator and trainer: numbers as bytes, cut and joined without looking into them.

A group travels as a summary, its texts, and pieces of bytes. The first piece has the prompt's token ids; each sample's has its token ids,
log-probs, sizes of kept sets, what teachers say, policy mask (where the environment has written tokens), routing and kept sets. The summary
says how long each is. A data-parallel rank's
share of a batch is the pieces of its samples, end to end, each group's prompt before the first of them. Pieces are multiples of 4 bytes, so
that no number of a share is unaligned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from megarl.config.schema import RunConfig
from megarl.data.curriculum import outside_band
from megarl.kept_sets import KeptSets
from megarl.messaging.messages import GroupReady
from megarl.rewards.shaping import has_signal
from megarl.types import Group, GroupSummary, GroupTexts, Sample, SampleNumbers, SampleSummary, Version, any_unanswered, typed

_ALIGNED = 4
_ANSWER_CHARS = 10_000  # of a reference answer, for people: the tests of a program may have megabytes
_decode_summary = msgspec.msgpack.Decoder(GroupSummary).decode
_decode_texts = msgspec.msgpack.Decoder(GroupTexts).decode
_encode = msgspec.msgpack.Encoder().encode


def pack(
    group: Group,
    begun: Version = 0,
    started_s: float = 0.0,
    ended_s: float = 0.0,
    idle_s: float = 0.0,
    scoring_s: tuple[float, float] = (0.0, 0.0),
) -> GroupReady:
    """`begun` under that version: the oldest of a group without tokens. Raises: ValueError if a sample's arrays differ in length."""
    samples = [sample.summary() for sample in group.samples]
    prompt = group.prompt
    return GroupReady(
        ordinal=prompt.ordinal,
        oldest=min((sample.min_version for sample in samples if sample.policy_versions), default=begun),
        started_s=started_s,
        ended_s=ended_s,
        idle_s=idle_s,
        scoring_s=scoring_s,
        summary=msgspec.Raw(_encode(GroupSummary(prompt.ordinal, len(prompt.token_ids), samples))),
        texts=msgspec.Raw(_encode(_texts(group))),
        pieces=[memoryview(typed(prompt.token_ids, "i").tobytes()), *map(_piece, group.samples, samples)],
    )


def _texts(group: Group) -> GroupTexts:
    answer = group.prompt.answer
    if len(answer) > _ANSWER_CHARS:
        answer = f"{answer[:_ANSWER_CHARS]}… ({len(answer)} characters)"
    return GroupTexts(group.prompt.text, answer, [(each.text, each.environment_spans) for each in group.samples])


def summary_of(group: GroupReady) -> GroupSummary:
    return _decode_summary(group.summary)


def judged(group: GroupReady, config: RunConfig) -> GroupReady:
    """The group, or if it is dropped what is left: all but its numbers. With what it tells the curriculum."""
    curriculum, dynamic = config.data.curriculum, config.rollout.dynamic_sampling
    samples = summary_of(group).samples
    if any_unanswered(samples):
        return msgspec.structs.replace(group, dropped=True, pieces=[])
    outside = curriculum is not None and outside_band([sample.reward for sample in samples if not sample.branch], curriculum)
    dropped = dynamic and not has_signal(samples, config)
    return msgspec.structs.replace(group, outside=outside, dropped=dropped, pieces=[] if dropped else group.pieces)


def texts_of(raw: msgspec.Raw) -> GroupTexts:
    return _decode_texts(raw)


def _piece(sample: Sample, summary: SampleSummary) -> memoryview:
    mask = sample.policy_mask if summary.environment_tokens else b""
    sizes, records = (sample.kept.sizes, sample.kept.records) if summary.kept and sample.kept else (b"", b"")
    rest = len(mask) + len(sample.routing) + len(records)
    piece = b"".join([sample.token_ids, sample.logprobs, sizes, sample.teachers, mask, sample.routing, records, bytes(-rest % _ALIGNED)])
    if len(piece) != _piece_bytes(summary):
        raise ValueError(f"{len(sample.token_ids)} tokens, but {len(sample.logprobs)} log-probs")
    return memoryview(piece)


def _piece_bytes(sample: SampleSummary) -> int:
    rest = sample.routing_bytes + (sample.tokens if sample.environment_tokens else 0) + (sample.kept.bytes if sample.kept else 0)
    return 8 * sample.tokens + sample.teacher_bytes + rest + -rest % _ALIGNED


def join(groups: Sequence[GroupReady], sizes: Sequence[int], places: Sequence[int]) -> bytearray:
    """The share that has the samples at `places` of the batch, in this order. `sizes`: how many samples each group has."""
    pieces = (groups[group].pieces[piece] for group, piece in _walk(sizes, places))
    return bytearray().join(pieces)


def share_bytes(groups: Sequence[GroupSummary], places: Sequence[int]) -> int:
    sizes = [len(group.samples) for group in groups]
    return sum(
        _piece_bytes(groups[group].samples[piece - 1]) if piece else 4 * groups[group].prompt_tokens
        for group, piece in _walk(sizes, places)
    )


def split(groups: Sequence[GroupSummary], places: Sequence[int], share: np.ndarray) -> dict[int, SampleNumbers]:
    """The numbers of the samples in a share (uint8), by their places; views of its memory."""
    found: dict[int, SampleNumbers] = {}
    at, prompt, place = 0, np.empty(0, np.int32), iter(places)
    for group, piece in _walk([len(group.samples) for group in groups], places):
        if not piece:
            size = 4 * groups[group].prompt_tokens
            prompt = share[at : at + size].view(np.int32)
        else:
            sample = groups[group].samples[piece - 1]
            size, numbers = _piece_bytes(sample), share[at:]
            logprobs, sizes = 4 * sample.tokens, 8 * sample.tokens
            teachers = sizes + (4 * sample.tokens if sample.kept else 0)
            mask = teachers + sample.teacher_bytes
            routing = mask + (sample.tokens if sample.environment_tokens else 0)
            records = routing + sample.routing_bytes
            end = records + sample.kept.bytes - (teachers - sizes) if sample.kept else records
            found[next(place)] = SampleNumbers(
                prompt,
                numbers[:logprobs].view(np.int32),
                numbers[logprobs:sizes].view(np.float32),
                numbers[mask:routing].view(np.bool_) if routing > mask else None,
                numbers[routing:records].tobytes(),
                KeptSets(sample.kept.vocab_size, numbers[sizes:teachers].tobytes(), numbers[records:end].tobytes())
                if sample.kept
                else None,
                numbers[teachers:mask].tobytes(),
            )
        at += size
    assert at == len(share), f"a share of {len(share)} bytes, where summaries speak of {at}"
    return found


def _walk(sizes: Sequence[int], places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(group, piece) of a share, piece by piece; piece 0 is the prompt's."""
    group, first, told = 0, 0, -1
    for place in places:
        while place >= first + sizes[group]:
            first += sizes[group]
            group += 1
        if group != told:
            yield group, 0
            told = group
        yield group, place - first + 1
