"""Between two updates, something else writes to a live engine's memory: the run ends, and the
message names tensor and rank.

The tensors here are a scale, a router's bias, and a tensor that post-load work made from a
parameter. The engine is in fp8, a mixture of experts with latent attention. test_weights_faults.py
has parameters and rotary caches.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest
import torch
from held_weights import as_thread
from pokes import poke
from sglang_engine import make_checkpoint
from test_weights_fp8 import OF_FAMILY, SHAPE
from weights_rig import Generator, open_generator, receiver
from weights_worker import DEADLINE_S, Job, Sync

from megarl.generator.completions import EngineError
from megarl.generator.hooks import server_arguments
from megarl.messaging.link import Hub, RunKey
from megarl.messaging.messages import WeightsApplied, WeightsGrant
from megarl.weight_sync.audit import AuditError

FAMILY = "deepseek_v3"
QUANTIZATION = "fp8_block"
CHANGES = {  # tensor, weights.audit
    "a scale": ("model.layers.1.self_attn.o_proj.weight_scale_inv", "strict"),
    "a router's bias": ("model.layers.1.mlp.gate.e_score_correction_bias", "strict"),
    "what post-load work made of a parameter": ("model.layers.0.self_attn.w_kc", "on"),
}


@dataclass
class MemorySite:
    folder: Path
    checkpoint: Path
    generator: Generator
    key_file: Path

    def update(self, version: int, audit: str, after: Callable[[], None] | None = None) -> None:
        """One update, with its own trainer and channel. Then `after` happens, and the run ends."""
        begin = Event()
        begin.set()
        with contextlib.closing(Hub("generator.0", RunKey.load(self.key_file))) as hub:
            job = Job(
                model=str(self.checkpoint),
                dtype="float32",
                trainer={},
                tp=1,
                ep=1,
                syncs=[Sync(version, "shared_memory", hub.address)],
                key_file=str(self.key_file),
                port=0,
                folder=str(self.folder),
                quantization=QUANTIZATION,
                weights_s=30.0,
                audit=audit,
            )
            sent = as_thread(0, job, begin)
            try:
                end = receiver(job.plan("shared_memory"), hub, job.key_file)
                self.generator.take(end)
            except AuditError:
                # one of these messages ends the trainer's wait
                for message in (WeightsGrant(99), WeightsApplied(99, True, 0.0, 0)):
                    # the first message may already have ended it
                    with contextlib.suppress(RuntimeError):
                        hub.send("trainer.0", message)
                assert sent.exception(DEADLINE_S) is not None
                raise
            sent.result(DEADLINE_S)
            if after is not None:
                after()
                self.generator.run(end.look_again(self.generator))

    async def reopen(self) -> None:
        """Makes the engine continue after a failed update."""
        await self.generator.client.close()
        self.generator.use(self.generator.engine.client())
        with contextlib.suppress(EngineError):
            await self.generator.client.end_update(DEADLINE_S)
        await self.generator.client.resume(DEADLINE_S)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[MemorySite]:
    folder = tmp_path_factory.mktemp("memory")
    RunKey.generate().save(folder / "key")
    checkpoint = make_checkpoint(
        folder / "model", 1, torch.float32, False, FAMILY, **SHAPE | OF_FAMILY[FAMILY]
    )
    shutil.copytree(checkpoint, folder / "config", ignore=shutil.ignore_patterns("*.safetensors"))
    with open_generator(
        folder / "config", "bfloat16", 1, 1, folder, **server_arguments(QUANTIZATION)
    ) as generator:
        yield MemorySite(folder, checkpoint, generator, folder / "key")


def test_change_after_the_last_update_is_reported(site):
    """No later update would detect it.

    First comes an end without a change, after which the engine serves.
    """
    generator = site.generator
    version = generator.version + 1
    site.update(version, "strict", after=lambda: None)
    generator.score([[1, 2, 3]])
    for name, again in [
        (CHANGES["a scale"][0], True),
        (CHANGES["what post-load work made of a parameter"][0], False),
    ]:
        version += 1
        with pytest.raises(AuditError) as failure:
            site.update(
                version, "strict", after=lambda name=name: poke(generator, site.folder, name)
            )
        message = (
            f"{name} on generator rank 0 of engine {generator.client.url} has changed since "
            f"the audit of version {version}"
        )
        assert str(failure.value).splitlines()[1:] == [message]
        generator.run(site.reopen())  # this repeats the post-load work
        if again:
            poke(generator, site.folder, name)


@pytest.mark.parametrize("name, audit", CHANGES.values(), ids=CHANGES)
def test_a_change_is_told(site, name, audit):
    generator = site.generator
    version = generator.version + 1
    site.update(version, "on")
    poke(generator, site.folder, name)
    with pytest.raises(AuditError) as failure:
        site.update(version + 1, audit)
    message = (
        f"{name} on generator rank 0 of engine {generator.client.url} has changed since the "
        f"audit of version {version}"
    )
    assert str(failure.value).splitlines()[1:] == [message]
    generator.run(site.reopen())
    poke(generator, site.folder, name)  # restores it
