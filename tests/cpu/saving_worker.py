"""A trainer that saves in the background of its steps, and is killed repeatedly at random moments.

    saving_worker.py MODEL RUN_DIR KILLS SEED

Each life is a process that is forked after all imports. It loads and checks the newest checkpoint,
and makes step after step. Each step begins a checkpoint before the next step. STEPS in RUN_DIR gets
a line for each step: {"step", "digest" of all master weights and moments}. Prints a JSON line for
each life: {"began": step it loaded, or 0, "steps": steps it made, "failure"}.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainer_rig import make, one_step, plain_adam, sequences

from megarl.plan.checkpoints import (
    checkpoint_path,
    complete_checkpoints,
    prune_checkpoints,
    remove_leftovers,
)
from megarl.trainer import cpu_support

STEPS = "steps.jsonl"
READY = "ready"
MOST_STEPS = 4  # in one life
DEADLINE_S = 60


def digest(trainer: Any) -> str:
    from megarl.trainer.checkpoint import SAVED, runs

    hasher = hashlib.sha256()
    for name, run in sorted(runs(trainer).items()):
        for kind in SAVED:
            hasher.update(
                f"{name} {kind}".encode() + run.values[kind].detach().contiguous().numpy().tobytes()
            )
    return hasher.hexdigest()


def known_digests(run_dir: Path) -> dict[int, str]:
    """The digests by step. Raises AssertionError if a step was made twice and differs."""
    digests: dict[int, str] = {}
    for line in (run_dir / STEPS).read_text().splitlines() if (run_dir / STEPS).exists() else ():
        entry = json.loads(line)
        assert digests.setdefault(entry["step"], entry["digest"]) == entry["digest"], (
            f"step {entry['step']} was repeated differently"
        )
    return digests


def live(model: str, run_dir: Path) -> None:
    from megarl.trainer import checkpoint

    trainer = make({"model": model, "topology": {}}, plain_adam(lr=1e-2), total_steps=10_000)
    step = 0
    checkpoints = complete_checkpoints(run_dir)
    if checkpoints:
        step, newest = checkpoints[-1]
        assert checkpoint.load(trainer, newest) == {"step": step}
        assert digest(trainer) == known_digests(run_dir)[step], (
            f"checkpoint {step} is not what was held then"
        )
    else:
        trainer.load_hf(model)
    (run_dir / READY).touch()
    saving = None
    while True:
        one_step(trainer, sequences(trainer.spec.vocab_size, seed=step))
        step += 1
        with open(run_dir / STEPS, "a") as record:
            record.write(json.dumps({"step": step, "digest": digest(trainer)}) + "\n")
        if saving is not None:
            saving.finish()
            prune_checkpoints(run_dir, keep=2)
        saving = checkpoint.begin(
            trainer,
            checkpoint_path(run_dir, step),
            {"step": step},
            {"ledger.msgpack": b"%d" % step},
            beside=True,
        )


def fork(model: str, run_dir: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        live(model, run_dir)
    except BaseException as error:
        (run_dir / "failure").write_text(f"{type(error).__name__}: {error}")
        traceback.print_exc()
    finally:
        os._exit(1)


def wait_for(run_dir: Path, steps: float, deadline: float) -> None:
    """Waits until a ready child has made that many steps, however long one takes.

    A fraction is a share of the last step's time.
    """

    def made() -> int:
        path = run_dir / STEPS
        return path.read_bytes().count(b"\n") if path.exists() else 0

    start_s = time.monotonic()
    before = made()
    while (
        made() < before + int(steps)
        and not (run_dir / "failure").exists()
        and time.monotonic() < deadline
    ):
        time.sleep(0.005)
    step_s = (time.monotonic() - start_s) / int(steps) if steps >= 1 else 0.2
    time.sleep((steps - int(steps)) * step_s)


def main() -> None:
    model = sys.argv[1]
    run_dir = Path(sys.argv[2])
    kills = int(sys.argv[3])
    seed = int(sys.argv[4])
    cpu_support.install()
    import megarl.trainer.checkpoint
    import megarl.trainer.step  # noqa: F401  takes seconds, and so once for all

    moments = random.Random(seed)
    for _ in range(kills):
        (run_dir / READY).unlink(missing_ok=True)
        remove_leftovers(run_dir)
        first_step = max((step for step, _ in complete_checkpoints(run_dir)), default=0)
        child = fork(model, run_dir)
        deadline = time.monotonic() + DEADLINE_S
        while (
            not (run_dir / READY).exists()
            and not (run_dir / "failure").exists()
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        wait_for(run_dir, moments.uniform(0, MOST_STEPS), deadline)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        failure = (run_dir / "failure").read_text() if (run_dir / "failure").exists() else ""
        print(
            json.dumps(
                {
                    "began": first_step,
                    "steps": max(known_digests(run_dir), default=0),
                    "failure": failure,
                }
            ),
            flush=True,
        )
        if failure:
            break


if __name__ == "__main__":
    main()
