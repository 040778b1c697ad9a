"""Direct writes into live engines at TP1 and TP2, bit for bit against what SGLang itself loads from the same checkpoint.

Trainer ranks are processes that hold shards cut by the trainer layout; engine memory is read through the test's own mapping.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sglang_engine import hf_logprobs, hf_model, make_checkpoint, shares_of, start_engine, write_as_trainer
from sglang_writer import reshard_map

from megarl.messaging.link import Hub, RunKey
from megarl.config.errors import ConfigError
from megarl.generator.client import Sampling
from megarl.generator.update import WeightUpdate, Workers, check_layout, connect, describe, open_memory
from megarl.reshard.audit import hash_tensor
from megarl.transports.base import Endpoint
from megarl.transports.mooncake import open_engine
from megarl.transports.shared_memory import view_at


try:
    open_engine("127.0.0.1", "tcp", 60)
    HAS_MOONCAKE = True
except ConfigError:  # test_transports_mooncake.py is skipped with the reason
    HAS_MOONCAKE = False


@dataclass(frozen=True)
class Case:
    tp: int  # of the engine
    dtype: str
    tied: bool
    shared_memory: dict[str, int]  # trainer topology that writes by shared memory
    gloo: dict[str, int]
    mooncake: dict[str, int]


CASES = [
    Case(1, "float32", False, shared_memory={"tp": 2}, gloo={"dp": 2}, mooncake={"tp": 2}),
    Case(2, "bfloat16", True, shared_memory={"pp": 2}, gloo={"tp": 2}, mooncake={"tp": 1}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"tp{case.tp}-{case.dtype}-{'tied' if case.tied else 'untied'}")
def test_written_weights_equal_what_sglang_loads(case, tmp_path):
    dtype = getattr(torch, case.dtype)
    old, new = (make_checkpoint(tmp_path / str(seed), seed, dtype, case.tied) for seed in (1, 2))
    key = RunKey.generate()
    key.save(tmp_path / "key")
    hub = Hub("generator.0", key)
    try:
        for engine in start_engine(old, case.dtype, case.tp, tmp_path / "engine.0.log"):
            asyncio.run(write_and_compare(engine, hub, tmp_path, case, new))
    finally:
        hub.close()


async def write_and_compare(engine, hub: Hub, folder, case: Case, new) -> None:
    client = engine.client()
    await client.wait_ready(180, engine.log, engine.died)
    workers = Workers([client], case.tp, hub, 60)
    by_shared_memory = reshard_map(new, case.dtype, case.shared_memory, case.tp)
    by_gloo = reshard_map(new, case.dtype, case.gloo, case.tp)
    by_mooncake = reshard_map(new, case.dtype, case.mooncake, case.tp)
    await client.begin_update(60)
    await connect(workers, str(folder / "key"))
    check_layout(await describe(workers), by_gloo.destination)
    mapped = await open_memory(workers, "shared_memory", by_shared_memory)
    met = await open_memory(workers, "gloo", by_gloo)
    registered = await open_memory(workers, "mooncake", by_mooncake) if HAS_MOONCAKE else []
    await client.end_update(60)
    live = [parameters(endpoint) for endpoint in mapped]

    def scramble() -> None:
        for of_rank in live:
            for values in of_rank.values():
                values.view(torch.uint8).random_(0, 120)

    async def update(kind: str, topology: dict[str, int], endpoints: list[Endpoint], map: Any, version: int) -> list[dict]:
        scramble()
        writers = write_as_trainer(kind, new, case.dtype, topology, case.tp, [endpoint.encode() for endpoint in endpoints])
        session = WeightUpdate(workers)
        await session.open()
        if kind == "gloo":
            await session.receive()
        shares = shares_of(writers)
        if kind == "mooncake":
            await session.spread()
        await session.audit(shares, map)
        await session.close(version)
        return [{name: values.clone() for name, values in of_rank.items()} for of_rank in live]

    scramble()
    await client.load_from_disk(str(new), 60)
    await client.begin_update(60)  # its barrier: SGLang answers a load as soon as rank 0 is done
    await client.end_update(60)
    loaded = [{name: values.clone() for name, values in of_rank.items()} for of_rank in live]
    written = {
        "shared_memory": await update("shared_memory", case.shared_memory, mapped, by_shared_memory, 1),
        "gloo": await update("gloo", case.gloo, met, by_gloo, 2),
    }
    if HAS_MOONCAKE:
        assert any(endpoint.landings for endpoint in registered) == (case.tp == 1)  # column slices, where two ranks fill a row
        written["mooncake"] = await update("mooncake", case.mooncake, registered, by_mooncake, 2)
    for kind, ranks in written.items():
        for rank, tensors in enumerate(ranks):
            assert tensors.keys() == loaded[rank].keys()
            for name, values in tensors.items():
                assert same_bits(values, loaded[rank][name]), f"{kind}: {name} on rank {rank}"
                assert hash_tensor(values) == hash_tensor(loaded[rank][name])
    await compare_with_hf(client, case, new)
    await client.close()


async def compare_with_hf(client, case: Case, new) -> None:
    """The engine computes with what was written: rotary caches, padding and tied heads are right as well."""
    prompt = [1] + [3 + 7 * i for i in range(12)]
    [completion] = await client.generate(prompt, Sampling(max_tokens=4, temperature=0.0, ignore_eos=True))
    reference = hf_logprobs(hf_model(new, getattr(torch, case.dtype)), prompt + completion.token_ids)[len(prompt) - 1 :]
    expected = reference.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    tolerance = 3e-6 if case.dtype == "float32" else 0.06
    assert (torch.tensor(completion.logprobs) - expected).abs().max() < tolerance
    assert completion.versions == [2] * 4


def parameters(endpoint: Endpoint) -> dict[str, torch.Tensor]:
    storage = torch.UntypedStorage.from_file(endpoint.address, shared=True, nbytes=endpoint.size_bytes)
    return {tensor.name: view_at(storage, tensor) for tensor in endpoint.tensors}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
