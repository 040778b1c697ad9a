"""One rank of a run's trainer on a pretended GPU: it is built, scores a batch, makes optimizer
steps, and returns its weights and state.

    python tests/rehearsal/rank.py CONFIG [--rank N] [--layers N] [--json FILE] [dotted.key=value …]

With `--layers` a pipeline stage keeps only that many of its layers. Exit status 1 if something is
wrong, such as a tensor on the wrong device; or if the rank, with all layers, takes over 5 % more
memory than planned.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))
import pretended_cuda
from pretended_cuda import GIB, ROOT, HostEvent, Record

if TYPE_CHECKING:
    from megarl.plan.resolve import RunPlan
    from megarl.trainer.step import MegatronTrainer


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plant", metavar="NAME", help="a fault of planted.py")
    options = parser.parse_intermixed_args(arguments)
    if shutil.which(compiler := os.environ.get("CC", "cc")) is None:
        parser.error(
            f"there is no C compiler {compiler}, which makes the driver that is pretended: "
            "install gcc, or set CC"
        )
    pretended_cuda.preload()
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megarl.config.load import load_config
    from megarl.plan.resolve import resolve

    plan = resolve(load_config(options.config, options.overrides))
    if options.layers:
        plan = with_layers(plan, options.layers)
    rank = options.rank % plan.trainer_topology.world_size
    record = Record()
    pretended_cuda.pretend(record)
    import te_extension

    te_extension.install()
    dist.init_process_group(
        "fake", rank=rank, world_size=plan.trainer_topology.world_size, store=FakeStore()
    )
    with pretended_cuda.rehearsing(record):
        try:
            if options.plant:
                import planted

                getattr(planted, options.plant)()
            report = rehearse(plan, record, options.microbatches)
        except Exception:
            traceback.print_exc()
            print(
                f"rank {rank} of {options.config}: {innermost(sys.exc_info()[2])}", file=sys.stderr
            )
            return 1
    report |= {"config": options.config, "rank": rank, "ranks": plan.trainer_topology.world_size}
    if not options.layers:
        report |= {"shared": shared(plan, report)}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    show(report)
    problems = [] if options.layers else overruns(report)
    print(*problems, sep="\n", end="\n" * bool(problems))
    return int(bool(problems))


def overruns(report: dict[str, Any]) -> list[str]:
    """The parts, or the step, that take over 5 % more memory than planned.

    The runtime's own memory is left out.
    """
    planned = report["plan"] | {
        "a step": sum(size for name, size in report["plan"].items() if name != "runtime")
    }
    sizes = report["parts"] | {"a step": report["phases"]["step"]["peak_gib"]}
    return [
        f"{name} takes {size:.2f} GiB, planned {planned[name]:.2f}"
        for name, size in sizes.items()
        if size > 1.05 * planned[name]
    ]


def with_layers(plan: RunPlan, layers: int) -> RunPlan:
    spec = plan.spec
    topology = plan.trainer_topology
    experts = spec.experts
    if experts:
        experts = dataclasses.replace(experts, first_layer=min(experts.first_layer, layers))
    spec = dataclasses.replace(spec.cut(layers * topology.pp * topology.vpp), experts=experts)
    even = {"first_stage_layers": None, "last_stage_layers": None}
    config = dataclasses.replace(
        plan.config, trainer=dataclasses.replace(plan.config.trainer, **even)
    )
    return dataclasses.replace(
        plan, spec=spec, trainer_topology=dataclasses.replace(topology, **even), config=config
    )


def innermost(trace: Any) -> str:
    """file:line of MegaRL's innermost frame in a traceback."""
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if frame.filename.startswith(f"{ROOT}/megarl/") or f"{ROOT}/kernels/" in frame.filename
    ]
    return (
        f"{frames[-1].filename.removeprefix(f'{ROOT}/')}:{frames[-1].lineno}"
        if frames
        else "outside MegaRL"
    )


def rehearse(plan: RunPlan, record: Record, microbatches: int) -> dict[str, Any]:
    from megarl.algorithms.registry import make_algorithm
    from megarl.executors.batch_steps import BatchSteps
    from megarl.executors.policy import make_policy
    from megarl.trainer import checkpoint
    from megarl.trainer.step import StepResult

    StepResult.check_tokens = lambda self, expected: None  # fake tensors have no sums
    phases: dict[str, Any] = {}

    @contextlib.contextmanager
    def phase(name: str, count: int = 1) -> Iterator[None]:
        record.take()
        before = record.held_bytes
        started = time.monotonic()
        yield
        phases[name] = {
            "peak_gib": record.peak_bytes / GIB, "peak_at": record.peak_at,
            "held_gib": record.held_bytes / GIB,
            "before_gib": before / GIB, "s": time.monotonic() - started, "microbatches": count,
            "events": table(record.take()),
        }  # fmt: skip

    config = plan.config
    with phase("build"):
        trainer = make_policy(plan, config.max_steps)
    parts = resident_bytes(trainer)
    batch = made_batch(plan, microbatches)
    steps = BatchSteps(trainer, make_algorithm(config.algorithm), config)
    sequences = list(steps._cut(batch)[0].values())
    count = len(trainer._plan(sequences))
    tell_routing()
    tell_sums()
    for name in ("first step", "step"):
        with phase(name, count):
            steps.train(batch)
    with phase("score", count):
        trainer.token_logprobs(sequences, config.rollout.temperature)
    with phase("checkpoint"):
        for box in checkpoint.shared_boxes(trainer, checkpoint.SAVED):
            box.copied()
    with phase("hash the state"):
        checkpoint.totals(trainer, checkpoint.live_boxes(trainer))
    weigh_update(plan, trainer, phase)
    return {
        "phases": phases,
        "parts": {name: size / GIB for name, size in parts.items()},
        "plan": planned(plan, trainer),
    }


def weigh_update(plan: RunPlan, trainer: MegatronTrainer, phase: Any) -> None:
    """A full weight update and a delta update: amax, payloads and their hashes for the audit, the
    kept copy, the changes.
    """
    from megarl.reshard.execute import AmaxTable, Payloads, amax_parts
    from megarl.reshard.schedule import scheduled_writes
    from megarl.trainer.cpu_support import layer_spec
    from megarl.weight_sync.content import sent_layout, weights_map
    from megarl.weight_sync.writing import Deltas, send, send_changes

    map = weights_map(plan, sent_layout(plan, trainer.layout, layer_spec()))
    rank = trainer.topology.rank(trainer.coordinate)
    deltas = Deltas(plan.config.weights)
    payloads = Payloads()
    copies = scheduled_writes(map, rank)
    model = trainer.sent_parameters()
    ranks = {copy.destination_rank for copy in copies}
    shapes = {
        rank: {tensor.name: tensor.shape for tensor in map.destination.tensors(rank)}
        for rank in ranks
    }
    with phase("amax"):
        amax = AmaxTable.measure(amax_parts(map, rank), model)
    with phase("update"):
        send(DiscardedChanges(), copies, model, shapes, True, amax, payloads)
        deltas.keep(1, copies, amax, payloads, False)
    if not deltas.on:
        return
    tell_changes()
    with phase("changes"):
        payloads.begin(model)
        changes = deltas.find(1, copies, shapes, True, amax, payloads)
        assert changes is not None
    with phase("send changes"):
        send_changes(DiscardedChanges(), changes, 2, model)
        deltas.keep_changes(2, changes)


class DiscardedChanges:
    """A transport that sends nothing."""

    def prepare(self, sources: Iterable[Any]) -> None: ...

    def write(self, copy: Any, values: Any) -> None:
        assert values.device.type == "cuda", (
            f"{copy.destination_tensor}: a GPU sends from its own memory alone"
        )

    def write_changes(self, rank: int, changes: Any, version: int) -> None: ...

    def fence(self) -> None: ...


def made_batch(plan: RunPlan, microbatches: int) -> Any:
    """Rollouts of random lengths that fill `microbatches` microbatches of every data-parallel rank."""
    import numpy as np

    from megarl.base.rollout_types import Batch, GroupSummary, SampleNumbers, SampleSummary

    rng = np.random.default_rng(0)
    config = plan.config
    prompt = config.plan.prompt_tokens
    longest = config.trainer.max_tokens_per_microbatch
    tokens_to_draw = plan.trainer_topology.dp * microbatches * longest * 0.93
    groups = []
    numbers = {}
    while tokens_to_draw > 0:
        samples = []
        for place in range(config.rollout.n):
            length = int(
                np.clip(
                    rng.exponential(config.plan.response_tokens),
                    8,
                    min(config.rollout.max_tokens, longest - prompt),
                )
            )
            numbers[len(numbers)] = SampleNumbers(
                rng.integers(0, plan.spec.vocab_size, prompt, np.int32),
                rng.integers(0, plan.spec.vocab_size, length, np.int32),
                np.zeros(length, np.float32), None, b"", None,
            )  # fmt: skip
            samples.append(SampleSummary(length, [(0, length)], 1, float(place % 2), "stop"))
            tokens_to_draw -= prompt + length - 1
        groups.append(GroupSummary(len(groups), prompt, samples))
    return Batch(1, groups, 0.0, 0.0, numbers=numbers)


def resident_bytes(trainer: MegatronTrainer) -> dict[str, int]:
    """The bytes of the rank's weights, gradients and optimizer, over distinct storages."""
    from megarl.trainer.fully_sharded import local_shard

    def total(tensors: Iterable[Any], without: set[int] = frozenset()) -> tuple[int, set[int]]:
        sizes = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for t in tensors
            if t.device.type == "cuda"
        }
        return sum(size for key, size in sizes.items() if key not in without), {*sizes}

    weights, keys = total(
        trainer.live_weights(p) for chunk in trainer.chunks for p in chunk.parameters()
    )
    adams = [
        part.optimizer
        for part in trainer.optimizer.chained_optimizers
        if part.optimizer is not None
    ]
    masters = [p for adam in adams for group in adam.param_groups for p in group["params"]]
    moments = [
        adam.state[p][name]
        for adam in adams
        for p in adam.state
        for name in ("exp_avg", "exp_avg_sq")
    ]
    optimizer, _ = total(map(local_shard, [*masters, *moments]), keys)
    if trainer.trained_zero == 3:  # the first backward pass makes them
        gradients = sum(local_shard(master).nbytes for master in masters)
    else:
        buffers = [
            buffer
            for chunk in trainer.ddp
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        gradients, _ = total(buffer.grad_data for buffer in buffers)
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer}


def planned(plan: RunPlan, trainer: MegatronTrainer) -> dict[str, float]:
    """The GiB of each part of this rank's stage, by `megarl plan`."""
    from megarl.estimate.hardware import GPUS
    from megarl.estimate.memory import stage_memory
    from megarl.lora.estimate import adapter_elements

    config = plan.config
    gpu = GPUS[plan.config.cluster.gpu]
    adapters = adapter_elements(config, plan.spec, config.trainer, gpu.device)
    memory = stage_memory(
        plan.spec, config.trainer, config.model.dtype, gpu, adapter_elements=adapters
    )[trainer.coordinate.pp]
    return {name: size / GIB for name, size in vars(memory).items()}


def shared(plan: RunPlan, report: dict[str, Any]) -> dict[str, float]:
    """GiB of both sides on a GPU that they share: the rehearsed peak of the trainer beside the
    planned engine, and all as planned. Empty if the sides are apart.
    """
    from megarl.estimate.estimate import estimate

    if not plan.config.cluster.share_gpus:
        return {}
    planned_run = estimate(plan.config, plan.spec)
    peak = report["phases"]["step"]["peak_gib"]
    runtime = planned_run.trainer.runtime / GIB
    engine = planned_run.generator.total / GIB
    return {
        "rehearsed": peak + runtime + engine,
        "planned": planned_run.fullest.gpu_total / GIB,
        "engine": engine,
        "gpu": planned_run.cluster.gpu.memory_gib,
    }


def tell_sums() -> None:
    """Gives the sums of a step, which the last stage sends to the others."""
    from megarl.trainer import parallel, step

    sums = parallel.global_sums
    nothing = dict.fromkeys(("loss", step.ENTROPY, step.ENTROPY_TOKENS, step.POSITIONS), 0.0)
    parallel.global_sums = lambda *args: sums(*args) or {**nothing}


def tell_routing() -> None:
    """Gives the numbers of tokens of each expert and for each rank, which the host reads.

    Here every expert has the same number.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    read = MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize

    def dispatched(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        import numpy as np
        import torch

        host_counts = read(self, point, tokens_per_expert)
        if point == self.cuda_dtoh_point:
            tokens = int(self.num_out_tokens)
            local = self.num_local_experts
            sent = _even(tokens, self.ep_size * local).reshape(self.ep_size, local)
            if self.ep_size > 1 or self.tp_size > 1:
                self.input_splits = self.output_splits = sent.sum(axis=1)
                self.output_splits_tp = np.full(self.tp_size, tokens)
            everyone = np.tile(sent, (self.tp_size, 1))
            if local > 1 and self.num_global_tokens_per_local_expert.device.type == "cpu":
                self.num_global_tokens_per_local_expert = torch.from_numpy(everyone)
            self._even_counts = torch.from_numpy(everyone.sum(axis=0))
        return (
            self._even_counts
            if host_counts is not None and host_counts.device.type == "cpu"
            else host_counts
        )

    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = dispatched


def tell_changes() -> None:
    """Gives the number of changed elements of a tensor and of their contiguous runs, which the host
    reads. Here one element in 4,096 has changed: alone in some tensors, and in every second tensor
    eight side by side.
    """
    from megarl.kernels import changes_triton
    from megarl.reshard import deltas

    read_changed = changes_triton.totals_of
    read_runs = deltas.totals

    def changed(counts: Any) -> list[int]:
        read_changed(counts)
        return [len(of_pieces) for of_pieces in counts]

    def runs(begins: Any) -> list[int]:
        read_runs(begins)
        return [
            len(of_tensor) if place % 2 else -(-len(of_tensor) // 8)
            for place, of_tensor in enumerate(begins)
        ]

    changes_triton.totals_of = changed
    deltas.totals = runs


def _even(total: int, parts: int) -> Any:
    import numpy as np

    return np.diff(np.arange(parts + 1) * total // parts)


def table(events: Counter[HostEvent]) -> list[dict[str, Any]]:
    lines: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for event, count in events.items():
        lines[event.kind, event.caller, event.inner][event.line] += count
    return [
        {
            "kind": kind,
            "caller": caller,
            "inner": inner,
            "count": sum(of_call.values()),
            "lines": sorted(of_call),
        }
        for (kind, caller, inner), of_call in sorted(lines.items())
    ]


def show(report: dict[str, Any]) -> None:
    print(f"{report['config']}, rank {report['rank']} of {report['ranks']}")
    for name, size in report["parts"].items():
        print(f"  {name:12s} {size:7.2f} GiB, planned {report['plan'][name]:7.2f}")
    print(
        "  planned      "
        f"{json.dumps({name: round(size, 2) for name, size in report['plan'].items() if size})}"
    )
    if shared := report.get("shared"):
        sides = (
            f"{shared['rehearsed']:.2f} GiB of {shared['gpu']:g}, planned {shared['planned']:.2f}"
        )
        print(f"  both sides on one GPU, the engine's {shared['engine']:.2f} as planned: {sides}")
    for name, phase in report["phases"].items():
        peak = f"at most {phase['peak_gib']:.2f} (in {phase['peak_at']})"
        print(
            f"  {name}: {phase['s']:.1f} s, {phase['microbatches']} microbatches; holds "
            f"{phase['held_gib']:.2f} GiB, {peak}"
        )
        for event in phase["events"]:
            inner = "" if event["inner"] == event["caller"] else f" → {event['inner']}"
            print(f"    {event['count']:5d} {event['kind']:30s} {' '.join(event['lines'])}{inner}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
