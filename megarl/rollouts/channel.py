"""The rollouts channel: brings finished groups from the generator to the trainer, and batches of
them to every trainer rank.

    generator                                   trainer rank 0
    begins where the ledger ends       ←        GenerateFrom(first, skip, …), once
    GroupsStarted(ordinals, version)   →
    PromptsRested(ordinals)            →        counts them as done
    GroupReady(group)                  →        buffers it, or counts it as dropped;
                                                makes a batch when asked for one
    generates them again               ←        Regenerate(ordinals) of groups found too old

The sending end decides how far the generator may run ahead, when it begins prompts (`admission`).
The receiving end decides which groups are used, and when (`buffer`).

A group travels as a summary, its texts, and pieces of bytes, which are cut and joined but never
parsed on the way. The first piece has the prompt's token ids. Each sample's piece has its token
ids, log-probs, sizes of kept sets, teachers' numbers, policy mask (if the environment has written
tokens), routing and kept sets. The summary gives the length of each. A data-parallel rank's share
of a batch is the pieces of its samples, end to end. The prompt of a group comes before the group's
first sample. The length of each piece is a multiple of 4 bytes, so that every number of a share is
aligned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from megarl.base.kept_sets import KeptSets
from megarl.base.rollout_types import (
    Batch,
    BatchHeader,
    Group,
    GroupSummary,
    GroupTexts,
    Ordinal,
    Sample,
    SampleNumbers,
    SampleSummary,
    Version,
    any_unanswered,
    typed,
)
from megarl.config.schema import RunConfig
from megarl.config.tasks import task_of
from megarl.data.order import outside_band
from megarl.messaging.link import LOOK_UP_S, Hub, Peer
from megarl.messaging.members import members_only
from megarl.messaging.messages import (
    GenerateFrom,
    GroupReady,
    GroupsStarted,
    Message,
    PromptsRested,
    Regenerate,
    WeightsWanted,
)
from megarl.messaging.process_groups import StopRequest
from megarl.observe.status import StatusBoard, TraceWriter
from megarl.rewards.credit import has_signal
from megarl.rollouts.buffer import RolloutBuffer

_ALIGNED = 4
# how much of a reference answer is kept for display: the tests of a program may have megabytes
_ANSWER_CHARS = 10_000
_decode_summary = msgspec.msgpack.Decoder(GroupSummary).decode
_decode_texts = msgspec.msgpack.Decoder(GroupTexts).decode
_encode = msgspec.msgpack.Encoder().encode


def pack(
    group: Group,
    begin_version: Version = 0,
    started_s: float = 0.0,
    ended_s: float = 0.0,
    idle_s: float = 0.0,
    scoring_s: tuple[float, float] = (0.0, 0.0),
) -> GroupReady:
    """Packs `group`, which began under weight version `begin_version`.

    That is its oldest and newest version if it has no tokens.

    Raises: ValueError if a sample's arrays differ in length.
    """
    samples = [sample.summary() for sample in group.samples]
    prompt = group.prompt
    sampled = [sample for sample in samples if sample.policy_versions]
    return GroupReady(
        ordinal=prompt.ordinal,
        oldest=min((sample.min_version for sample in sampled), default=begin_version),
        newest=max((sample.max_version for sample in sampled), default=begin_version),
        started_s=started_s,
        ended_s=ended_s,
        idle_s=idle_s,
        scoring_s=scoring_s,
        summary=msgspec.Raw(
            _encode(
                GroupSummary(
                    ordinal=prompt.ordinal,
                    prompt_tokens=len(prompt.token_ids),
                    samples=samples,
                    source=prompt.source,
                    unsent_rewards=group.unsent_rewards,
                )
            )
        ),
        texts=msgspec.Raw(_encode(_texts(group))),
        pieces=[
            memoryview(typed(prompt.token_ids, "i").tobytes()),
            *map(_piece, group.samples, samples),
        ],
    )


def _texts(group: Group) -> GroupTexts:
    answer = group.prompt.answer
    if len(answer) > _ANSWER_CHARS:
        answer = f"{answer[:_ANSWER_CHARS]}… ({len(answer)} characters)"
    return GroupTexts(
        group.prompt.text,
        answer,
        [(sample.text, sample.environment_spans) for sample in group.samples],
    )


def summary_of(group: GroupReady) -> GroupSummary:
    return _decode_summary(group.summary)


def judged(group: GroupReady, config: RunConfig) -> GroupReady:
    """The group with its verdict for the curriculum.

    A dropped group loses its numbers, and nothing else.
    """
    curriculum = config.data.curriculum
    dynamic = config.rollout.dynamic_sampling
    summary = summary_of(group)
    samples = summary.samples
    if any_unanswered(samples):
        return msgspec.structs.replace(group, dropped=True, pieces=[])
    outside = curriculum is not None and outside_band(
        [sample.reward for sample in samples if not sample.branch], curriculum
    )
    dropped = dynamic and not has_signal(samples, task_of(config, summary.source))
    return msgspec.structs.replace(
        group, outside=outside, dropped=dropped, pieces=[] if dropped else group.pieces
    )


def texts_of(raw: msgspec.Raw) -> GroupTexts:
    return _decode_texts(raw)


def _piece(sample: Sample, summary: SampleSummary) -> memoryview:
    mask = sample.policy_mask if summary.environment_tokens else b""
    sizes = b""
    records = b""
    if summary.kept and sample.kept:
        sizes = sample.kept.sizes
        records = sample.kept.records
    unaligned_bytes = len(mask) + len(sample.routing) + len(records)
    piece = b"".join(
        [
            sample.token_ids,
            sample.logprobs,
            sizes,
            sample.teachers,
            mask,
            sample.routing,
            records,
            bytes(-unaligned_bytes % _ALIGNED),
        ]
    )
    if len(piece) != _piece_bytes(summary):
        raise ValueError(f"{len(sample.token_ids)} tokens, but {len(sample.logprobs)} log-probs")
    return memoryview(piece)


def _piece_bytes(sample: SampleSummary) -> int:
    unaligned_bytes = sample.routing_bytes
    if sample.environment_tokens:
        unaligned_bytes += sample.tokens
    if sample.kept:
        unaligned_bytes += sample.kept.bytes
    return 8 * sample.tokens + sample.teacher_bytes + unaligned_bytes + -unaligned_bytes % _ALIGNED


def join(groups: Sequence[GroupReady], sizes: Sequence[int], places: Sequence[int]) -> bytearray:
    """The share with the samples at `places` of the batch, in this order.

    `sizes`: the number of samples of each group.
    """
    pieces = (groups[group].pieces[piece] for group, piece in _walk(sizes, places))
    return bytearray().join(pieces)


def share_bytes(groups: Sequence[GroupSummary], places: Sequence[int]) -> int:
    sizes = [len(group.samples) for group in groups]
    return sum(
        _piece_bytes(groups[group].samples[piece - 1]) if piece else 4 * groups[group].prompt_tokens
        for group, piece in _walk(sizes, places)
    )


def split(
    groups: Sequence[GroupSummary], places: Sequence[int], share: np.ndarray
) -> dict[int, SampleNumbers]:
    """The numbers of the samples in `share` (uint8), by their places in the batch.

    They are views of its memory.
    """
    numbers_by_place: dict[int, SampleNumbers] = {}
    offset = 0
    prompt = np.empty(0, np.int32)
    place = iter(places)
    for group, piece in _walk([len(group.samples) for group in groups], places):
        if not piece:
            size = 4 * groups[group].prompt_tokens
            prompt = share[offset : offset + size].view(np.int32)
        else:
            sample = groups[group].samples[piece - 1]
            size = _piece_bytes(sample)
            sample_bytes = share[offset:]
            logprobs = 4 * sample.tokens
            sizes = 8 * sample.tokens
            teachers = sizes + (4 * sample.tokens if sample.kept else 0)
            mask = teachers + sample.teacher_bytes
            routing = mask + (sample.tokens if sample.environment_tokens else 0)
            records = routing + sample.routing_bytes
            end = records + sample.kept.bytes - (teachers - sizes) if sample.kept else records
            kept_sets = None
            if sample.kept:
                kept_sets = KeptSets(
                    sample.kept.vocab_size,
                    sample_bytes[sizes:teachers].tobytes(),
                    sample_bytes[records:end].tobytes(),
                )
            numbers_by_place[next(place)] = SampleNumbers(
                prompt,
                sample_bytes[:logprobs].view(np.int32),
                sample_bytes[logprobs:sizes].view(np.float32),
                sample_bytes[mask:routing].view(np.bool_) if routing > mask else None,
                sample_bytes[routing:records].tobytes(),
                kept_sets,
                sample_bytes[teachers:mask].tobytes(),
            )
        offset += size
    assert offset == len(share), (
        f"a share has {len(share)} bytes, but by the summaries it has {offset}"
    )
    return numbers_by_place


def _walk(sizes: Sequence[int], places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields (group, piece) for each piece of a share, in order.

    Piece 0 of a group is its prompt.
    """
    group = 0
    first = 0
    last_group = -1
    for place in places:
        while place >= first + sizes[group]:
            first += sizes[group]
            group += 1
        if group != last_group:
            yield group, 0
            last_group = group
        yield group, place - first + 1


# rank 0 may come to a batch this much later than the other ranks, since it also reports the step
# before
LATER_S = 600.0


class BatchExecutor(Protocol):
    """What the receiving end needs of the trainer's executor."""

    rank: int
    curr_step: int
    status: StatusBoard
    trace: TraceWriter

    @property
    def replicas(self) -> list[list[int]]:
        """[dp][…] the ranks of each data-parallel replica, which train on the same samples."""
        ...

    def assign(self, batch: Batch) -> list[list[int]]:
        """[dp][…] the places in `batch.samples` of the samples that each replica trains on.

        All ranks return the same.
        """
        ...

    def put_batch(self, batch: Batch, waited_s: float) -> None: ...

    def stop(self) -> None: ...


class RolloutsSender:
    """The generator's end.

    The rollout stream sends each group as soon as it finishes, independently of the controller's
    loop.
    """

    def __init__(self, link: Hub):
        self.link = link

    async def first(self, timeout_s: float) -> GenerateFrom:
        return (
            await self.link.arrival(
                GenerateFrom, timeout_s, "trainer.0 to say which prompts are to be generated"
            )
        )[1]

    async def rejected(self) -> list[Ordinal]:
        """Waits for the next rejection, without a deadline."""
        return (await self.link.arrival(Regenerate, None, "rejected groups"))[1].ordinals

    def begun(self, ordinals: list[Ordinal], version: Version) -> None:
        self.link.send("trainer.0", GroupsStarted(ordinals, version))

    def rested(self, ordinals: list[Ordinal]) -> None:
        self.link.send("trainer.0", PromptsRested(ordinals))

    def finished(self, group: GroupReady) -> None:
        self.link.send("trainer.0", group)


class _Resend(msgspec.Struct, frozen=True, tag=True):
    """Sent instead of a batch when all ranks must first offer their weights again."""


_decode_agreed = msgspec.msgpack.Decoder(BatchHeader | _Resend | None).decode
_decode_header = msgspec.msgpack.Decoder(BatchHeader).decode


def batch_of(header: BatchHeader) -> Batch:
    """The batch of rank 0's `header`, as every rank receives it: without the numbers of its
    tokens.
    """
    return Batch(**msgspec.structs.asdict(_decode_header(_encode(header))))


def _encoded_summaries(groups: Sequence[GroupReady]) -> list[GroupSummary]:
    """The summaries as the generator has encoded them. Only receivers of a header decode them."""
    return cast("list[GroupSummary]", [group.summary for group in groups])


class Inlet(Protocol):
    """What `Intake` needs of the trainer's end of the link."""

    def drain(self, kind: type[Any]) -> Iterable[Any]: ...

    def send(self, message: Message) -> None: ...


class Intake:
    """Rank 0's decisions, none of which wait.

    It puts everything that has arrived into the buffer, which makes up the batches.

    The constructor tells the generator which prompts to generate. `max_generated`: if this many
    prompts did not fill a batch, the batch is empty and names the dropped prompts.
    """

    def __init__(self, link: Inlet, buffer: RolloutBuffer, max_generated: int | None = None):
        self._link = link
        self.buffer = buffer
        self._max_generated = max_generated
        self._rejected = 0  # groups rejected since the last batch
        # when the buffer first had enough groups for the awaited batch
        self._full_since: float | None = None
        self._idle_s = 0.0  # the generator's idle time up to the last batch
        ledger = buffer.ledger()
        finished_ordinals = sorted(
            [*ledger.consumed_beyond, *(group.ordinal for group in ledger.groups)]
        )
        unused = sorted([*ledger.dropped, *ledger.rested])
        link.send(
            GenerateFrom(
                ledger.consumed_below, finished_ordinals, unused, ledger.outside, ledger.rejected
            )
        )

    def look(
        self, step: int, now_s: float
    ) -> tuple[BatchHeader, list[GroupReady], list[GroupReady]] | None:
        """Rank 0's header of the batch of `step`, its groups, and the dropped groups; None if it is not
        complete. Rejects groups that are too old.
        """
        self.take_in()
        stale = self.buffer.reject(step)
        if stale:
            self._link.send(Regenerate(stale))
            self._rejected += len(stale)
        groups = self.buffer.take(step)
        if groups is not None:
            return self._compose(step, groups, self.buffer.report_dropped(), now_s)
        dropped = self.buffer.give_up(step, self._max_generated)
        if dropped:
            return self._compose(step, [], dropped, now_s)
        if self._full_since is None and self.buffer.full(step):
            self._full_since = now_s
        return None

    def take_in(self) -> None:
        """Puts everything that has arrived into the buffer, in an order that keeps causes before
        effects, since messages go on arriving. A group is announced before it finishes, so finished
        groups are collected before announcements. A prompt rests because of groups that have
        finished, so rested prompts are collected before finished groups.
        """
        for rested in self._link.drain(PromptsRested):
            self.buffer.rest(rested.ordinals)
        ready = self._link.drain(GroupReady)
        for started in self._link.drain(GroupsStarted):
            self.buffer.begin(started.ordinals, started.version)
        for group in ready:
            self.buffer.finish(group)

    def _compose(
        self, step: int, groups: list[GroupReady], dropped: list[GroupReady], now_s: float
    ) -> tuple[BatchHeader, list[GroupReady], list[GroupReady]]:
        timed_groups = [group for group in groups if group.ended_s > 0]
        elapsed_s = 0.0
        reward_s = 0.0
        rollout_s = 0.0
        idle_s = self._idle_s
        if timed_groups:
            start_s = min(group.started_s for group in timed_groups)
            elapsed_s = max(group.ended_s for group in timed_groups) - start_s
            scoring_start_s = min(group.scoring_s[0] for group in timed_groups)
            reward_s = max(group.scoring_s[1] for group in timed_groups) - scoring_start_s
            total_s = sum(group.ended_s - group.started_s for group in timed_groups)
            rollout_s = total_s / len(timed_groups)
            idle_s = max(idle_s, *(group.idle_s for group in timed_groups))
        waited_s = idle_s - self._idle_s
        self._idle_s = idle_s
        due_wait_s = 0.0 if self._full_since is None else now_s - self._full_since
        rejected = self._rejected
        self._rejected = 0
        self._full_since = None
        header = BatchHeader(
            step=step,
            groups=_encoded_summaries(groups),
            generate_s=max(0.0, elapsed_s - reward_s),
            generator_wait_s=waited_s,
            due_wait_s=due_wait_s,
            rejected=rejected,
            buffered=self.buffer.finished,
            dropped=_encoded_summaries(dropped),
            rested=self.buffer.take_rested(),
            reward_s=reward_s,
            rollout_s=rollout_s,
        )
        return header, groups, dropped


class RolloutsReceiver:
    """The end at every trainer rank. `buffer` is None except on rank 0.

    Rank 0 broadcasts the summaries of a batch: lengths, scores, versions. From these all ranks
    compute the same advantages, denominators and microbatches, and so the same assignment of
    samples to data-parallel ranks (`assign`). For each data-parallel rank, rank 0 sends the numbers
    of its samples to the first of the ranks that share them, which passes them on. Nobody parses
    the numbers on the way. Meanwhile a thread receives the groups of later steps, so the next batch
    may already be in memory when it is asked for.

    While rank 0 waits for rollouts, the other ranks wait for a batch's size, longer than any other
    collective may take. So batches have process groups of their own. These use gloo, so that no GPU
    spins during the wait.

    When the run must stop, rank 0 broadcasts that there is no batch, so that all ranks stop after
    the same step.
    """

    def __init__(
        self,
        link: Peer,
        timeout_s: float,
        buffer: RolloutBuffer | None = None,
        stop: StopRequest | None = None,
        resend: Callable[[Any], None] = lambda executor: None,
        max_generated: int | None = None,
    ):
        self.link = link
        self._timeout_s = timeout_s
        self._stop = stop or StopRequest()
        self._resend = resend  # sends the weights again, for an engine that has been restarted
        self._groups: _Groups | None = None  # None until the first batch is asked for
        self._intake: Intake | None = None
        if buffer is not None:
            link.read_ahead()
            self._intake = Intake(link, buffer, max_generated)

    def recv(self, executor: BatchExecutor) -> None:
        """Gives the executor the batch of `executor.curr_step`, and how many seconds it waited.

        The wait excludes the time for sending weights again, which `WeightsSender.send` reports.
        """
        waited_s = 0.0
        start = time.monotonic()
        message = self._receive_agreed(executor)
        while isinstance(message, _Resend):
            waited_s += time.monotonic() - start
            self._resend(executor)
            start = time.monotonic()
            message = self._receive_agreed(executor)
        if message is None:
            executor.stop()
        else:
            executor.put_batch(message, waited_s=waited_s + time.monotonic() - start)

    def _receive_agreed(self, executor: BatchExecutor) -> Batch | _Resend | None:
        """What rank 0 has broadcast. A batch has the numbers of this rank's samples. Collective."""
        # longer than rank 0's own deadline, whose message says what rank 0 waits for
        if self._groups is None:
            self._groups = _Groups(executor.rank, executor.replicas, self._timeout_s + LATER_S)
        groups = []
        dropped = []
        body = b""
        if executor.rank == 0:
            header = self._next_batch(executor)
            if isinstance(header, tuple):
                header, groups, dropped = header
            body = msgspec.msgpack.encode(header)
        message = _decode_agreed(self._groups.broadcast(body))
        if not isinstance(message, BatchHeader):
            return message
        batch = Batch(
            **msgspec.structs.asdict(message),
            texts=[group.texts for group in groups],
            dropped_texts=[group.texts for group in dropped],
        )
        if not batch.groups:
            return batch
        shares = executor.assign(batch)
        sizes = [len(group.samples) for group in batch.groups]
        places = shares[self._groups.dp]
        share = self._groups.scatter(
            [partial(join, groups, sizes, share_places) for share_places in shares],
            share_bytes(batch.groups, places),
        )
        return msgspec.structs.replace(batch, numbers=split(batch.groups, places, share))

    def awaits(self, step: int, wanted: bool) -> bool:
        """Whether rank 0 has `wanted` true, and the batch of `step` is not complete yet. False also
        if the run is to stop. Collective: all ranks return the same.
        """
        assert self._groups is not None, "there was a batch before"
        body = b""
        if self._intake is not None:
            self._intake.take_in()
            is_awaited = not (self._intake.buffer.full(step) or self._stop.is_made)
            body = b"1" if wanted and is_awaited else b"0"
        return self._groups.broadcast(body) == b"1"

    def ledger(self) -> bytes:
        """The encoded ledger for a checkpoint. It covers everything that has arrived by now."""
        intake = self._rank_0_intake
        intake.take_in()
        return intake.buffer.ledger().encode()

    @property
    def _rank_0_intake(self) -> Intake:
        assert self._intake is not None, "only rank 0 has a buffer"
        return self._intake

    def _next_batch(
        self, executor: BatchExecutor
    ) -> tuple[BatchHeader, list[GroupReady], list[GroupReady]] | _Resend | None:
        """Waits for the batch of this step. Returns its header, its groups and the dropped groups,
        or None when the run must stop.
        """
        step = executor.curr_step
        intake = self._rank_0_intake
        deadline = time.monotonic() + self._timeout_s
        awaited = f"batch {step} from generator.0"
        with (
            executor.status.waiting("generator.0", awaited),
            executor.trace.span(f"wait for batch {step}"),
        ):
            while True:
                if self._stop.is_made:
                    return None
                request = self.link.poll(WeightsWanted)
                # otherwise the ranks have sent a newer version meanwhile
                if request is not None and request[1].version == step:
                    return _Resend()
                response = intake.look(step, time.monotonic())
                if response is not None:
                    return response
                left_s = deadline - time.monotonic()
                if not self.link.wait(min(left_s, LOOK_UP_S)) and left_s <= 0:
                    raise TimeoutError(
                        f"trainer.0 waited {self._timeout_s:.0f} s for {awaited}; {intake.buffer}"
                    )


class _Groups:
    """The gloo process groups for batches.

    Collective: all ranks construct them together. `replicas`: see BatchExecutor.
    """

    def __init__(self, rank: int, replicas: list[list[int]], timeout_s: float):
        (self.dp,) = [dp for dp, ranks in enumerate(replicas) if rank in ranks]
        self._rank = rank
        self._heads = list(map(min, replicas))
        self._timeout = timedelta(seconds=timeout_s)
        with members_only():
            self.all = self._group(None)
            self._of_heads = self._group(self._heads)
            self._of_replicas = [
                self._group(ranks) if len(ranks) > 1 else None for ranks in replicas
            ][self.dp]

    def _group(self, ranks: list[int] | None) -> dist.ProcessGroup | None:
        """The process group of `ranks`; None stands for all ranks.

        Returns None if this rank is not a member.
        """
        group = dist.new_group(ranks, backend="gloo", timeout=self._timeout, group_desc="batches")
        return group if isinstance(group, dist.ProcessGroup) else None

    def broadcast(self, body: bytes) -> bytes:
        """Returns rank 0's bytes on every rank."""
        size = torch.tensor([len(body)])
        dist.broadcast(size, src=0, group=self.all)
        data = (
            torch.frombuffer(bytearray(body), dtype=torch.uint8)
            if body
            else torch.empty(int(size), dtype=torch.uint8)
        )
        dist.broadcast(data, src=0, group=self.all)
        return data.numpy().tobytes()

    def scatter(self, shares: list[Callable[[], bytearray]], size: int) -> np.ndarray:
        """Returns this rank's share, of `size` bytes.

        Rank 0 builds each share only when it sends it.
        """
        numbers = torch.empty(size, dtype=torch.uint8)
        if self._rank == 0:
            for dp, head in enumerate(self._heads):
                share = shares[dp]()
                data = (
                    torch.frombuffer(share, dtype=torch.uint8)
                    if share
                    else torch.empty(0, dtype=torch.uint8)
                )
                if head == 0:
                    numbers = data
                else:
                    dist.send(data, dst=head, group=self._of_heads)
        elif self._rank in self._heads:
            dist.recv(numbers, src=0, group=self._of_heads)
        if self._of_replicas is not None:
            dist.broadcast(numbers, src=self._heads[self.dp], group=self._of_replicas)
        return numbers.numpy()
