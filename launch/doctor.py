"""`megarl doctor`: what a run needs of this machine, which of it is there, and how to get the rest.

Before anything starts, every node of a run on GPUs also checks itself in this way
(launch/launcher.py). All checks before those of packages need only the standard library, so an
installation can run them first:
    PYTHONPATH=. python3.12 -m megarl.launch.doctor          in a checkout without an environment
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.launch.gpus import gpus, nvidia_smi

if TYPE_CHECKING:
    from megarl.plan.resolve import RunPlan

OK = "ok"
NOTE = "note"
LACKS = "lacks"  # NOTE: a run works without it, but slower, or not with all features
DRIVER = (580,)  # first version for CUDA 13
CUDA = 13  # version in the GPU lock: PyTorch compiles only with this one
GLIBC = (2, 34)  # version that wheels in the GPU lock need
PYTHON = (3, 12)
SHM_BYTES = 8 << 30
DISK_BYTES = 30 << 30
OPEN_FILES = 65536
IMPORT_S = 300.0
TRY_S = 60.0
WRITES_S = 600.0
STA_UNSYNC = 0x40  # linux/timex.h
INFINIBAND = Path("/sys/class/infiniband")
MODULES = Path("/proc/modules")
LIBRARIES = Path("/usr")
NIC_MODULES = {
    "mlx5": "ibverbs-providers",
    "bnxt_re": "ibverbs-providers",
    "efa": "the EFA installer",
}


@dataclass(frozen=True)
class Finding:
    what: str
    state: str  # OK | NOTE | LACKS
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.state:<6}{self.what:<21} {self.found}"
        if self.remedy:
            return f"{line}\n{'':<28}-> {self.remedy}"
        return line


Check = Callable[[], Iterator[Finding]]


def _finding(subject: str, fine: bool, text: str, remedy: str, otherwise: str = LACKS) -> Finding:
    """The finding OK if `fine`, else `otherwise` with the remedy."""
    if fine:
        return Finding(subject, OK, text)
    return Finding(subject, otherwise, text, remedy)


def has_driver() -> bool:
    """Whether NVIDIA's driver is loaded here, even without a working GPU.

    Imports no library, since torch takes seconds.
    """
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def system(gpu: bool) -> list[Check]:
    return [_system, _python, _limits, _room, _temporary, _clock, *node(gpu)]


def installing() -> list[Check]:
    """The checks for `make setup-gpu`, which may run on a machine without a GPU."""
    return [_system, _python, _room, _temporary, _compilers]


def node(gpu: bool) -> list[Check]:
    """The checks of each node of a run before anything starts. They take two seconds."""
    if gpu:
        return [_driver, _nvlinks, _cuda_compilers, _compilers, _network]
    return []


def run_checks(checks: Sequence[Check]) -> Iterator[Finding]:
    """Runs the checks.

    An exception in a check becomes a finding, and the other checks still run.
    """
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            yield Finding(check.__name__.strip("_"), LACKS, f"could not be looked at: {error!r}")


def _system() -> Iterator[Finding]:
    machine = f"{platform.system()} {platform.machine()}"
    yield _finding(
        "system", machine == "Linux x86_64", machine, "the locks are for Linux on x86-64"
    )
    library, version = platform.libc_ver()
    yield _finding(
        "glibc",
        library == "glibc" and _numbers(version) >= GLIBC,
        version or "no glibc",
        f"wheels of the GPU lock need {_dotted(GLIBC)}: Debian 12, Ubuntu 22.04, RHEL 9 or "
        "newer, or a container",
    )


def _python() -> Iterator[Finding]:
    yield _finding(
        "python",
        sys.version_info[:2] == PYTHON,
        f"{platform.python_version()}, {sys.executable}",
        f"megatron-core needs {_dotted(PYTHON)}, and SGLang has packages without wheels for "
        "newer ones",
    )


def _limits() -> Iterator[Finding]:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    yield _finding(
        "open files",
        limit == resource.RLIM_INFINITY or limit >= OPEN_FILES,
        "unlimited" if limit < 0 else f"{limit} at most",
        f"raise the hard limit to {OPEN_FILES} (limits.conf, LimitNOFILE): every request has "
        "a connection",
        otherwise=NOTE,
    )


def _room() -> Iterator[Finding]:
    yield _free("/dev/shm", "/dev/shm", SHM_BYTES, "a container needs --shm-size=16g or --ipc=host")
    yield _free(
        "disk for caches",
        os.path.expanduser("~"),
        DISK_BYTES,
        "packages and compiled kernels take it; set HOME, or UV_CACHE_DIR and launch.compile_cache",
    )


def _temporary() -> Iterator[Finding]:
    """Checks the folder for sockets and stores of a launch.

    Raises FileNotFoundError if there is no temporary folder.
    """
    path = tempfile.gettempdir()
    tmpdir = os.environ.get("TMPDIR")
    if tmpdir and os.path.abspath(tmpdir) != path:
        yield Finding(
            "TMPDIR",
            NOTE,
            f"{tmpdir} cannot be written to, so {path} is taken",
            "set it to a folder on this machine's disk",
        )
    yield _free(
        "temporary files", path, 1 << 30, "sockets and stores of a launch lie there; set TMPDIR"
    )


def _free(subject: str, path: str, needed_bytes: int, advice: str) -> Finding:
    if not os.path.isdir(path):
        return Finding(subject, LACKS, f"{path} is not there", advice)
    if not os.access(path, os.W_OK):
        return Finding(subject, LACKS, f"{path} cannot be written to", advice)
    free_bytes = shutil.disk_usage(path).free
    return _finding(
        subject,
        free_bytes >= needed_bytes,
        f"{free_bytes / (1 << 30):.1f} GiB free in {path}",
        f"{needed_bytes >> 30} GiB are wanted: {advice}",
        otherwise=NOTE,
    )


def _clock() -> Iterator[Finding]:
    """Checks that the clock is synchronised, since logs and traces of several nodes are compared.

    The kernel knows whether it is.
    """
    status = ctypes.create_string_buffer(512)  # struct timex; mode 0 only reads
    if ctypes.CDLL(None, use_errno=True).adjtimex(status) < 0:
        yield Finding(
            "clock",
            NOTE,
            "cannot be asked: " + os.strerror(ctypes.get_errno()),
            "a container may forbid it: ask the host",
        )
        return
    # the field after modes, offset, freq, maxerror and esterror
    unsynchronised = ctypes.c_int.from_buffer(status, 40).value & STA_UNSYNC
    yield _finding(
        "clock",
        not unsynchronised,
        "nothing keeps it right" if unsynchronised else "kept right",
        "run chrony or systemd-timesyncd: traces of several nodes are laid side by side",
        otherwise=NOTE,
    )


def _driver() -> Iterator[Finding]:
    shown = nvidia_smi(
        "--query-gpu=driver_version,name,memory.total,compute_mode", "--format=csv,noheader"
    ).splitlines()
    if not shown:
        remedy = (
            f"install NVIDIA's driver {_dotted(DRIVER)} or newer; in a container, start it "
            "with --gpus all (docker) or --nv (apptainer)"
        )
        yield Finding("driver", LACKS, "nvidia-smi shows no GPU", remedy)
        return
    rows = [line.split(", ") for line in shown]
    version = rows[0][0]
    yield _finding(
        "driver",
        _numbers(version) >= DRIVER,
        version,
        f"CUDA 13 needs {_dotted(DRIVER)} or newer",
    )
    kinds = sorted({row[1] for row in rows})
    yield _finding(
        "GPUs",
        len(kinds) == 1,
        f"{len(rows)}: {', '.join(kinds)}, {rows[0][2]}",
        "trainer ranks and engines take GPUs by number: only CUDA_VISIBLE_DEVICES can keep "
        "unlike ones apart",
        otherwise=NOTE,
    )
    exclusive_gpus = [
        number for number, row in enumerate(rows) if "Exclusive" in row[3] or "Prohibited" in row[3]
    ]
    if exclusive_gpus:
        yield Finding(
            "compute mode",
            LACKS,
            f"GPU {', '.join(map(str, exclusive_gpus))}: {rows[exclusive_gpus[0]][3]}",
            "nvidia-smi --compute-mode=0",
        )


def capabilities() -> list[tuple[str, int]]:
    """(name, major number of the compute capability) of each GPU."""
    rows = [
        line.split(", ")
        for line in nvidia_smi("--query-gpu=name,compute_cap", "--format=csv,noheader").splitlines()
    ]
    return [(name, _numbers(capability)[0]) for name, capability in rows]


def _nvlinks() -> Iterator[Finding]:
    status = nvidia_smi("nvlink", "--status")
    if not status:
        return
    dead = list(dead_nvlinks(status))
    for problem in dead:
        yield Finding(
            "NVLink",
            LACKS,
            problem,
            "NCCL would silently go over PCIe: reset the GPUs, or take the node out",
        )
    if not dead:
        yield Finding("NVLink", OK, "no GPU has fewer links than another")


def _cuda_compilers() -> Iterator[Finding]:
    """Checks for nvcc and ninja, with which engines compile kernels when they start."""
    toolkit = f"make setup-gpu installs it; or set CUDA_HOME to a toolkit of CUDA {CUDA}"
    nvcc = find_nvcc()
    if nvcc is None:
        yield Finding("nvcc", LACKS, "is not there", toolkit)
    else:
        release = _nvcc_release(nvcc)
        yield _finding(
            "nvcc", _numbers(release)[:1] == (CUDA,), f"release {release}, {nvcc}", toolkit
        )
    yield _program("ninja", find_program("ninja"), "make setup-gpu; or apt-get install ninja-build")


def _nvcc_release(nvcc: Path) -> str:
    try:
        output = subprocess.run(
            [nvcc, "--version"],
            capture_output=True,
            timeout=TRY_S,
            encoding="utf-8",
            errors="replace",
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        output = ""
    match = re.search(r"release (\d+\.\d+)", output)
    if match:
        return match[1]
    return "unknown"


def _program(subject: str, path: str | None, remedy: str) -> Finding:
    """The finding for a file that must be there. `path`: where it is; None if it is nowhere."""
    return _finding(subject, path is not None, path or "is not there", remedy)


def _compilers() -> Iterator[Finding]:
    """Checks for C and C++ compilers: Triton compiles its launchers, nvcc calls C++, Transformer
    Engine compiles at installation.
    """
    # the same order as Triton's
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    yield _program("C compiler", compiler, "apt-get install gcc; or set CC")
    compiler = shutil.which("c++") or shutil.which("g++")
    yield _program("C++ compiler", compiler, "apt-get install g++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    yield _program(
        "Python.h",
        str(header) if header.exists() else None,
        "apt-get install python3.12-dev, or take a Python that uv installs: Triton compiles "
        "against it",
    )


def find_nvcc() -> Path | None:
    """CUDA's compiler, from CUDA_HOME, from wheels in this environment, or from PATH; None without
    one.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [Path(home) / "bin/nvcc"] if home else []
    wheels = Path(sysconfig.get_path("purelib"))
    candidates += sorted(wheels.glob("nvidia/cu*/bin/nvcc"), reverse=True)
    path = shutil.which("nvcc")
    if path:
        candidates.append(Path(path))
    return next((nvcc for nvcc in candidates if os.access(nvcc, os.X_OK)), None)


def find_program(name: str) -> str | None:
    """A program on PATH or beside this Python, since jobs often call an environment's programs
    without activating it.
    """
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def _network() -> Iterator[Finding]:
    """Checks the network between nodes. Mooncake needs RDMA's libraries even if it uses TCP."""
    devices = sorted(INFINIBAND.glob("*"))
    for library, package in (
        ("ibverbs", "libibverbs1"),
        ("numa", "libnuma1"),
        ("curl", "libcurl4"),
    ):
        file = ctypes.util.find_library(library)
        yield _finding(
            f"lib{library}",
            file is not None,
            file or "is not there",
            f"apt-get install {package}",
            otherwise=LACKS if devices else NOTE,
        )
    if not devices:
        yield Finding(
            "InfiniBand",
            NOTE,
            "no device",
            "without it, weights between nodes go by NCCL or TCP; one node does not need it",
        )
        return
    drivers = {
        (device / "device/driver").resolve().name.removesuffix("_core") for device in devices
    }
    names = ", ".join(device.name for device in devices)
    if drivers == {"efa"}:
        yield Finding(
            "InfiniBand",
            NOTE,
            f"{names}: EFA, which is not InfiniBand",
            "Mooncake cannot write over it: set weights.transport=nccl",
        )
        return
    yield Finding("InfiniBand", OK, names)
    for driver in sorted(drivers & NIC_MODULES.keys()):
        if not any(LIBRARIES.glob(f"lib*/**/lib{driver}*-rdmav*.so")):
            remedy = (
                f"install {NIC_MODULES[driver]}: Mooncake's library does not load without "
                "it, and weights would go by NCCL"
            )
            yield Finding(f"lib{driver}", LACKS, "its provider for libibverbs is not there", remedy)
    yield _registration()
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = resource.RLIM_INFINITY in (soft, hard)
    yield _finding(
        "locked memory",
        unlimited,
        "unlimited" if unlimited else f"{hard >> 10} KiB at most",
        "ulimit -l unlimited (limits.conf; Slurm: PropagateResourceLimitsExcept=MEMLOCK)",
    )


def _registration() -> Finding:
    """Checks whether network cards can access GPU memory."""
    modules = {line.split()[0] for line in MODULES.read_text(encoding="utf-8").splitlines()}
    if "nvidia_peermem" in modules or "nv_peer_mem" in modules:
        return Finding("GPU memory by RDMA", OK, "nvidia_peermem is loaded")
    if "nvidia" in modules and _numbers(platform.release()) >= (5, 12):
        return Finding(
            "GPU memory by RDMA",
            OK,
            "by dmabuf (open kernel modules of the driver), as far as can be told without trying",
        )
    return Finding(
        "GPU memory by RDMA", LACKS, "neither nvidia_peermem nor dmabuf", "modprobe nvidia_peermem"
    )


def dead_nvlinks(status: str) -> Iterator[str]:
    """Problems with NVLinks that are down, from the output of `nvidia-smi nvlink --status`.

    NCCL silently routes around such links, if need be over PCIe.

    GPUs without NVLink are fine if no GPU of the node has one.
    """
    up = [
        len(re.findall(r"Link \d+: [\d.]+ GB/s", gpu))
        for gpu in re.split(r"^GPU \d+:", status, flags=re.MULTILINE)[1:]
    ]
    for gpu, count in enumerate(up):
        if count < max(up):
            yield (
                f"GPU {gpu} has {count} NVLinks that are up, GPU {up.index(max(up))} has {max(up)}"
            )


# Packages that a run imports. Each check imports a module with code or an extension, since an empty
# folder would pass as a package.
EVERYWHERE = {
    "torch": "torch",
    "megatron-core": "megatron.core",
    "transformers": "transformers",
    "sglang": "sglang.srt.server_args",
}
ON_GPUS = {
    "transformer-engine": "transformer_engine.pytorch",
    "sglang's kernels": "sgl_kernel",
    "flashinfer": "flashinfer",
    "triton": "triton",
}
MOONCAKE = {"mooncake": "mooncake.engine"}


def packages(gpu: bool) -> list[Check]:
    """A check for each package. It imports the package in a separate process."""
    modules = EVERYWHERE | MOONCAKE | (ON_GPUS if gpu else {})
    return [
        lambda name=name, module=module: _imported(name, module) for name, module in modules.items()
    ]


def _imported(name: str, module: str) -> Iterator[Finding]:
    code = f"import {module} as module; print(getattr(module, '__file__', None))"
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-c", code],
            capture_output=True,
            timeout=IMPORT_S,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        yield Finding(
            name,
            LACKS,
            f"import {module} took longer than {IMPORT_S:.0f} s",
            "is it on a slow file system?",
        )
        return
    if process.returncode == 0 and process.stdout.split()[-1:] not in ([], ["None"]):
        yield Finding(name, OK, f"{_version(name)}, import {module}")
        return
    cause = "it is an empty folder" if process.returncode == 0 else _last_line(process.stderr)
    text = f"import {module}: {cause}"
    if name == "mooncake":
        remedy = "weights.transport=mooncake is not there, auto takes another"
        yield Finding(name, NOTE, text, remedy)
    else:
        yield Finding(name, LACKS, text, "make setup in a checkout, on GPUs make setup-gpu")


def _last_line(stderr: str) -> str:
    return (stderr.strip().splitlines() or ["it died"])[-1]


def _version(name: str) -> str:
    from importlib import metadata

    for package in (
        name,
        "mooncake-transfer-engine-non-cuda",
        "mooncake-transfer-engine-cuda13",
        "sglang-kernel",
        "flashinfer-python",
    ):
        if package == name or name.split("'")[0].split("-")[0] in package:
            try:
                return metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
    return "of an unknown version"


def peers() -> Iterator[Finding]:
    """Checks with torch whether the GPUs of this machine can open each other's memory."""
    code = (
        "import json, torch; n = torch.cuda.device_count() or exit('torch sees no GPU'); "
        "print(json.dumps([[a, b] for a in range(n) for b in range(n) if a != b and not "
        "torch.cuda.can_device_access_peer(a, b)]))"
    )
    process = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        timeout=TRY_S,
        encoding="utf-8",
        errors="replace",
    )
    if process.returncode:
        yield Finding("CUDA", LACKS, _last_line(process.stderr), "does torch fit the driver?")
        return
    pairs = json.loads(process.stdout)
    if not pairs:
        yield Finding("peer access", OK, "every GPU opens every other's memory")
        return
    yield Finding(
        "peer access",
        NOTE,
        f"GPU {pairs[0][0]} cannot open the memory of GPU {pairs[0][1]}",
        "nvidia-smi topo -p2p r says why; weights between them go by shared memory or NCCL then",
    )


def writes(gpu: bool) -> Iterator[Finding]:
    """Test writes by each transport, from each GPU to the next, or in host memory
    (launch/trial_writes.py).
    """
    command = [sys.executable, "-P", "-m", "megarl.launch.trial_writes"]
    if gpu:
        command.append("--gpu")
    problem = ""
    try:
        process = subprocess.run(command, capture_output=True, timeout=WRITES_S)
        output = process.stdout
        if process.returncode:
            problem = _last_line(process.stderr.decode())
    except subprocess.TimeoutExpired as timeout:
        output = timeout.stdout or b""
        problem = f"not finished within {WRITES_S:.0f} s; nvidia-smi shows whether a GPU hangs"
    for line in output.splitlines():
        yield _written(**json.loads(line))
    if problem:
        yield Finding("test writes", LACKS, problem, "see what is lacking above")
    if gpu:
        yield Finding(
            "writes between nodes",
            NOTE,
            "not tried: they take a second node",
            "the first update of a run tries and audits them",
        )


def _written(
    kind: str, source: str, target: str, is_default: bool, bytes: int, gb_per_s: float, error: str
) -> Finding:
    """The finding that a trial_writes.Write amounts to."""
    name = f"write by {kind}"
    route = f"from {source} to {target}"
    if not error:
        mib = f"{bytes / (1 << 20):.0f} MiB"
        text = f"{mib} {route}, {gb_per_s:.2f} GB/s, every byte as it was sent"
        return Finding(name, OK, text)
    # weights.transport=auto uses it here, or trainer ranks need it
    state = LACKS if is_default or kind == "nccl" else NOTE
    return Finding(name, state, f"{route}: {error}", WRITE_REMEDIES.get(kind, ""))


WRITE_REMEDIES = {
    "cuda_ipc": "it needs peer access (nvidia-smi topo -p2p r) and one container, or --ipc=host; "
    "weights.transport=nccl needs neither",
    "shared_memory": "weights.transport=gloo does not need it",
    "mooncake": "weights.transport=nccl (on CPUs gloo) does not need it; auto would take it "
    "between several nodes",
    "nccl": "NCCL_DEBUG=INFO says why; trainer ranks need it too",
    "gloo": "does this host reach itself at 127.0.0.1?",
}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


DESCRIPTION = "what a run needs of this machine, what is there, and how to get the rest"
EXAMPLES = [
    "megarl doctor",
    "megarl doctor --json",
    "megarl doctor --gpu",
    "megarl doctor --warm configs/8b_aipo.yaml",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    compiled = (
        "also start an engine of CONFIG here, so that what it compiles is kept "
        "(launch.compile_cache); overrides may follow CONFIG"
    )
    parser.add_argument("--warm", metavar="CONFIG", help=compiled)
    parser.add_argument(
        "overrides",
        metavar="dotted.key=value",
        nargs="*",
        default=[],
        help="with --warm: overrides of CONFIG",
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="as for a node with GPUs; default: where NVIDIA's driver is loaded",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, and nothing else, on stdout"
    )


def run(arguments: argparse.Namespace) -> RunPlan | None:
    """Runs the checks.

    Returns the plan whose engine shall compile here, if any. Raises ConfigError, and RuntimeError
    if anything is lacking.
    """
    from megarl.config.errors import ConfigError

    gpu = arguments.gpu or has_driver()
    if arguments.warm and arguments.json:
        raise ConfigError("--json: must be left out with --warm, which prints what it starts")
    plan = _planned(arguments.warm, arguments.overrides)
    print_findings(
        [*system(gpu), *packages(gpu), *([peers] if gpu else []), lambda: writes(gpu)],
        f"a run on {'GPUs' if gpu else 'CPUs'}",
        gpu=gpu,
        as_json=arguments.json,
    )
    return plan


def _planned(config: str | None, settings: Sequence[str]) -> RunPlan | None:
    """The plan whose engine shall compile here.

    Raises ConfigError, also if an engine needs other or more GPUs than this machine has.
    """
    from megarl.config.errors import ConfigError
    from megarl.config.load import load_config
    from megarl.plan.resolve import resolve

    if config is None and settings:
        raise ConfigError(f"{settings[0]}: settings go with --warm CONFIG")
    if config is None:
        return None
    plan = resolve(load_config(config, settings))
    gpu = plan.config.cluster.gpu
    if gpu == "cpu":
        return plan
    gpu_count = len(gpus())
    if not gpu_count:
        raise ConfigError(
            f"cluster.gpu={gpu}: there is no GPU here to compile for; must be cpu for engines "
            "on CPUs"
        )
    for group in plan.groups:
        if group.settings.tp > gpu_count:
            raise ConfigError(
                f"{group.key}.tp={group.settings.tp}: must be at most {gpu_count}, the GPUs of "
                f"this machine, to compile for cluster.gpu={gpu} here"
            )
    return plan


def print_findings(checks: Sequence[Check], purpose: str, gpu: bool, as_json: bool = False) -> None:
    """Prints the findings. Raises RuntimeError if `purpose` needs something that is lacking."""
    findings = []
    for finding in run_checks(checks):
        findings.append(finding)
        if not as_json:
            print(finding, flush=True)
    lacking = [finding.what for finding in findings if finding.state == LACKS]
    if as_json:
        rows = [asdict(finding) for finding in findings]
        print(json.dumps({"ok": not lacking, "gpu": gpu, "findings": rows}))
    if lacking:
        raise RuntimeError(f"this machine lacks what {purpose} needs: {', '.join(lacking)}")
    if not as_json:
        print(f"all that {purpose} needs is there")


if __name__ == "__main__":
    try:
        print_findings(installing(), "an installation for GPUs", gpu=True)
    except RuntimeError as error:
        sys.exit(f"megarl: {error}")
