"""Imports all that a run needs on this machine, and says how long that takes and what is
missing.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import time

from megarl.bench.gpu.measure import Bench
from megarl.generator import cpu_support
from megarl.launch.doctor import LACKS, find_nvcc, node, run_checks

MODULES = (
    "megatron.core",
    "transformers",
    "sglang.srt.server_args",
    "sglang.srt.models.qwen2",
    "sglang.srt.managers.scheduler",
    "sglang.srt.entrypoints.http_server",
)


def run(bench: Bench) -> None:
    bench.row("nvcc", note=str(find_nvcc() or "is not there"))
    memory = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    bench.row("free in /dev/shm, GB", measured=memory / 1e9)
    for finding in run_checks(node(bench.cuda)):
        if finding.state == LACKS:
            bench.row(finding.what, note=finding.found, failed=f"{finding.what}: {finding.found}")
    cpu_support.install()
    for module in MODULES:
        started_s = time.perf_counter()
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever it is, the other modules are still of interest
            bench.row(module, failed=f"import {module}: {error!r}")
        else:
            bench.row(f"import {module}, s", measured=time.perf_counter() - started_s)
    if bench.cuda:
        shown = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.used,compute_mode", "--format=csv,noheader"],
            capture_output=True,
        )
        bench.row("nvidia-smi", note=shown.stdout.decode(errors="replace").strip())
