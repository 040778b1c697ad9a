"""One trainer rank of the tests of weight updates: the real executor and weights channels, one job
after another in one process.

    weights_worker.py RANK        reads jobs as JSON, one a line, from standard input, and ends with it

A job loads an HF checkpoint, and then makes one update after another, each over its own transport
and channel. Before the first update to version 1 come an optimizer step and an export.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from batches import batch_of

from megarl.base.rollout_types import Batch, Group, Prompt, Sample
from megarl.config.schema import (
    AsyncConfig,
    DataConfig,
    GeneratorConfig,
    MixtureConfig,
    ModelConfig,
    ObserveConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    TimeoutConfig,
    TrainerConfig,
    WeightsConfig,
)
from megarl.launch.worker import die_with_parent
from megarl.lora.settings import LoraConfig
from megarl.messaging.link import Peer, RunKey
from megarl.messaging.rendezvous import Rendezvous
from megarl.plan.resolve import RunPlan, resolve
from megarl.speculative.settings import SpeculativeConfig

DEADLINE_S = 90.0
WAITS = ("rendezvous_s", "rollouts_s", "request_s")  # timeouts besides those of an update


class Sync(msgspec.Struct, frozen=True):
    """One update of the engine."""

    version: int
    transport: str
    hub: str  # address of its receiving end


class Job(msgspec.Struct, frozen=True):
    model: str  # HF checkpoint that the trainer starts from
    dtype: str
    trainer: dict[str, Any]  # TrainerConfig's: sizes
    tp: int  # of the engine
    ep: int
    syncs: list[Sync]
    key_file: str
    port: int  # of torch.distributed's rendezvous
    folder: str
    dp_attention: int = 1  # of the engine
    quantization: str | None = None  # of the engine
    weights_s: float = DEADLINE_S  # for each part of an update
    audit: str = "on"  # not strict: most tests fill the engine's memory with noise
    changing: float = 0.0  # share of the held weights' elements that changes between versions
    lora: dict[str, Any] = {}  # LoraConfig's
    # versions to export, each to a folder of its own; None: all, to `export`
    exports: list[int] | None = None
    delta: str = ""  # weights.delta; "": auto if something is `changing`
    speculative: dict[str, Any] = {}  # SpeculativeConfig's
    lr: float = 0.02  # large enough that every tensor changes in bfloat16 too

    @property
    def export(self) -> Path:
        return Path(self.folder) / "export"

    def plan(self, transport: str = "auto") -> RunPlan:
        """The plan of a run with these trainer ranks and one such engine."""
        config = RunConfig(
            model=ModelConfig(path=self.model, dtype=self.dtype),
            data=DataConfig(train=MixtureConfig(source="synthetic:chain")),
            trainer=TrainerConfig(**self.trainer, optimizer=OptimizerConfig(lr=self.lr)),
            generator=GeneratorConfig(
                tp=self.tp,
                ep=self.ep,
                dp_attention=self.dp_attention,
                quantization=self.quantization,
                speculative=SpeculativeConfig(**self.speculative),
            ),
            rollout=RolloutConfig(max_tokens=32),
            # after an update a request has only keys and values of the new weights
            async_=AsyncConfig(partial_rollout="retract"),
            lora=LoraConfig(**self.lora),
            weights=WeightsConfig(
                transport=transport,
                audit=self.audit,
                delta=self.delta or ("auto" if self.changing else "off"),
            ),
            observe=ObserveConfig(probe_every=0, rollouts_per_step=0),
            timeouts=TimeoutConfig(
                **dict.fromkeys(WAITS, DEADLINE_S),
                collective_s=DEADLINE_S + 1,
                weights_s=self.weights_s,
            ),
            run_dir=self.folder,
        )
        return resolve(config)


def batch(groups: int = 4, samples: int = 2) -> Batch:
    """Prompts and responses of different lengths; within each group one sample is rewarded."""

    def sample(group: int, index: int) -> Sample:
        length = 3 + 2 * group + index
        tokens = [(310 * group + 170 * index + 77 * t) % 500 for t in range(length)]
        return Sample(tokens, [-6.0] * length, [0] * length, "", float(index), "length")

    prompts = [
        Prompt(g, [(130 * g + 57 * t) % 500 for t in range(2 + g)], "", "") for g in range(groups)
    ]
    return batch_of(
        [Group(prompt, [sample(g, i) for i in range(samples)]) for g, prompt in enumerate(prompts)]
    )


def rendezvous(job: Job) -> Rendezvous:
    """The part of a rendezvous that a trainer rank needs.

    There is no launcher, and another process has the engine.
    """
    return Rendezvous(
        hub_host="",
        hub_ports={},
        key_file=job.key_file,
        trainer_host="127.0.0.1",
        trainer_port=job.port,
        engines={},
        engine_key="",
        engine_admin_key="",
        start_step=0,
        checkpoint="",
    )


def work(rank: int, job: Job) -> None:
    from megarl.executors.trainer import TrainerExecutor
    from megarl.lora.trainer import LoraTrainer
    from megarl.weight_sync.sender import WeightsSender

    plan = job.plan()
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(plan.trainer_topology.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
    )
    key = RunKey.load(Path(job.key_file))
    executor = TrainerExecutor(plan, rank, rendezvous(job))
    executor.init()
    links: list[Peer] = []
    senders: dict[str, WeightsSender] = {}
    for sync in job.syncs:
        while executor.version < sync.version:
            executor.put_batch(batch(), waited_s=0.0)
            executor.step()
            if job.exports is None:
                executor.trainer.export_hf(str(job.export), job.model)
        if isinstance(executor.trainer, LoraTrainer) and sync.version in (job.exports or ()):
            executor.trainer.export_hf(f"{job.folder}/export{sync.version}", job.model)
            executor.trainer.export_adapter(f"{job.folder}/adapter{sync.version}")
        if sync.hub not in senders:
            links.append(Peer(f"trainer.{rank}", key, sync.hub))
            senders[sync.hub] = WeightsSender(job.plan(sync.transport), links[-1])
        senders[sync.hub].send(executor)
    check_deadlines(plan)
    for end in [*senders.values(), *links]:
        end.close()
    executor.shutdown()


def check_deadlines(plan: RunPlan) -> None:
    """Checks the deadline of every process group of this rank: an exchange of amax has an update's,
    all others the trainer's.
    """
    timeouts = plan.config.timeouts
    allowed = {"amax": timeouts.weights_s}
    errors = {}
    for group in dist.distributed_c10d._world.pg_map:
        backend = group._get_backend(torch.device("cpu"))
        errors[group.group_desc, group.group_name] = backend.options._timeout.total_seconds()
    wrong = {
        name: s for name, s in errors.items() if s != allowed.get(name[0], timeouts.collective_s)
    }
    assert len(errors) > 10 and not wrong, (
        f"of {len(errors)} groups these do not have timeouts.collective_s={timeouts.collective_s}: "
        f"{wrong}"
    )


def main(rank: int) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    from megarl.trainer import cpu_support

    cpu_support.install()
    import megarl.executors.trainer  # noqa: F401

    for line in sys.stdin:
        if in_a_child_of_its_own(rank, msgspec.json.decode(line, type=Job)) != 0:
            raise SystemExit(1)


def in_a_child_of_its_own(rank: int, job: Job) -> int:
    """Runs in a child process, and returns its exit status: Megatron's groups outlive their
    destruction, and every gloo group polls a hundred times a second.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        die_with_parent()
        work(rank, job)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]))
