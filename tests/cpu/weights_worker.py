"""One trainer rank of test_weights_end_to_end.py: the real executor and weights channels, one job after another in one process.

    weights_worker.py RANK        jobs come as JSON, one a line, on standard input; its end is the end

A job: load an HF checkpoint, send version 0 to every engine, take one optimizer step, send version 1, export.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import torch

from megarl.messaging.link import Peer, RunKey
from megarl.config.schema import (
    GeneratorConfig,
    ModelConfig,
    ObserveConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    TimeoutConfig,
    TrainerConfig,
    WeightsConfig,
)
from megarl.launch.rendezvous import Rendezvous
from megarl.launch.worker import die_with_parent
from megarl.plan.resolve import RunPlan, resolve
from megarl.types import Batch, Group, Prompt, Sample

DEADLINE_S = 90.0


class Job(msgspec.Struct, frozen=True):
    model: str  # HF checkpoint that the trainer starts from
    dtype: str
    topology: dict[str, int]
    transport: str
    hubs: dict[int, str]  # generator tp → where that engine's generator listens
    key_file: str
    port: int  # where torch.distributed meets
    folder: str

    @property
    def export(self) -> Path:
        return Path(self.folder) / "export"

    def plan(self, tp: int) -> RunPlan:
        """The run of these trainer ranks with one engine of `tp` ranks."""
        config = RunConfig(
            model=ModelConfig(path=self.model, dtype=self.dtype),
            # Large enough for every tensor to change in bfloat16 too.
            trainer=TrainerConfig(**self.topology, optimizer=OptimizerConfig(lr=0.02)),
            generator=GeneratorConfig(tp=tp),
            rollout=RolloutConfig(max_tokens=32),
            weights=WeightsConfig(transport=self.transport),
            observe=ObserveConfig(probe_every=0, tensorboard=False),
            timeouts=TimeoutConfig(rendezvous_s=DEADLINE_S, rollouts_s=DEADLINE_S, weights_s=DEADLINE_S, request_s=DEADLINE_S),
            run_dir=self.folder,
        )
        return resolve(config)


def batch(groups: int = 4, samples: int = 2) -> Batch:
    """Prompts and responses of different lengths; within each group one sample is rewarded."""

    def sample(group: int, index: int) -> Sample:
        length = 3 + 2 * group + index
        tokens = [(310 * group + 170 * index + 77 * t) % 500 for t in range(length)]
        return Sample(tokens, [-6.0] * length, [0] * length, "", float(index), "length")

    return Batch(
        step=0,
        groups=[
            Group(Prompt(g, [(130 * g + 57 * t) % 500 for t in range(2 + g)], "", ""), [sample(g, i) for i in range(samples)])
            for g in range(groups)
        ],
        generate_s=0.0,
        generator_wait_s=0.0,
    )


def work(rank: int, job: Job) -> None:
    from megarl.channels.weights_sender import WeightsSender
    from megarl.executors.trainer import TrainerExecutor

    plans = {tp: job.plan(tp) for tp in job.hubs}
    topology = next(iter(plans.values())).trainer_topology
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(topology.world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job.port))
    key = RunKey.load(Path(job.key_file))
    links = {tp: Peer(f"trainer.{rank}", key, address) for tp, address in job.hubs.items()}
    senders = [WeightsSender(plan, links[tp]) for tp, plan in plans.items()]
    rendezvous = Rendezvous("", 0, job.key_file, [], [], "", "", start_step=0, checkpoint="")
    executor = TrainerExecutor(next(iter(plans.values())), rank, rendezvous)
    executor.init()
    for version in (0, 1):
        if version:
            executor.put_batch(batch(), waited_s=0.0)
            executor.step()
        for sender in senders:
            sender.send(executor)
    executor.trainer.export_hf(str(job.export), job.model)
    executor.shutdown()
    for end in [*senders, *links.values()]:
        end.close()
    print(f"{job.folder}: done", flush=True)


def main() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    from megarl.trainer import cpu_support

    cpu_support.install()
    for line in sys.stdin:
        work(int(sys.argv[1]), msgspec.json.decode(line, type=Job))


if __name__ == "__main__":
    main()
