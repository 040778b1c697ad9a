"""Checkpoints and exports of real trainers, intact and damaged.

A function `scenario_…` runs on every rank, and its result is saved.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainer_rig import (
    all_logprobs,
    make,
    one_step,
    plain_adam,
    sequences,
)


def scenario_killed_while_saving(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Saves step 1, and dies by SIGKILL as soon as it writes the folder of step 2."""
    from megarl.plan.checkpoints import checkpoint_path
    from megarl.trainer import checkpoint

    trainer = make(scenario, plain_adam(lr=1e-2))
    trainer.load_hf(scenario["model"])
    root = scenario["run_dir"]
    checkpoint.save(trainer, str(checkpoint_path(root, 1)), {"step": 1})
    partial = checkpoint_path(root, 2).with_name(checkpoint_path(root, 2).name + ".partial")

    def kill() -> None:
        while not partial.exists():
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    checkpoint.save(trainer, str(checkpoint_path(root, 2)), {"step": 2})
    return {}


def scenario_saved_beside(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Saves and exports the same state twice: once during further steps, and once without.

    Then a save that rank 1 cannot write, and one more.
    """
    from megarl.trainer import checkpoint
    from megarl.trainer.checkpoint import SAVED, runs

    def state() -> dict[str, torch.Tensor]:
        return {
            f"{name} {kind}": run.values[kind].clone()
            for name, run in runs(trainer).items()
            for kind in SAVED
        }

    trainer = make(scenario, plain_adam(lr=1e-2))
    trainer.load_hf(scenario["model"])
    batch = sequences(trainer.spec.vocab_size)
    one_step(trainer, batch)
    before = state()
    checkpoint.save(
        trainer,
        out / "alone",
        {"step": 1},
        {"ledger.msgpack": b"of prompts"} if dist.get_rank() == 0 else {},
    )
    trainer.export_hf(str(out / "alone.hf"), scenario["model"])
    files = {"ledger.msgpack": b"of prompts"} if dist.get_rank() == 0 else {}
    saving = checkpoint.begin(trainer, out / "beside", {"step": 1}, files, beside=True)
    export = trainer.begin_export(str(out / "beside.hf"), scenario["model"], beside=True)
    one_step(trainer, batch)
    one_step(trainer, batch)
    before_finish = [name for name in ("beside", "beside.hf") if (out / name).exists()]
    while not (saving.written() and export.written()):
        time.sleep(0.01)
    saving.finish()
    export.finish()
    moved = any(not torch.equal(now, before[name]) for name, now in state().items())
    assert checkpoint.load(trainer, out / "beside") == {"step": 1}
    loaded = state()
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, most))
    failing = checkpoint.begin(trainer, out / "failing", {"step": 1}, beside=True)
    message = ""
    try:
        failing.finish()
    except RuntimeError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    checkpoint.begin(trainer, out / "after", {"step": 1}, beside=True).finish()
    leftover_files = [
        name
        for name in (
            "after",
            "alone",
            "beside",
            "beside.hf",
            "alone.hf",
            "failing",
            "failing.partial",
        )
        if (out / name).exists()
    ]
    results = {
        "there_before_finish": before_finish,
        "moved": moved,
        "message": message,
        "left": leftover_files,
    }
    return {
        **results,
        "loaded": {n: v.tolist() for n, v in loaded.items()},
        "held": {n: v.tolist() for n, v in before.items()},
    }


def scenario_saving(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Exports every second step and saves every third.

    Export 2 is delayed until checkpoint 3 could be complete. Then failures of rank 0.
    """
    from megarl.config.load import load_config
    from megarl.executors.saving import Saving
    from megarl.observe.status import TraceWriter
    from megarl.plan.checkpoints import checkpoint_path, export_path
    from megarl.trainer import checkpoint
    from megarl.trainer.hf_io import Writing

    trainer = make(scenario, plain_adam(lr=1e-2))
    run_dir = out / "run"
    held_back = threading.Event()
    trainer.load_hf(scenario["model"])
    keys = [f"run_dir={run_dir}", "max_steps=4", "checkpoint.every=3", "checkpoint.hf_every=2"]
    saving = Saving(
        load_config(scenario["config"], keys),
        trainer,
        TraceWriter(run_dir, f"trainer.{dist.get_rank()}"),
        saved_step=0,
    )
    trainer.begin_export = lambda path, _, *, beside: Writing(
        path, lambda folder: held_back.wait() and None, beside=beside
    )
    # a leftover of a run that died before its checkpoint of step 2
    export_path(run_dir, 2).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    saving.after_step(2, dict, last=False)
    results: dict[str, Any] = {"old_export": export_path(run_dir, 2).exists()}
    saving.after_step(3, dict, last=False)

    def release() -> None:
        time.sleep(1.0)
        results["checkpoint_before_export"] = checkpoint_path(run_dir, 3).exists()
        held_back.set()

    threading.Thread(target=release).start()
    saving.after_step(4, dict, last=True)
    results["there"] = [
        path(run_dir, step).exists()
        for path, step in ((export_path, 2), (checkpoint_path, 3), (checkpoint_path, 4))
    ]
    del trainer.begin_export
    (out / "file").touch()
    failing = {
        "no_folder": lambda: checkpoint.begin(trainer, out / "file" / "step", {}, beside=True)
    }
    failing["no_configuration"] = lambda: trainer.export_hf(
        str(out / "hf"), scenario["model"] + ".gone"
    )
    for name, fail in failing.items():
        try:
            fail()
        except RuntimeError as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


def scenario_full_disk(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Saves step 1.

    Then no file of rank 1 may grow beyond 64 KiB: saving step 2 and an export fail. Step 1 is
    loaded again.
    """
    from megarl.plan.checkpoints import checkpoint_path
    from megarl.trainer import checkpoint

    trainer = make(scenario, plain_adam(lr=1e-2))
    trainer.load_hf(scenario["model"])
    root = scenario["run_dir"]
    checkpoint.save(trainer, str(checkpoint_path(root, 1)), {"step": 1})
    probe = sequences(trainer.spec.vocab_size)
    before = all_logprobs(trainer, probe)
    one_step(trainer, probe)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        # a write beyond it fails as on a full disk, with another error number
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, most))
    message = exported = ""
    try:
        checkpoint.save(trainer, str(checkpoint_path(root, 2)), {"step": 2})
    except RuntimeError as error:
        message = str(error)
    try:
        trainer.export_hf(str(out / "export"), scenario["model"])
    except RuntimeError as error:
        exported = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    dist.barrier()
    leftover_files = sorted(path.name for path in checkpoint_path(root, 2).parent.iterdir())
    checkpoint.load(trainer, str(checkpoint_path(root, 1)))
    return {
        "message": message,
        "exported": exported,
        "left": leftover_files,
        "before": before,
        "after": all_logprobs(trainer, probe),
    }


def scenario_damaged(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """The messages when a checkpoint with a damaged file is loaded, by file and damage.

    Without damage it loads.
    """
    from megarl.trainer import checkpoint

    trainer = make(scenario, plain_adam(lr=1e-2))
    trainer.load_hf(scenario["model"])
    folder = Path(scenario["checkpoint"])
    checkpoint.save(
        trainer,
        folder,
        {"step": 1},
        {"ledger.msgpack": b"of prompts"} if dist.get_rank() == 0 else {},
    )
    messages = {}
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        dist.barrier()  # all ranks have read it before it is damaged
        for damage, harmed in damaged_contents(content).items():
            if dist.get_rank() == 0:
                file.unlink() if harmed is None else file.write_bytes(harmed)
            dist.barrier()
            try:
                checkpoint.load(trainer, folder)
                messages[file.name, damage] = ""
            except RuntimeError as error:
                messages[file.name, damage] = f"{type(error).__name__}: {error}"
            dist.barrier()
            if dist.get_rank() == 0:
                file.write_bytes(content)
    dist.barrier()
    return {
        "said": messages,
        "of_copy": said_of_copy(trainer, folder),
        "whole": checkpoint.load(trainer, folder),
    }


def said_of_copy(trainer: Any, folder: Path) -> str:
    """The message of an export from a copy of the checkpoint at `folder` in which one bit of a
    tensor is flipped.
    """
    from megarl.config.errors import RunError
    from megarl.executors.policy import load_checkpoint

    copy = folder.parent / "exporting" / folder.name
    if dist.get_rank() == 0:
        shutil.copytree(folder, copy)
        tensors = copy / "rank_00001.bin"
        tensors.write_bytes(damaged_contents(tensors.read_bytes())["bit of byte 0"])
    dist.barrier()
    try:
        load_checkpoint(trainer, str(copy), original=str(folder))
    except RunError as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


def damaged_contents(content: bytes) -> dict[str, Any]:
    """Ways to damage a file. None: the file is deleted."""
    damaged_bytes: dict[str, Any] = {
        "missing": None,
        "empty": b"",
        "cut short": content[:-1],
        "longer": content + b"\0",
    }
    for place in sorted({0, len(content) // 3, len(content) // 2, len(content) - 1}):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        damaged_bytes[f"bit of byte {place}"] = bytes(flipped)
    return damaged_bytes


def scenario_ranks_differ(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """The messages of saves of a wrong state: one element differs on rank 1, by kind of state and
    tensor.
    """
    from megarl.trainer import checkpoint
    from megarl.trainer.checkpoint import runs

    trainer = make(scenario, plain_adam(lr=1e-2))
    trainer.load_hf(scenario["model"])
    one_step(trainer, sequences(trainer.spec.vocab_size))
    messages = {}
    for kinds in scenario["kinds"]:
        run = runs(trainer)["decoder.final_layernorm.weight"]
        before = {kind: run.values[kind].clone() for kind in kinds}
        if dist.get_rank() == 1:
            for kind in kinds:
                run.values[kind][3] += 0.5
        try:
            checkpoint.save(trainer, out / "differing", {})
        except RuntimeError as error:
            messages["+".join(kinds)] = f"{type(error).__name__}: {error}"
        for kind, values in before.items():
            run.values[kind].copy_(values)
    leftover_folders = [path.name for path in out.glob("differing*")]
    checkpoint.save(trainer, out / "alike", {})
    return {"said": messages, "left": leftover_folders}


def scenario_disk_that_lies(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Rank 1's disk stores one wrong byte."""
    from megarl.trainer import checkpoint

    trainer = make(scenario, plain_adam(lr=1e-2))
    trainer.load_hf(scenario["model"])
    written = os.posix_fadvise

    def lie(descriptor: int, *args: int) -> None:
        os.pwrite(descriptor, bytes([os.pread(descriptor, 1, 5000)[0] ^ 1]), 5000)
        written(descriptor, *args)

    if dist.get_rank() == 1:
        os.posix_fadvise = lie
    try:
        checkpoint.save(trainer, out / "lied", {})
        message = ""
    except RuntimeError as error:
        message = f"{type(error).__name__}: {error}"
    os.posix_fadvise = written
    return {"message": message, "left": [path.name for path in out.glob("lied*")]}


def scenario_vendor_warns(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """The result with Megatron's own checkpoint format, which loses elements of a tied embedding,
    and warns.
    """
    from megatron.core import parallel_state

    trainer = make(scenario, plain_adam(lr=1e-2))
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "dp_cp_group": group,
    }
    model = {"model": trainer.chunks[0].sharded_state_dict(metadata=metadata)}
    try:
        trainer.optimizer.sharded_state_dict(model, metadata=metadata)
    except RuntimeError as error:
        return {"said": str(error)}
    return {"said": ""}


def scenario_offloaded(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Trains, saves, trains on, loads, and trains again.

    Returns norms of the gradients, and the state after each part.
    """
    from megarl.config.schema import OptimizerConfig
    from megarl.trainer import checkpoint
    from megarl.trainer.checkpoint import SAVED, runs

    def state() -> dict[str, list[float]]:
        return {
            f"{name} {kind}": run.values[kind].tolist()
            for name, run in runs(trainer).items()
            for kind in SAVED
            if kind in run.values
        }

    optimizer = OptimizerConfig(offload=scenario["offload"])
    trainer = make(scenario | {"trainer": {"optimizer": optimizer}}, plain_adam(lr=1e-2))
    trainer.load_hf(scenario["model"])
    batch = sequences(trainer.spec.vocab_size)
    folder = out / f"{scenario['name']}.checkpoint"
    norms = [one_step(trainer, batch)["grad_norm"] for _ in range(2)]
    checkpoint.save(trainer, folder, {"step": 2})
    norms += [one_step(trainer, batch)["grad_norm"]]
    ended = state()
    checkpoint.load(trainer, folder)
    loaded = [one_step(trainer, batch)["grad_norm"]]
    on = {
        str(adam.__class__.__name__)
        for part in trainer.optimizer.chained_optimizers
        for adam in [part.optimizer]
    }
    return {
        "norms": norms,
        "ended": ended,
        "again": state(),
        "loaded": loaded,
        "optimizers": on,
        "folder": str(folder),
    }
