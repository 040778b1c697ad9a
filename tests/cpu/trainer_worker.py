"""The ranks of a real gloo trainer, for test_trainer.py: they run a list of scenarios and save the
results.

    trainer_worker.py WORLD_SIZE RENDEZVOUS_FILE SCENARIOS_JSON OUT_DIR

Scenarios run one after another, up to the first failure. Each has ranks of its own, which are
forked after all imports: a gloo group polls a hundred times a second as long as its process lives.
Ranks write to OUT_DIR/world<size>.<rank>.log. The result of a scenario function is saved as
OUT_DIR/<scenario name>.<rank>.pt.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import actor_critic_scenarios
import distill_scenarios
import lora_scenarios
import minibatch_scenarios
import multi_token_scenarios
import saving_scenarios
import torch
import torch.distributed as dist
import trainer_scenarios
import value_scenarios

from megarl.trainer import cpu_support

SCENARIOS = (
    trainer_scenarios,
    saving_scenarios,
    minibatch_scenarios,
    multi_token_scenarios,
    value_scenarios,
    actor_critic_scenarios,
    distill_scenarios,
    lora_scenarios,
)


def main() -> None:
    world_size = int(sys.argv[1])
    rendezvous = sys.argv[2]
    scenarios = json.loads(Path(sys.argv[3]).read_text())
    out = Path(sys.argv[4])
    cpu_support.install()
    import torch._dynamo  # noqa: F401  which the first optimizer would import

    import megarl.trainer.step  # noqa: F401  takes seconds, and so once for all

    for scenario in scenarios:
        ranks = [
            start(rank, world_size, f"{rendezvous}.{scenario['name']}", scenario, out)
            for rank in range(world_size)
        ]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        if any(statuses):
            break
    print(json.dumps(statuses))


def start(rank: int, world_size: int, rendezvous: str, scenario: dict[str, Any], out: Path) -> int:
    """Starts a rank and returns its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        log = os.open(out / f"world{world_size}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        run(rank, world_size, rendezvous, scenario, out)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)  # all is saved, and the interpreter's own exit takes a second


def run(rank: int, world_size: int, rendezvous: str, scenario: dict[str, Any], out: Path) -> None:
    start_s = time.monotonic()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    (run_scenario,) = [
        scenario_function
        for module in SCENARIOS
        if (scenario_function := getattr(module, "scenario_" + scenario["run"], None))
    ]
    results = run_scenario(scenario, out)
    torch.save(results, out / f"{scenario['name']}.{rank}.pt")
    print(f"{scenario['name']} {time.monotonic() - start_s:.2f} s", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
