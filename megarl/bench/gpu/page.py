"""The page: one table for each part, in Markdown, with the machine's names and versions above."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import megarl

OF_PEERS = ("transformer-engine", "liger-kernel", "cut-cross-entropy", "sglang")


def machine(rehearse: bool) -> dict[str, str]:
    """What it was measured on, and with which versions."""
    import torch

    found = {"megarl": f"{megarl.__version__}, commit {commit()}", "python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "numpy", "megatron-core", *OF_PEERS):
        if (version := installed(name)) or name not in OF_PEERS:
            found[name] = version or "not found"
    found["host"] = f"{os.cpu_count()} CPU cores"
    if not rehearse:
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["gpu memory"] = f"{properties.total_memory / 2**30:.1f} GiB"
        found["multiprocessors"] = str(properties.multi_processor_count)
        found["compute capability"] = f"{properties.major}.{properties.minor}"
        found["cuda"] = str(torch.version.cuda)
        found["driver"] = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    return found


def commit() -> str:
    """Of this checkout, or of the one that the kit was made from."""
    if told := os.environ.get("MEGARL_COMMIT"):
        return told
    root = Path(megarl.__file__).resolve().parents[1]
    dirty = " with changes" if output_of("git", "-C", str(root), "status", "--porcelain") else ""
    return (output_of("git", "-C", str(root), "rev-parse", "--short=12", "HEAD") or "unknown") + dirty


def installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def output_of(*command: str) -> str:
    """What the program prints; empty if there is none, or if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def page(report: dict[str, Any]) -> str:
    names = report["machine"]
    lines = [f"# MegaRL on {names.get('gpu', 'a CPU: a rehearsal, whose times mean nothing')}", ""]
    lines += [f"{report['date']}, {report.get('seconds', 0):.0f} s. " + ", ".join(f"{name} {value}" for name, value in names.items()) + "."]
    for part in report["parts"].values():
        lines += ["", f"## {part['title']}: {part['status']}, {part['seconds']:.0f} s", ""]
        if part["error"]:
            lines += ["```", part["error"], "```", ""]
        lines += table([{key: value for key, value in row.items() if key != "failed"} for row in part["rows"]])
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        return ["Nothing was measured."]
    head = ["| " + " | ".join(column.replace("_per_s", "/s").replace("_", " ") for column in columns) + " |", "|---" * len(columns) + "|"]
    return head + ["| " + " | ".join(cell(column, row.get(column)) for column in columns) + " |" for row in rows]


def cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        if column == "fraction":
            return f"{value:.1%}"
        return f"{value:.1e}" if column == "error" else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return str(value).replace("|", "\\|").replace("\n", " ")
