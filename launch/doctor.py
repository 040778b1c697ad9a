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
        return f"{self.state:<6}{self.what:<21} {self.found}" + (
            f"\n{'':<28}-> {self.remedy}" if self.remedy else ""
        )


Check = Callable[[], Iterator[Finding]]


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
    return [_driver, _nvlinks, _cuda_compilers, _compilers, _network] if gpu else []


def look(checks: Sequence[Check]) -> Iterator[Finding]:
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
    right = machine == "Linux x86_64"
    yield Finding(
        "system",
        OK if right else LACKS,
        machine,
        "" if right else "the locks are for Linux on x86-64",
    )
    library, version = platform.libc_ver()
    right = library == "glibc" and _numbers(version) >= GLIBC
    remedy = (
        ""
        if right
        else f"wheels of the GPU lock need {_dotted(GLIBC)}: Debian 12, Ubuntu 22.04, RHEL 9 or "
        "newer, or a container"
    )
    yield Finding("glibc", OK if right else LACKS, version or "no glibc", remedy)


def _python() -> Iterator[Finding]:
    right = sys.version_info[:2] == PYTHON
    remedy = (
        ""
        if right
        else f"megatron-core needs {_dotted(PYTHON)}, and SGLang has packages without wheels for "
        "newer ones"
    )
    yield Finding(
        "python", OK if right else LACKS, f"{platform.python_version()}, {sys.executable}", remedy
    )


def _limits() -> Iterator[Finding]:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    enough = most == resource.RLIM_INFINITY or most >= OPEN_FILES
    remedy = (
        ""
        if enough
        else f"raise the hard limit to {OPEN_FILES} (limits.conf, LimitNOFILE): every request has "
        "a connection"
    )
    yield Finding(
        "open files", OK if enough else NOTE, "unlimited" if most < 0 else f"{most} at most", remedy
    )


def _room() -> Iterator[Finding]:
    yield _free("/dev/shm", "/dev/shm", SHM_BYTES, "a container needs --shm-size=16g or --ipc=host")
    kept = (
        "packages and compiled kernels take it; set HOME, or UV_CACHE_DIR and launch.compile_cache"
    )
    yield _free("disk for caches", os.path.expanduser("~"), DISK_BYTES, kept)


def _temporary() -> Iterator[Finding]:
    """Checks the folder for sockets and stores of a launch.

    Raises FileNotFoundError if there is no temporary folder.
    """
    path = tempfile.gettempdir()
    given = os.environ.get("TMPDIR")
    if given and os.path.abspath(given) != path:
        yield Finding(
            "TMPDIR",
            NOTE,
            f"{given} cannot be written to, so {path} is taken",
            "set it to a folder on this machine's disk",
        )
    yield _free(
        "temporary files", path, 1 << 30, "sockets and stores of a launch lie there; set TMPDIR"
    )


def _free(what: str, path: str, wanted_bytes: int, why: str) -> Finding:
    if not os.path.isdir(path) or not os.access(path, os.W_OK):
        return Finding(
            what,
            LACKS,
            f"{path} {'cannot be written to' if os.path.isdir(path) else 'is not there'}",
            why,
        )
    free = shutil.disk_usage(path).free
    found = f"{free / (1 << 30):.1f} GiB free in {path}"
    return Finding(
        what,
        OK if free >= wanted_bytes else NOTE,
        found,
        "" if free >= wanted_bytes else f"{wanted_bytes >> 30} GiB are wanted: {why}",
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
    remedy = (
        "run chrony or systemd-timesyncd: traces of several nodes are laid side by side"
        if unsynchronised
        else ""
    )
    yield Finding(
        "clock",
        NOTE if unsynchronised else OK,
        "nothing keeps it right" if unsynchronised else "kept right",
        remedy,
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
    right = _numbers(version) >= DRIVER
    yield Finding(
        "driver",
        OK if right else LACKS,
        version,
        "" if right else f"CUDA 13 needs {_dotted(DRIVER)} or newer",
    )
    kinds = sorted({row[1] for row in rows})
    remedy = (
        ""
        if len(kinds) == 1
        else "trainer ranks and engines take GPUs by number: only CUDA_VISIBLE_DEVICES can keep "
        "unlike ones apart"
    )
    yield Finding(
        "GPUs",
        OK if len(kinds) == 1 else NOTE,
        f"{len(rows)}: {', '.join(kinds)}, {rows[0][2]}",
        remedy,
    )
    if exclusive := [
        str(number)
        for number, row in enumerate(rows)
        if "Exclusive" in row[3] or "Prohibited" in row[3]
    ]:
        yield Finding(
            "compute mode",
            LACKS,
            f"GPU {', '.join(exclusive)}: {rows[int(exclusive[0])][3]}",
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
    if not (status := nvidia_smi("nvlink", "--status")):
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
    if (nvcc := find_nvcc()) is None:
        yield Finding("nvcc", LACKS, "is not there", toolkit)
    else:
        try:
            told = subprocess.run(
                [nvcc, "--version"],
                capture_output=True,
                timeout=TRY_S,
                encoding="utf-8",
                errors="replace",
            ).stdout
        except (OSError, subprocess.TimeoutExpired):
            told = ""
        release = found[1] if (found := re.search(r"release (\d+\.\d+)", told)) else "unknown"
        right = _numbers(release)[:1] == (CUDA,)
        yield Finding(
            "nvcc", OK if right else LACKS, f"release {release}, {nvcc}", "" if right else toolkit
        )
    ninja = find_program("ninja")
    yield Finding(
        "ninja",
        OK if ninja else LACKS,
        ninja or "is not there",
        "" if ninja else "make setup-gpu; or apt-get install ninja-build",
    )


def _compilers() -> Iterator[Finding]:
    """Checks for C and C++ compilers: Triton compiles its launchers, nvcc calls C++, Transformer
    Engine compiles at installation.
    """
    # the same order as Triton's
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    yield Finding(
        "C compiler",
        OK if compiler else LACKS,
        compiler or "is not there",
        "" if compiler else "apt-get install gcc; or set CC",
    )
    compiler = shutil.which("c++") or shutil.which("g++")
    yield Finding(
        "C++ compiler",
        OK if compiler else LACKS,
        compiler or "is not there",
        "" if compiler else "apt-get install g++",
    )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    remedy = (
        ""
        if header.exists()
        else "apt-get install python3.12-dev, or take a Python that uv installs: Triton compiles "
        "against it"
    )
    yield Finding(
        "Python.h",
        OK if header.exists() else LACKS,
        str(header) if header.exists() else "is not there",
        remedy,
    )


def find_nvcc() -> Path | None:
    """CUDA's compiler, from CUDA_HOME, from wheels in this environment, or from PATH; None without
    one.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = [Path(home) / "bin/nvcc"] if home else []
    found += sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvcc"), reverse=True)
    found += [Path(path)] if (path := shutil.which("nvcc")) else []
    return next((each for each in found if os.access(each, os.X_OK)), None)


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
        there = ctypes.util.find_library(library)
        lacks = LACKS if devices else NOTE
        yield Finding(
            f"lib{library}",
            OK if there else lacks,
            there or "is not there",
            "" if there else f"apt-get install {package}",
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
    enough = resource.RLIM_INFINITY in (soft, hard)
    remedy = (
        ""
        if enough
        else "ulimit -l unlimited (limits.conf; Slurm: PropagateResourceLimitsExcept=MEMLOCK)"
    )
    yield Finding(
        "locked memory",
        OK if enough else LACKS,
        "unlimited" if enough else f"{hard >> 10} KiB at most",
        remedy,
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
    wanted = EVERYWHERE | MOONCAKE | (ON_GPUS if gpu else {})
    return [
        lambda name=name, module=module: _imported(name, module) for name, module in wanted.items()
    ]


def _imported(name: str, module: str) -> Iterator[Finding]:
    code = f"import {module} as found; print(getattr(found, '__file__', None))"
    try:
        done = subprocess.run(
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
    if done.returncode == 0 and done.stdout.split()[-1:] not in ([], ["None"]):
        yield Finding(name, OK, f"{_version(name)}, import {module}")
        return
    why = (
        "it is an empty folder"
        if done.returncode == 0
        else (done.stderr.strip().splitlines() or ["it died"])[-1]
    )
    optional = name == "mooncake"
    remedy = (
        "weights.transport=mooncake is not there, auto takes another"
        if optional
        else "make setup in a checkout, on GPUs make setup-gpu"
    )
    yield Finding(name, NOTE if optional else LACKS, f"import {module}: {why}", remedy)


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
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        timeout=TRY_S,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        yield Finding(
            "CUDA",
            LACKS,
            (done.stderr.strip().splitlines() or ["it died"])[-1],
            "does torch fit the driver?",
        )
        return
    apart = json.loads(done.stdout)
    found = (
        "every GPU opens every other's memory"
        if not apart
        else f"GPU {apart[0][0]} cannot open the memory of GPU {apart[0][1]}"
    )
    remedy = (
        ""
        if not apart
        else "nvidia-smi topo -p2p r says why; weights between them go by shared memory or NCCL then"
    )
    yield Finding("peer access", NOTE if apart else OK, found, remedy)


def writes(gpu: bool) -> Iterator[Finding]:
    """Test writes by each transport, from each GPU to the next, or in host memory
    (launch/neighbours.py).
    """
    command = [sys.executable, "-P", "-m", "megarl.launch.neighbours", *(["--gpu"] if gpu else [])]
    try:
        done = subprocess.run(command, capture_output=True, timeout=WRITES_S)
        told = done.stdout
        why = (
            (done.stderr.decode().strip().splitlines() or ["it died"])[-1]
            if done.returncode
            else ""
        )
    except subprocess.TimeoutExpired as late:
        told = late.stdout or b""
        why = f"not finished within {WRITES_S:.0f} s; nvidia-smi shows whether a GPU hangs"
    yield from (_written(**json.loads(line)) for line in told.splitlines())
    if why:
        yield Finding("test writes", LACKS, why, "see what is lacking above")
    if gpu:
        yield Finding(
            "writes between nodes",
            NOTE,
            "not tried: they take a second node",
            "the first update of a run tries and audits them",
        )


def _written(
    kind: str, source: str, target: str, chosen: bool, bytes: int, gb_per_s: float, error: str
) -> Finding:
    """The finding that a neighbours.Write amounts to."""
    what = f"write by {kind}"
    where = f"from {source} to {target}"
    if not error:
        return Finding(
            what,
            OK,
            f"{bytes / (1 << 20):.0f} MiB {where}, {gb_per_s:.2f} GB/s, every byte as it was sent",
        )
    # weights.transport=auto uses it here, or trainer ranks need it
    needed = chosen or kind == "nccl"
    return Finding(
        what, LACKS if needed else NOTE, f"{where}: {error}", WRITE_REMEDIES.get(kind, "")
    )


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
    return tuple(int(each) for each in re.findall(r"\d+", version)[:3])


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
    of_what = f"a run on {'GPUs' if gpu else 'CPUs'}"
    if arguments.warm and arguments.json:
        raise ConfigError("--json: must be left out with --warm, which prints what it starts")
    plan = _planned(arguments.warm, arguments.overrides)
    tell(
        [*system(gpu), *packages(gpu), *([peers] if gpu else []), lambda: writes(gpu)],
        of_what,
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
    here = len(gpus())
    if gpu != "cpu" and not here:
        raise ConfigError(
            f"cluster.gpu={gpu}: there is no GPU here to compile for; must be cpu for engines on CPUs"
        )
    for group in plan.groups:
        if gpu != "cpu" and (tp := group.settings.tp) > here:
            must = (
                f"must be at most {here}, the GPUs of this machine, to compile for "
                f"cluster.gpu={gpu} here"
            )
            raise ConfigError(f"{group.key}.tp={tp}: {must}")
    return plan


def tell(checks: Sequence[Check], of_what: str, gpu: bool, as_json: bool = False) -> None:
    """Prints the findings. Raises RuntimeError if `of_what` needs something that is lacking."""
    found = []
    for finding in look(checks):
        found.append(finding)
        if not as_json:
            print(finding, flush=True)
    lacking = [finding.what for finding in found if finding.state == LACKS]
    if as_json:
        print(
            json.dumps(
                {"ok": not lacking, "gpu": gpu, "findings": [asdict(each) for each in found]}
            )
        )
    if lacking:
        raise RuntimeError(f"this machine lacks what {of_what} needs: {', '.join(lacking)}")
    if not as_json:
        print(f"all that {of_what} needs is there")


if __name__ == "__main__":
    try:
        tell(installing(), "an installation for GPUs", gpu=True)
    except RuntimeError as error:
        sys.exit(f"megarl: {error}")
