"""The effect of weight updates on running requests (`async.partial_rollout`), on one real SGLang
engine for all modes.

Two sets of weights take turns: even versions are A, and odd versions are B. The tests write them
into the engine's memory between the real steps of an update, while long requests run through the
real fleet. `make matrix` does the same with an engine that has two replicas of attention, which
share the requests.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

import pytest
import torch
from sglang_engine import (
    CONTEXT,
    VOCABULARY,
    hf_experts,
    hf_logprobs,
    hf_model,
    make_checkpoint,
    sampled_by,
    start_engine,
)
from weights_rig import mapped

from megarl.generator.client import EngineClient
from megarl.generator.completions import Completion, Sampling
from megarl.generator.fleet import Fleet
from megarl.messaging.link import Hub, RunKey
from megarl.models.routing import RoutingFormat
from megarl.weight_sync.opening import open_memory
from megarl.weight_sync.transports.base import SHARED_MEMORY
from megarl.weight_sync.updates import WeightUpdate
from megarl.weight_sync.workers import Workers, connect

pytestmark = pytest.mark.timeout(900)

PROMPTS = [[1] + [3 + (37 * i + 11 * j) % 400 for j in range(9 + i)] for i in range(4)]
LONG = Sampling(max_tokens=72, ignore_eos=True)
NUCLEUS = Sampling(max_tokens=72, top_p=0.7, ignore_eos=True)
SHORT = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
CHUNK = 48  # updates come much earlier
TOLERANCE = 2e-5  # for fp32 log-probs of two programs, or two batch shapes, which round differently
DEADLINE_S = 60.0
ENGINES = {"TP1": dict(tp=1), "TP2xDPA2": dict(tp=2, dp_attention=2)}
MODES = ("block", "in_flight", "retract", "abort", "resume")

Place = tuple[int, str]  # TP rank, name


@dataclass
class Rig:
    """One engine, its memory, and both sets of weights, in the engine's form and as Hugging Face's
    model.
    """

    client: EngineClient
    workers: Workers
    memory: dict[Place, torch.Tensor]
    routing: RoutingFormat
    weights: list[dict[Place, torch.Tensor]]
    models: list[torch.nn.Module]
    version: int = 0

    def fleet(self, mode: str) -> Fleet:
        fleet = Fleet([self.client], mode, CHUNK if mode == "resume" else None)
        fleet.release(self.version)
        return fleet

    async def update(self, fleet: Fleet, mode: str, key: int | None = None) -> None:
        """Updates to the next version, as the weights channel does.

        `key`: a version for the fleet that may be wrong, to see the effect.
        """
        await asyncio.wait_for(fleet.hold(DEADLINE_S), DEADLINE_S)
        session = WeightUpdate(self.workers, self.version + 1, in_place=mode == "in_flight")
        await session.open()
        for place, values in self.weights[(self.version + 1) % 2].items():
            self.memory[place].copy_(values)
        await session.close()
        self.version += 1
        fleet.release(self.version if key is None else key)

    async def set_version(self, version: int) -> None:
        """Between tests, with nothing running: sets the weights of this parity."""
        while self.version % 2 != version % 2:
            await self.update(self.fleet("block"), "block")

    async def scores(
        self, prompt: list[int], completions: list[Completion], version: int
    ) -> list[list[float]]:
        """Log-probs of the completions' tokens, computed anew by the engine under the weights of
        `version`, without a cache.
        """
        await self.set_version(version)
        scored = await self.client.score(
            [[*prompt, *completion.token_ids] for completion in completions]
        )
        return [row[len(prompt) - 1 :] for row in scored]


@pytest.fixture(scope="module", params=["TP1", pytest.param("TP2xDPA2", marks=pytest.mark.matrix)])
def rig(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("partial")
    checkpoints = [
        make_checkpoint(folder / name, seed, torch.float32, False, "qwen3_moe")
        for name, seed in (("A", 1), ("B", 2))
    ]
    key = RunKey.generate()
    key.save(folder / "key")
    sizes = ENGINES[request.param]
    engines = start_engine(
        checkpoints[0],
        "float32",
        log=folder / "engine.log",
        enable_return_routed_experts=True,
        **sizes,
    )
    hub = Hub("generator.0", key)
    with asyncio.Runner() as runner:
        try:
            engine = next(engines)
            rig = runner.run(open_rig(engine, hub, str(folder / "key"), checkpoints))
            yield runner, rig
            runner.run(rig.client.close())
        finally:
            hub.close()
            engines.close()


async def open_rig(engine, hub: Hub, key_file: str, checkpoints) -> Rig:
    client = engine.client()
    await client.wait_ready(180, engine.log, engine.died)
    workers = Workers([client], [engine.tp], hub, DEADLINE_S)
    await client.begin_update(DEADLINE_S)
    await connect(workers, key_file)
    endpoints = await open_memory(workers, SHARED_MEMORY, map=None)
    await client.end_update(DEADLINE_S)
    memory = {
        (rank, name): values
        for rank, tensors in enumerate(mapped(endpoints))
        for name, values in tensors.items()
    }
    weights = [{place: values.clone() for place, values in memory.items()}]
    await client.call("/update_weights_from_disk", {"model_path": str(checkpoints[1])}, DEADLINE_S)
    # a barrier, because SGLang answers a load as soon as rank 0 is done
    await client.begin_update(DEADLINE_S)
    await client.end_update(DEADLINE_S)
    weights.append({place: values.clone() for place, values in memory.items()})
    assert not any(torch.equal(weights[0][place], weights[1][place]) for place in memory)
    rig = Rig(
        client,
        workers,
        memory,
        engine.routing,
        weights,
        [hf_model(folder, torch.float32) for folder in checkpoints],
        version=1,
    )
    await rig.set_version(0)
    return rig


async def started(fleet: Fleet, n: int, sampling: Sampling = LONG) -> list[asyncio.Task]:
    """Long requests on all prompts, each after its first few tokens."""
    running = [asyncio.create_task(fleet.generate(prompt, sampling, n)) for prompt in PROMPTS]
    await asyncio.sleep(0.01)
    # queued after them, and sampled together with them
    await fleet.engines[0].client.generate(PROMPTS[0], SHORT)
    return running


def difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_tokens_have_the_version_and_log_prob_of_their_weights(rig, mode):
    runner, rig = rig

    async def body() -> list[list[Completion]]:
        fleet = rig.fleet(mode)
        first = rig.version
        running = await started(fleet, 3)
        await rig.update(fleet, mode)
        groups = await asyncio.wait_for(asyncio.gather(*running), DEADLINE_S)
        for completion in itertools.chain(*groups):
            assert (
                len(completion.token_ids)
                == len(completion.logprobs)
                == len(completion.versions)
                == LONG.max_tokens
            )
            assert completion.finish_reason == "length"
            versions = completion.versions
            assert versions.tolist() == sorted(versions)
            if mode == "block":
                assert set(versions) == {first}
            elif mode == "abort":
                assert set(versions) == {first + 1}, "begun anew"
            else:
                assert set(versions) == {first, first + 1}
            if mode == "resume":
                assert versions.index(first + 1) < CHUNK, "cut where it was"
        return groups

    groups = runner.run(body())
    if mode == "in_flight":
        return check_in_place(rig, groups)
    check_experts(rig, groups, mode)
    for prompt, completions in zip(PROMPTS, groups):
        for version in sorted(
            set(itertools.chain(*(completion.versions for completion in completions)))
        ):
            scored = runner.run(rig.scores(prompt, completions, version))
            for completion, fresh in zip(completions, scored):
                places = [
                    i
                    for i, token_version in enumerate(completion.versions)
                    if token_version == version
                ]
                assert (
                    difference([completion.logprobs[i] for i in places], [fresh[i] for i in places])
                    < TOLERANCE
                )


def check_experts(rig: Rig, groups: list[list[Completion]], mode: str) -> None:
    """The experts are the choice of the weights that sampled the next token; after a request's keys
    and values were computed anew, the choice of the new weights. (A few may differ: if two experts'
    scores are equal up to rounding, either may be chosen.)
    """
    same = different = total = 0
    for prompt, completion in (
        (prompt, completion) for prompt, group in zip(PROMPTS, groups) for completion in group
    ):
        tokens = [*prompt, *completion.token_ids]
        versions = completion.versions
        routed = torch.from_numpy(rig.routing.unpack(completion.routing).astype("int64")).sort(
            dim=-1
        )[0]
        assert len(routed) == len(tokens) - 1
        by = [
            versions[max(0, position + 1 - len(prompt))] if mode != "retract" else versions[-1]
            for position in range(len(routed))
        ]
        choices = [hf_experts(model, tokens) for model in rig.models]
        same += sum(
            torch.equal(ids, choices[version % 2][position])
            for position, (ids, version) in enumerate(zip(routed, by))
        )
        different += sum(
            torch.equal(ids, choices[1 - version % 2][position])
            for position, (ids, version) in enumerate(zip(routed, by))
        )
        total += len(routed)
    assert same > 0.995 * total > total / 2 > different, (same, different, total)


def check_in_place(rig: Rig, groups: list[list[Completion]]) -> None:
    """Tokens sampled after the update attend to keys and values of the old weights: the policy is
    the new weights with the old cache. Hugging Face's model computes the same.
    """
    for prompt, completions in zip(PROMPTS, groups):
        for completion in completions:
            before, after = sorted(set(completion.versions))
            old, new = (rig.models[version % 2] for version in (before, after))
            by = sampled_by([old, new], prompt, completion, TOLERANCE)
            assert set(by) == {0, 1}, "some of each"
            assert completion.versions.tolist() == [
                after if sampled_after else before for sampled_after in by
            ]
            forgotten = hf_logprobs(new, [*prompt, *completion.token_ids])[len(prompt) - 1 :]
            forgotten = forgotten.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert difference(completion.logprobs, forgotten.tolist()) > 0.01, (
                "the old cache makes a difference that this test can see"
            )


@pytest.mark.parametrize("mode", MODES)
def test_every_token_has_the_set_it_was_drawn_from(rig, mode):
    """The set is a nucleus: the likeliest tokens under the weights that sampled the token.

    The log-prob is over that set. (New weights that continue with old keys and values are not
    compared.)
    """
    runner, rig = rig

    async def body() -> list[list[Completion]]:
        fleet = rig.fleet(mode)
        running = await started(fleet, 2, NUCLEUS)
        await rig.update(fleet, mode)
        return await asyncio.wait_for(asyncio.gather(*running), DEADLINE_S)

    for prompt, completions in zip(PROMPTS, runner.run(body())):
        for completion in completions:
            tokens = torch.tensor(completion.token_ids)
            sets = completion.kept
            assert len(sets) == len(tokens) == NUCLEUS.max_tokens and len(
                set(completion.versions)
            ) == (1 if mode in ("block", "abort") else 2)
            sizes = torch.tensor(sets.counts)
            inside = torch.zeros(len(tokens), VOCABULARY, dtype=torch.bool)
            inside[torch.arange(len(sizes)).repeat_interleave(sizes), torch.tensor(sets.ids())] = (
                True
            )
            assert inside[torch.arange(len(tokens)), tokens].all()
            if mode == "in_flight":
                continue
            by_version = [
                hf_logprobs(model, [*prompt, *completion.token_ids])[len(prompt) - 1 :]
                for model in rig.models
            ]
            by = torch.tensor(completion.versions) % 2
            logprobs = torch.where(by[:, None] == 0, *by_version)
            assert (
                logprobs.masked_fill(~inside, 0).amin(-1)
                > logprobs.masked_fill(inside, -99).amax(-1) - TOLERANCE
            ).all()
            mass = logprobs.masked_fill(~inside, -torch.inf).logsumexp(-1)
            assert (mass.exp() > NUCLEUS.top_p - TOLERANCE).all() and (mass.exp() < 0.9).all()
            expected = logprobs.gather(-1, tokens[:, None])[:, 0] - mass
            assert difference(completion.logprobs, expected.tolist()) < TOLERANCE


async def shared_prefix(rig: Rig, mode: str, key: int | None = None) -> float:
    """The largest log-prob difference between a request after an update, whose prefix older weights
    have cached, and a new computation.
    """
    fleet = rig.fleet(mode)
    prompt = (PROMPTS[3] * 4)[:40]
    running = [asyncio.create_task(fleet.generate(PROMPTS[0], LONG, 1))]
    # leaves the prefix in the cache, or in each cache if replicas of attention have their own
    await fleet.generate(prompt, SHORT, 2)
    await rig.update(fleet, mode, key)
    [completion] = await fleet.generate(prompt, SHORT, 1)
    await asyncio.gather(*running)
    assert completion.versions.tolist() == [rig.version] * SHORT.max_tokens
    [fresh] = await rig.scores(prompt, [completion], rig.version)
    return difference(completion.logprobs, fresh)


@pytest.mark.parametrize("mode", MODES)
def test_new_requests_never_use_what_older_weights_have_cached(rig, mode):
    runner, rig = rig
    assert runner.run(shared_prefix(rig, mode)) < TOLERANCE


def test_the_version_is_what_keeps_the_cache_apart(rig):
    """Without the version the test above fails: requests that run through the update keep the cache
    from being emptied.
    """
    runner, rig = rig
    assert runner.run(shared_prefix(rig, "in_flight", key=rig.version)) > 0.01


def test_kept_cache_serves_later_turns_of_its_episode_alone(rig):
    """After an update, the next turn prefills only what is new, and its log-probs are those of the
    new weights with the old keys and values.
    """
    runner, rig = rig

    async def body() -> None:
        fleet = rig.fleet("in_flight")
        keeping = fleet.keeping()
        prompt = (PROMPTS[3] * 3)[:30]
        [first] = await keeping(prompt, SHORT, 1)
        await rig.update(fleet, "in_flight")
        conversation = [*prompt, *first.token_ids]
        fleet.take_prefill()
        [second] = await keeping(conversation, SHORT, 1)
        tokens, cached = fleet.take_prefill()
        assert tokens == len(conversation)
        assert tokens - cached <= 2, "the last token sampled has no keys and values yet"
        assert second.versions.tolist() == [rig.version] * SHORT.max_tokens
        [fresh] = await fleet.keeping()(conversation, SHORT, 1)
        assert fleet.take_prefill() == (tokens, 0), "another episode"
        turns = Completion(
            [*first.token_ids, *second.token_ids],
            [*first.logprobs, *second.logprobs],
            [*first.versions, *second.versions],
            "length",
        )
        old, new = (rig.models[version % 2] for version in (rig.version - 1, rig.version))
        by = sampled_by([old, new], prompt, turns, TOLERANCE)
        assert by == [0] * SHORT.max_tokens + [1] * SHORT.max_tokens
        [anew] = await rig.scores(conversation, [second], rig.version)
        assert difference(second.logprobs, anew) > 0.01
        [anew] = await rig.scores(conversation, [fresh], rig.version)
        assert difference(fresh.logprobs, anew) < TOLERANCE

    runner.run(body())


def test_a_response_that_was_aborted_once_is_waited_for(rig):
    runner, rig = rig

    async def body() -> None:
        fleet = rig.fleet("abort")
        first = rig.version
        running = await started(fleet, 2)
        await rig.update(fleet, "abort")
        await rig.update(fleet, "abort")
        assert all(task.done() for task in running), "the second update waited for them"
        for completion in itertools.chain(*(task.result() for task in running)):
            assert set(completion.versions) == {first + 1}

    runner.run(body())


def test_lengths_fit_the_engine():
    assert max(map(len, PROMPTS)) + LONG.max_tokens < CONTEXT
