"""Runs every part in its own process, one after the other, and writes the results.

A part has a deadline. If it fails or is late, the page shows its error and the rows that it had;
the other parts still run. Exit status: 0 if all parts succeeded, 1 if a part failed, 2 if this
machine lacks something.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import math
import os
import pkgutil
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megarl
from megarl.generator import torch_kernels

OF_PEERS = ("transformer-engine", "liger-kernel", "cut-cross-entropy", "sglang")


def machine(rehearse: bool) -> dict[str, str]:
    """The machine, and the versions of the software."""
    import torch

    software = {
        "megarl": f"{megarl.__version__}, commit {commit()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in ("triton", "numpy", "megatron-core", *OF_PEERS):
        version = installed(name)
        if version or name not in OF_PEERS:
            software[name] = version or "not found"
    software["host"] = f"{os.cpu_count()} CPU cores"
    if not rehearse:
        properties = torch.cuda.get_device_properties(0)
        software["gpu"] = properties.name
        software["gpu memory"] = f"{properties.total_memory / 2**30:.1f} GiB"
        software["multiprocessors"] = str(properties.multi_processor_count)
        software["compute capability"] = f"{properties.major}.{properties.minor}"
        software["cuda"] = str(torch.version.cuda)
        software["driver"] = output_of(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        ).split("\n")[0]
    return software


def commit() -> str:
    """The commit of this checkout, or of the one that the kit was made from."""
    kit_commit = os.environ.get("MEGARL_COMMIT")
    if kit_commit:
        return kit_commit
    root = Path(megarl.__file__).resolve().parents[1]
    dirty = " with changes" if output_of("git", "-C", str(root), "status", "--porcelain") else ""
    return (
        output_of("git", "-C", str(root), "rev-parse", "--short=12", "HEAD") or "unknown"
    ) + dirty


def installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def output_of(*command: str) -> str:
    """The output of a program; empty if it is missing or fails."""
    try:
        return subprocess.run(
            command, capture_output=True, timeout=20, encoding="utf-8", errors="replace"
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def page(report: dict[str, Any]) -> str:
    """One table for each part, in Markdown, with the machine's names and versions above."""
    names = report["machine"]
    lines = [f"# MegaRL on {names.get('gpu', 'a CPU: a rehearsal, whose times mean nothing')}", ""]
    lines += [
        f"{report['date']}, {report.get('seconds', 0):.0f} s. "
        + ", ".join(f"{name} {value}" for name, value in names.items())
        + "."
    ]
    for part in report["parts"].values():
        lines += ["", f"## {part['title']}: {part['status']}, {part['seconds']:.0f} s", ""]
        if part["error"]:
            lines += ["```", part["error"], "```", ""]
        rows = []
        for row in part["rows"]:
            rows.append({key: value for key, value in row.items() if key != "failed"})
        lines += table(rows)
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        return ["Nothing was measured."]
    head = [
        "| "
        + " | ".join(column.replace("_per_s", "/s").replace("_", " ") for column in columns)
        + " |",
        "|---" * len(columns) + "|",
    ]
    for row in rows:
        cells = [cell(column, row.get(column)) for column in columns]
        head.append(f"| {' | '.join(cells)} |")
    return head


def cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        if column == "fraction":
            return f"{value:.1%}"
        if column == "error":
            return f"{value:.1e}"
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return str(value).replace("|", "\\|").replace("\n", " ")


@dataclass(frozen=True)
class KitPart:
    title: str
    program: str  # called with a Bench and `arguments`
    deadline_s: float
    arguments: tuple[str, ...] = ()


# In the order of their worth, since all of them together end after TOTAL_S.
PARTS = {
    "environment": KitPart("Environment", "megarl.bench.gpu.environment:run", 60),
    "loop": KitPart("A run, bf16 engine", "megarl.bench.gpu.loop:run", 240, ("bf16",)),
    "writes": KitPart(
        "Direct writes between two processes", "megarl.bench.gpu.writes:run", 40, ("unquantised",)
    ),
    "writes-fp8": KitPart(
        "Direct writes, quantised in flight", "megarl.bench.gpu.writes:run", 40, ("fp8_block",)
    ),
    "kernels": KitPart("Kernels", "megarl.bench.gpu.kernels:run", 110),
    "loop-fp8": KitPart("A run, fp8 engine", "megarl.bench.gpu.loop:run", 110, ("fp8",)),
    "trainer-1B": KitPart("Trainer, Llama 1B", "megarl.bench.gpu.trainer:run", 70, ("1B",)),
    "loop-eager": KitPart(
        "A run without CUDA graphs", "megarl.bench.gpu.loop:run", 100, ("eager",)
    ),
    "trainer-3B": KitPart("Trainer, Llama 3B", "megarl.bench.gpu.trainer:run", 90, ("3B",)),
    "loop-moe": KitPart(
        "A run of a mixture of experts", "megarl.bench.gpu.loop:run", 100, ("moe",)
    ),
}
TOTAL_S = 9 * 60.0
SGLANG_TORCH = "2.14."  # SGLang 0.5.23 is compiled for it
LEAST_S = 10.0  # a part does not begin with less
REHEARSED_SLOWER = 6  # a rehearsal's deadlines are longer by this factor
ERROR_CHARACTERS = 3000


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="megarl.bench.gpu", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        default="runs/gpu",
        help="folder of gpu.json, gpu.md and the parts' logs; default: runs/gpu",
    )
    parser.add_argument(
        "--parts",
        metavar="NAME,…",
        default=",".join(PARTS),
        help=f"only these; default: {', '.join(PARTS)}",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="every part at toy sizes on the CPU: shows that all is there, no speed",
    )
    # for a part's own process: its program and arguments follow
    parser.add_argument("--one", metavar="ROWS", help=argparse.SUPPRESS)
    # of a part's own process, in seconds
    parser.add_argument("--deadline", type=float, default=math.inf, help=argparse.SUPPRESS)
    parser.add_argument("--logs", type=Path, help=argparse.SUPPRESS)  # of a part's own process
    parser.add_argument("program", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return run_part(
            *options.program,
            rehearse=options.rehearse,
            rows=Path(options.one),
            deadline_s=options.deadline,
            logs=options.logs,
        )
    names = [name.strip() for name in options.parts.split(",") if name.strip()]
    unknown_names = [name for name in names if name not in PARTS]
    if unknown_names:
        print(
            f"megarl.bench.gpu: --parts {','.join(unknown_names)}: choose from {', '.join(PARTS)}",
            file=sys.stderr,
        )
        return 2
    problem = "" if options.rehearse else without_gpu()
    if problem:
        print(f"megarl.bench.gpu: {problem}", file=sys.stderr)
        return 2

    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rehearsal": options.rehearse,
    }
    report |= {"machine": machine(options.rehearse), "parts": {}}
    for name in names:
        print(f"{PARTS[name].title} …", end=" ", flush=True)
        slower = REHEARSED_SLOWER if options.rehearse else 1
        remaining_s = started_s + slower * TOTAL_S - time.monotonic()
        result = {"title": PARTS[name].title} | supervise(
            name, options.rehearse, remaining_s, logs=output / "logs" / name
        )
        report["parts"][name] = result
        report["seconds"] = round(time.monotonic() - started_s, 1)
        outcome = f"{result['status']} in {result['seconds']:.0f} s"
        if result["error"]:
            outcome += f": {result['error'].splitlines()[-1]}"
        print(outcome, flush=True)
        (output / "gpu.json").write_text(
            json.dumps(report, indent=1), encoding="utf-8"
        )  # after each part, so that an interrupted run keeps its results
        (output / "gpu.md").write_text(page(report), encoding="utf-8")
    print(f"\n{page(report)}\n{output / 'gpu.json'} and {output / 'gpu.md'} hold this")
    return int(any(result["status"] != "ok" for result in report["parts"].values()))


def without_gpu() -> str:
    """The reason why no GPU can be used; empty if one can."""
    import torch

    if torch.version.cuda is None:
        return (
            f"PyTorch {torch.__version__} of {sys.executable} is built without CUDA; name a "
            "Python whose PyTorch has it"
        )
    if not torch.cuda.is_available():
        return "no NVIDIA GPU can be used here: torch.cuda.is_available() is False"
    return ""


def supervise(
    name: str, rehearse: bool, remaining_s: float = TOTAL_S, *, logs: Path
) -> dict[str, Any]:
    """Runs one part in its own process group, within `remaining_s`. Its logs go to `logs`.

    Returns its rows and how it ended.
    """
    part = PARTS[name]
    started_s = time.monotonic()
    deadline_s = min((REHEARSED_SLOWER if rehearse else 1) * part.deadline_s, remaining_s)
    if remaining_s < LEAST_S:
        return {
            "status": "not run",
            "seconds": 0.0,
            "error": f"the parts before it took {TOTAL_S / 60:.0f} minutes",
            "rows": [],
        }
    with tempfile.TemporaryDirectory(prefix="megarl-gpu-") as folder:
        rows_file = Path(folder) / "rows.jsonl"
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / "part.log"
        command = [
            sys.executable,
            "-P",
            "-m",
            "megarl.bench.gpu",
            "--one",
            str(rows_file),
            "--deadline",
            str(deadline_s),
            "--logs",
            str(logs.resolve()),
        ]
        command += [part.program, *part.arguments]
        environment = dict(os.environ, PYTHONUNBUFFERED="1")
        if rehearse:
            command.append("--rehearse")
            environment |= {
                "TRITON_INTERPRET": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
            }
        elif importlib.util.find_spec(torch_kernels.PACKAGE) is None:
            environment |= {torch_kernels.TORCH_KERNELS: "1"}
        # its prefix tree in Rust then takes tensors for others
        if not installed("torch").startswith(SGLANG_TORCH):
            environment |= {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                process.wait(deadline_s)
                status = "ok"
                error = ""
                if process.returncode:
                    status = "failed"
                    error = f"exit status {process.returncode}"
            except subprocess.TimeoutExpired:
                status = "late"
                error = f"not done within {deadline_s:.0f} s; the rows show what was done"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with all processes that it started
                process.wait()
        rows = []
        if rows_file.exists():
            rows = list(map(json.loads, rows_file.read_text(encoding="utf-8").splitlines()))
        last_words = ""
        if status != "ok":
            last_words = log.read_text(errors="replace", encoding="utf-8")
            last_words = last_words[-ERROR_CHARACTERS:].strip()
    failures = [row["failed"] for row in rows if row.get("failed")]
    if failures:
        status = "failed"
        last_words = "\n".join(failures)
    error = "\n".join(filter(None, (error, last_words)))
    return {
        "status": status,
        "seconds": round(time.monotonic() - started_s, 1),
        "error": error,
        "rows": rows,
    }


def run_part(
    program: str,
    *arguments: str,
    rehearse: bool,
    rows: Path,
    deadline_s: float,
    logs: Path | None,
) -> int:
    import torch

    from megarl.bench.gpu.measure import Bench

    torch.set_num_threads(1 if rehearse else torch.get_num_threads())
    with open(rows, "a", encoding="utf-8") as file:

        def emit(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        device = torch.device("cpu") if rehearse else torch.device("cuda", 0)
        if not rehearse:
            torch.cuda.set_device(device)
        pkgutil.resolve_name(program)(
            Bench(device, rehearse, emit, deadline_s, logs=logs), *arguments
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
