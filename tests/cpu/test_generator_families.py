"""Direct writes into a live engine with fp8 experts, bit for bit against what SGLang itself loads from the same checkpoint."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from sglang_engine import Engine, hf_logprobs, hf_model, make_checkpoint, quantise_checkpoint, shares_of, start_engine, write_as_trainer
from sglang_writer import reshard_map

from megarl.messaging.link import Hub, RunKey
from megarl.generator.client import EngineClient, Sampling
from megarl.generator.update import WeightUpdate, Workers, check_layout, connect, describe, open_memory
from megarl.transports.base import Endpoint
from megarl.transports.shared_memory import view_at

Snapshot = list[dict[str, torch.Tensor]]  # by generator rank


@dataclass(frozen=True)
class Case:
    family: str
    tied: bool
    trainer: dict[str, int]
    tp: int
    ep: int = 1
    fp8_block: int = 0

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.fp8_block else "float32"


CASES = {
    "qwen3_moe-tp1-fp8": Case("qwen3_moe", False, {"tp": 2}, 1, fp8_block=16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_written_weights_equal_what_sglang_loads(case: Case, tmp_path: Path):
    old, new = (make_checkpoint(tmp_path / str(seed), seed, getattr(torch, case.dtype), case.tied, case.family) for seed in (1, 2))
    to_load = new
    if case.fp8_block:
        old, to_load = (quantise_checkpoint(each, each.with_suffix(".fp8"), case.fp8_block, in_fp8) for each in (old, new))
    key = RunKey.generate()
    key.save(tmp_path / "key")
    hub = Hub("generator.0", key)
    try:
        for engine in start_engine(old, case.dtype, case.tp, tmp_path / "engine.0.log", case.ep):
            asyncio.run(write_and_compare(engine, hub, case, new, to_load, tmp_path / "key"))
    finally:
        hub.close()


async def write_and_compare(engine: Engine, hub: Hub, case: Case, new: Path, to_load: Path, key_file: Path) -> None:
    client = engine.client()
    await client.wait_ready(180, engine.log, engine.died)
    workers = Workers([client], case.tp, hub, 60)
    map = reshard_map(new, case.dtype, case.trainer, case.tp, case.ep, case.fp8_block)
    await client.begin_update(60)
    await connect(workers, str(key_file))
    check_layout(await describe(workers), map.destination)
    endpoints = await open_memory(workers, "shared_memory", map)
    await client.end_update(60)
    live = [parameters(endpoint) for endpoint in endpoints]

    scramble(live)
    await client.load_from_disk(str(to_load), 60)
    await client.begin_update(60)  # its barrier: SGLang answers a load as soon as rank 0 is done
    await client.end_update(60)
    loaded = [{name: values.clone() for name, values in of_rank.items()} for of_rank in live]

    scramble(live)
    encoded = [endpoint.encode() for endpoint in endpoints]
    writers = write_as_trainer("shared_memory", new, case.dtype, case.trainer, case.tp, encoded, case.ep, case.fp8_block)
    session = WeightUpdate(workers)
    await session.open()
    await session.audit(shares_of(writers), map)
    await session.close(1)
    for rank, tensors in enumerate(live):
        assert tensors.keys() == loaded[rank].keys()
        for name, values in tensors.items():
            assert torch.equal(values.view(torch.uint8), loaded[rank][name].view(torch.uint8)), f"{name} on rank {rank}"
    await compare_with_hf(client, new, tolerance=0.2 if case.fp8_block else 1e-5)
    await client.close()


def in_fp8(name: str) -> bool:
    return name.endswith("_proj.weight")


def scramble(live: Snapshot) -> None:
    for of_rank in live:
        for values in of_rank.values():
            values.view(torch.uint8).random_(0, 120)


async def compare_with_hf(client: EngineClient, new: Path, tolerance: float) -> None:
    prompt = [1] + [3 + 7 * i for i in range(12)]
    [completion] = await client.generate(prompt, Sampling(max_tokens=4, temperature=0.0, ignore_eos=True))
    reference = hf_logprobs(hf_model(new, torch.float32), prompt + completion.token_ids)[len(prompt) - 1 :]
    expected = reference.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert (torch.tensor(completion.logprobs) - expected).abs().max() < tolerance
    assert completion.versions == [1] * 4


def parameters(endpoint: Endpoint) -> dict[str, torch.Tensor]:
    storage = torch.UntypedStorage.from_file(endpoint.address, shared=True, nbytes=endpoint.size_bytes)
    return {tensor.name: view_at(storage, tensor) for tensor in endpoint.tensors}
