"""A launcher's part of the trace: when the run started, what `megarl plan` expects of it, which engines were restarted, how it ended."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

from megarl.config.errors import ConfigError
from megarl.estimate.estimate import estimate, generate_parts, to_json, train_parts
from megarl.launch.node import Node
from megarl.launch.resuming import Resume
from megarl.launch.stopping import NAMES, Stopped
from megarl.observe.trace import TraceWriter
from megarl.plan.resolve import RunPlan

END_CHARACTERS = 2000  # of an error


@contextlib.contextmanager
def traced(plan: RunPlan, node: Node, resume: Resume) -> Iterator[TraceWriter]:
    with contextlib.closing(TraceWriter(plan.config.run_dir, f"launcher.{node.rank}")) as trace:
        if node.is_head:
            trace.mark("start", step=resume.step, max_steps=plan.config.max_steps, nodes=node.count, expected=expected(plan))
        how = "finished"
        try:
            yield trace
        except BaseException as error:
            how = _how(error)
            raise
        finally:
            with contextlib.suppress(OSError):  # what has ended the run, such as a full disk, is to be told, not this
                trace.mark("end", how=how[:END_CHARACTERS])


def _how(error: BaseException) -> str:
    """Whoever stops a run does not find a fault in it, even where it could not stop cleanly."""
    if isinstance(error, Stopped):
        return f"stopped by {error.by}"
    if isinstance(error, KeyboardInterrupt):
        return f"stopped by {NAMES[signal.SIGINT]}"
    if isinstance(error, SystemExit):
        return f"stopped by {NAMES[signal.SIGTERM]}"
    return f"failed: {str(error) or type(error).__name__}"


def expected(plan: RunPlan) -> dict[str, Any]:
    """What `megarl plan` says, for the report beside what is measured; for a config that it cannot plan, why."""
    try:
        found = estimate(plan.config, plan.spec)
    except ConfigError as error:
        return {"problem": str(error)}
    gpu = found.cluster.gpu
    parts = {"train_parts_s": train_parts(found.train), "generate_parts_s": generate_parts(found.generate), "glue_s": found.glue_s}
    peak = {"gpu": gpu.name, "trainer_ranks": plan.trainer_topology.world_size, "peak_flops": None if gpu.name == "cpu" else gpu.bf16_flops}
    return {**to_json(found, None), **parts, **peak, "asynchronous": found.asynchronous}
