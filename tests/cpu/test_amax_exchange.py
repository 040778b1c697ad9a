"""Quantised tiles that are cut across trainer ranks equal, bit for bit, the quantised whole
tensors; an error names a silent rank. Ranks are real gloo processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import reshard_reference
import torch
from amax_worker import SPEC, AmaxJob
from fp8_reference import Quantised
from sglang_engine import free_port

from megarl.base.geometry import TrainerTopology

WORKER = Path(__file__).with_name("amax_worker.py")


def start(job: AmaxJob) -> list[subprocess.Popen]:
    unit = str(Path(reshard_reference.__file__).parent)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": unit}
    ranks = range(TrainerTopology(tp=2, dp=job.dp).world_size)
    argv = [sys.executable, str(WORKER), msgspec.json.encode(job).decode()]
    return [
        subprocess.Popen([*argv, str(rank)], env=env, stderr=subprocess.PIPE, text=True)
        for rank in ranks
    ]


def errors_of(processes: list[subprocess.Popen], timeout_s: float = 90) -> list[str]:
    try:
        return [process.communicate(timeout=timeout_s)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


@pytest.mark.parametrize(
    "quantization, dp",
    [
        ("fp8_block", 2),
        *(pytest.param(name, 1, marks=pytest.mark.long) for name in ("fp8_channel", "fp8_tensor")),
    ],
)
def test_cut_tiles_equal_quantising_the_gathered_tensors(
    quantization: str, dp: int, tmp_path: Path
):
    processes = start(AmaxJob(free_port(), quantization, dp, str(tmp_path)))
    errors = errors_of(processes)
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(errors)
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(len(processes))]
    [expected] = Quantised(
        reshard_reference.full_tensors(SPEC, torch.float32), quantization
    ).in_engine(SPEC, 1, 1)
    assert parts[0].keys() == expected.keys()
    for name, tensor in expected.items():
        # one rank writes each byte, once
        together = torch.stack([part[name] for part in parts]).sum(0).to(torch.uint8)
        in_memory_order = (
            tensor.t() if tensor.dtype == torch.uint8 and not tensor.is_contiguous() else tensor
        )
        assert torch.equal(
            together.flatten(), in_memory_order.contiguous().view(-1).view(torch.uint8)
        ), name


def test_a_silent_rank_is_named_at_the_deadline(tmp_path: Path):
    processes = start(
        AmaxJob(free_port(), "fp8_channel", 1, str(tmp_path), timeout_s=3.0, silent_rank=1)
    )
    try:
        _, errors = processes[0].communicate(timeout=60)
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    assert (
        "TimeoutError: trainer rank 0: amax of cut tiles from trainer rank 1: not through within 3 s"
        in errors
    )
