"""lora.sync=adapter on live engines: their pool holds the trainer's adapters, their weights stay,
and they score like the merged model.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_reference import expected_on
from safetensors.torch import load_file
from sglang_engine import (
    free_port,
    hf_difference,
    hf_logprobs,
    hf_model,
    hf_rounding,
    make_checkpoint,
)
from test_weights_matrix import LAYOUTS
from weights_rig import (
    SEQUENCES,
    TRANSPORTS,
    Generator,
    Parameters,
    Trainers,
    noted_grants,
    open_generator,
    receiver,
    unequal,
)
from weights_worker import Job, Sync

from megarl.base.geometry import GeneratorTopology
from megarl.generator.client import EngineUnreachable
from megarl.generator.completions import Completion, Sampling
from megarl.generator.fleet import Fleet
from megarl.generator.server import ServedAdapter
from megarl.lora.files import TENSORS_FILE, empty_adapter
from megarl.lora.layout import Lora, is_adapter
from megarl.lora.settings import LoraConfig
from megarl.messaging.link import Hub, RunKey
from megarl.models import load_spec
from megarl.weight_sync.audit import AuditError
from megarl.weight_sync.receiver import WeightsReceiver

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LAYERS = 4
ENGINES = {  # family, tp, ep, targets
    "llama-TP1": ("llama", 1, 1, ["all"]),
    "llama-TP2": ("llama", 2, 1, ["all"]),
    "qwen3_moe-EP2": ("qwen3_moe", 2, 2, ATTENTION),
}
EXPERTS = "qwen3_moe-EP2"
EACH = 3  # updates by each transport
EXPORTS = list(range(EACH * len(TRANSPORTS)))
MANY = 50  # updates
PROMPT = [1, 40, 77, 210]
LONG = 80  # tokens

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@dataclass
class Served:
    """One engine that serves adapters."""

    name: str
    checkpoint: Path
    lora: LoraConfig
    generator: Generator

    def job(
        self, folder: Path, key_file: Path, layout: str, syncs: list[Sync], **fields: Any
    ) -> Job:
        family, tp, ep, _ = ENGINES[self.name]
        sizes = LAYOUTS[layout]
        sequence_parallel = "moe" in family and sizes.get("tp", 1) > 1  # required with experts
        return Job(
            model=str(self.checkpoint), dtype="float32",
            trainer={**sizes, "sequence_parallel": sequence_parallel}, tp=tp, ep=ep,
            syncs=syncs, key_file=str(key_file), port=free_port(), folder=str(folder),
            lora=vars(self.lora), **fields,
        )  # fmt: skip

    def weights(self) -> Parameters:
        """All that updates of adapters leave unchanged."""
        return [
            {name: values for name, values in tensors.items() if not is_adapter(name)}
            for tensors in self.generator.memory()
        ]

    def check_scores(self, folder: Path, version: int) -> None:
        """Compares log-probs with Hugging Face's on the exported weights, which include the
        adapters.
        """
        merged = folder / f"export{version}"
        assert hf_difference(SEQUENCES, self.generator.score(SEQUENCES), merged) < hf_rounding(
            SEQUENCES, merged, "float32"
        )

    def check_weights(self, base: Parameters) -> None:
        """Checks that the weights are unchanged."""
        assert unequal(self.weights(), base) == []

    def check_pool(self, folder: Path, version: int) -> None:
        """Compares the pool with the exported adapters."""
        full = load_file(folder / f"adapter{version}" / TENSORS_FILE)
        full = {name.removeprefix("base_model.model."): values for name, values in full.items()}
        _, tp, ep, _ = ENGINES[self.name]
        spec = load_spec(self.checkpoint)
        sizes = GeneratorTopology(tp=tp, ep=ep)
        experts = spec.experts.count if spec.experts else 0
        for rank, tensors in enumerate(self.generator.memory()):
            of_layers = [expected_on(rank, full, sizes, layer, experts) for layer in range(LAYERS)]
            expected = {name: values for of_layer in of_layers for name, values in of_layer.items()}
            assert {name for name in tensors if is_adapter(name)} == expected.keys()
            assert all(
                torch.equal(tensors[name], expected[name].to(tensors[name].dtype))
                for name in expected
            )

    def check(self, folder: Path, version: int) -> None:
        self.check_pool(folder, version)
        self.check_scores(folder, version)


def empty_on(checkpoint: Path, config: LoraConfig, folder: Path) -> ServedAdapter:
    """The adapters with which an engine starts: none."""
    lora = Lora.of(config)
    assert lora is not None
    names = lora.names(load_spec(checkpoint))
    return ServedAdapter(str(empty_adapter(folder / "empty", lora, names)), lora.rank, names)


@pytest.fixture(scope="module", params=ENGINES)
def served(request, tmp_path_factory, key_file) -> Iterator[Served]:
    family, tp, ep, targets = ENGINES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    config = LoraConfig(rank=4, alpha=8.0, targets=targets)
    checkpoint = make_checkpoint(
        folder / "model", 1, torch.float32, False, family, num_hidden_layers=LAYERS
    )
    with open_generator(
        checkpoint, "float32", tp, ep, folder, adapter=empty_on(checkpoint, config, folder)
    ) as generator:
        generator.map_memory(key_file)
        yield Served(request.param, checkpoint, config, generator)


@dataclass
class Channel:
    """One channel from the trainer ranks to the engine."""

    generator: Generator
    end: WeightsReceiver
    granted: list[str]  # "F": everything, "d": only adapters

    def take(self) -> None:
        self.generator.take(self.end)


@pytest.fixture
def begin(
    served: Served, trainers: Trainers, key_file: Path, tmp_path: Path
) -> Callable[..., AbstractContextManager]:
    return partial(channels, served, trainers, key_file, tmp_path)


@contextlib.contextmanager
def channels(
    served: Served, trainers: Trainers, key_file: Path, folder: Path,
    layout: str, engines_of_hub: int, kinds: tuple[str, ...] = TRANSPORTS[:1], **fields: Any,
) -> Iterator[list[Channel]]:  # fmt: skip
    """Trainer ranks that send version after version: `each` versions by every transport in turn."""
    with trainers.kept(), contextlib.ExitStack() as stack:
        hubs = [
            stack.enter_context(contextlib.closing(Hub("generator.0", RunKey.load(key_file))))
            for _ in kinds
        ]
        places = [(kind, hub, place) for place, (kind, hub) in enumerate(zip(kinds, hubs))]
        syncs = [
            Sync(engines_of_hub * place + version, kind, hub.address)
            for kind, hub, place in places
            for version in range(engines_of_hub)
        ]
        job = served.job(folder, key_file, layout, syncs, **fields)
        trainers.begin(job)
        served.generator.set_version(-1)
        yield [_channel(served.generator, job, kind, hub) for kind, hub, _ in places]


def _channel(generator: Generator, job: Job, kind: str, hub: Hub) -> Channel:
    return Channel(generator, receiver(job.plan(kind), hub, job.key_file), noted_grants(hub))


@pytest.mark.parametrize("layout", ["TP1", "TP2", "TP4", "PP2", "EP2"])
def test_adapters_alone_reach_the_pool(layout: str, served: Served, begin, tmp_path: Path) -> None:
    if layout == "EP2" and not load_spec(served.checkpoint).experts:
        pytest.skip("a dense model has no experts")
    with begin(layout, EACH, TRANSPORTS, exports=EXPORTS) as ways:
        check_ways(ways, served, tmp_path)


@pytest.mark.sample
# the first of ENGINES, so that no other engine is started
@pytest.mark.parametrize("served", ["llama-TP1"], indirect=True)
def test_adapters_alone_reach_one_engine(served: Served, begin, tmp_path: Path) -> None:
    """The part that `make test` runs."""
    with begin("TP2", EACH, exports=EXPORTS[:EACH]) as ways:
        check_ways(ways, served, tmp_path)


def check_ways(ways: list[Channel], served: Served, folder: Path) -> None:
    """By each transport: everything, into noise, then two versions of only adapters."""
    base = None
    for place, channel in enumerate(ways):
        served.generator.set_version(EACH * place - 1)
        served.generator.scramble()
        for version in range(EACH * place, EACH * place + EACH):
            channel.take()
            served.check(folder, version)
            base = base or served.weights()
            served.check_weights(base)
        assert channel.granted == ["F", "d", "d"]


def test_many_updates_leave_the_weights_as_they_are(served: Served, begin, tmp_path: Path) -> None:
    with begin("TP1", MANY + 1, audit="strict", exports=[MANY]) as (channel,):
        channel.take()
        base = served.weights()
        for _ in range(MANY):
            channel.take()
    assert channel.granted == ["F", *"d" * MANY]
    served.check_weights(base)
    served.check(tmp_path, MANY)


def test_requests_run_through_an_update(served: Served, begin, tmp_path: Path) -> None:
    """Each token has the version that sampled it, and its log-prob under that version's merged
    weights.
    """
    generator = served.generator
    client = served.generator.client

    async def ask(tokens: int) -> list[Completion]:
        return await client.complete(
            [PROMPT], [Sampling(max_tokens=tokens, ignore_eos=True)], generator.version
        )

    async def ask_until(applied: asyncio.Event) -> list[Completion]:
        completions = []
        while not applied.is_set():
            completions += await ask(LONG)
        return completions

    async def take_meanwhile() -> list[Completion]:
        applied = asyncio.Event()
        asking = [asyncio.create_task(ask_until(applied)) for _ in range(3)]
        await ask(LONG // 10)  # sampled together with them, so they run by now
        await channel.end.take(generator)
        applied.set()
        return [completion for request in asking for completion in await request]

    with begin("TP1", 2, exports=[0, 1]) as (channel,):
        channel.take()
        completions = generator.run(take_meanwhile())
    assert channel.granted == ["F", "d"]
    assert any(set(response.versions) == {0, 1} for response in completions)
    models = [hf_model(tmp_path / f"export{version}", torch.float32) for version in (0, 1)]
    for completion in completions:
        tokens = [*PROMPT, *completion.token_ids]
        by_version = [hf_logprobs(model, tokens) for model in models]
        for place, (token, version, logprob) in enumerate(
            zip(completion.token_ids, completion.versions, completion.logprobs), len(PROMPT)
        ):
            assert abs(by_version[version][place - 1, token].item() - logprob) < 1e-4


def test_an_engine_that_comes_back_gets_the_weights_too(
    served: Served, begin, tmp_path: Path
) -> None:
    generator = served.generator
    client = served.generator.client
    generator.fleet = Fleet([client], elastic=True)
    with begin("TP1", 5, exports=[4]) as (channel,):
        channel.take()
        channel.take()
        generator.fleet.lose(EngineUnreachable(client.url, "reset by peer"))
        generator.fleet.come_back(generator.fleet.engines[0])
        for _ in range(3):
            channel.take()
    assert (
        channel.granted == ["F", "d", "F", "d", "d"]
        and generator.fleet.serving == generator.fleet.engines
    )
    served.check(tmp_path, 4)


def test_weights_that_change_between_updates_are_noticed(
    served: Served, begin, trainers: Trainers
) -> None:
    """Also without weights.audit=strict.

    This is the last test of an engine, because it leaves the engine paused.
    """
    with begin("TP1", 2) as (channel,):
        channel.take()
        served.generator.live[0]["model.layers.1.self_attn.o_proj.weight"][0, 0] += 1
        with pytest.raises(
            AuditError, match="model.layers.1.self_attn.o_proj.weight on generator rank 0"
        ):
            channel.take()
    trainers.restart()  # they wait for an answer


@pytest.mark.parametrize("experts", ["own", "shared"])
def test_adapters_of_experts_are_merged_on_cpus(
    experts: str, trainers: Trainers, key_file: Path, tmp_path: Path
) -> None:
    family, tp, ep, _ = ENGINES[EXPERTS]
    checkpoint = make_checkpoint(
        tmp_path / "model", 1, torch.float32, False, family, num_hidden_layers=LAYERS
    )
    with open_generator(checkpoint, "float32", tp, ep, tmp_path) as generator:
        served = Served(
            EXPERTS, checkpoint, LoraConfig(rank=4, alpha=8.0, experts=experts), generator
        )
        with channels(served, trainers, key_file, tmp_path, "EP2", 2, exports=[0, 1]) as (channel,):
            for version in range(2):
                channel.take()
                served.check_scores(tmp_path, version)
        assert channel.granted == ["F", "F"]
