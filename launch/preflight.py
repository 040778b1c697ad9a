"""Checks that each node makes of itself before anything is started, and of what must be equal on all of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import socket
from collections.abc import Iterator
from pathlib import Path

from megarl.generator.server import growing_segments
from megarl.launch import doctor
from megarl.launch.meeting import NodeReport
from megarl.plan.quantisation import repacked_blocks
from megarl.plan.resolve import RunPlan

PACKAGES = ("megarl", "torch", "megatron-core", "sglang", "transformers", "transformer-engine")


def versions() -> dict[str, str]:
    """The versions of everything that must be the same on all nodes."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def problems_here(plan: RunPlan, trains: bool, serves: bool, shared: bool) -> list[str]:
    """The reasons why this node cannot run its part: trainer ranks, engines, or both. `shared`: whether other nodes have parts too."""
    gpu = doctor.has_driver()
    lacking = (finding for finding in doctor.look(doctor.node(gpu)) if finding.state == doctor.LACKS)
    found = [f"{finding.what}: {finding.found}: {finding.remedy}" for finding in lacking]
    if gpu and trains:
        found += _unfit_to_train(plan)
    if gpu and serves and (blackwell := [kind for kind, capability in doctor.capabilities() if capability == 10]):
        found += repacked_blocks(plan.config, f"{blackwell[0]} here")
    return [*(_missing_files(plan) if shared else ()), *found]


def _unfit_to_train(plan: RunPlan) -> Iterator[str]:
    found = importlib.util.find_spec("transformer_engine")
    if not plan.config.trainer.local_layers and (found is None or found.origin is None):  # nothing, or an empty folder
        yield "trainer.local_layers=false: must be true without Transformer Engine, or install it: make setup-gpu (docs/cluster.md)"
    transport = plan.config.weights.transport
    if transport not in ("nccl", "gloo") and (given := growing_segments()):
        why = "network cards and other processes cannot always open such memory; nccl and gloo do not ask them to"
        yield f"{given}: must be without expandable_segments:True where weights.transport={transport}: {why} (docs/transports.md)"


def _missing_files(plan: RunPlan) -> Iterator[str]:
    """Files that this node lacks, such as those that only the head has, on its own disk."""
    for path in (plan.weights_path, *(role.settings.path for role in plan.served), *(role.path for role in plan.frozen)):
        if path.startswith(("/", ".", plan.config.run_dir)) and not Path(path).is_dir():
            yield f"{path} is not there: is it on a file system that all nodes share?"


def infiniband_ports(devices: Path = doctor.INFINIBAND) -> dict[str, bool]:
    """Port names, such as mlx5_0:1, and whether each port is up."""
    states = sorted(devices.glob("*/ports/*/state"))
    return {f"{state.parts[-4]}:{state.parts[-2]}": state.read_text().strip().endswith("ACTIVE") for state in states}


def disagreements(reports: list[NodeReport]) -> list[str]:
    """One line for each problem of a node, each version or number of GPUs in which it differs from node 0, and each InfiniBand port that is
    down on it but up on others: NCCL and Mooncake would silently fall back, or hang. (A port that is down everywhere has no cable.)"""
    first, lines = reports[0], []
    up = {port for report in reports for port, is_up in report.infiniband.items() if is_up}
    for report in reports:
        name = f"node {report.node} ({report.host})"
        lines += [f"{name}: {problem}" for problem in report.problems]
        lines += [
            f"{name}: {package} {version}, but {first.versions.get(package, 'absent')} on node 0 ({first.host})"
            for package, version in report.versions.items()
            if version != first.versions.get(package, "absent")
        ]
        if report.gpus != first.gpus:
            lines.append(f"{name}: {report.gpus} GPUs, but {first.gpus} on node 0 ({first.host})")
        down = [port for port, is_up in report.infiniband.items() if not is_up and port in up]
        lines += [f"{name}: InfiniBand port {port} is down, but up on other nodes" for port in down]
    return lines


def host_name() -> str:
    return socket.gethostname()
