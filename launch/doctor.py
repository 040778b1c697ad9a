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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.launch.gpus import gpus, nvidia_smi, run_program

if TYPE_CHECKING:
    from megarl.plan.resolve import RunPlan

OK = "ok"
NOTE = "note"
LACKS = "lacks"  # NOTE: a run works without it, but slower, or not with all features
DRIVER = 580  # first version for CUDA 13
CUDA = 13  # version in the GPU lock: PyTorch compiles only with this one
GLIBC = (2, 34)  # version that wheels in the GPU lock need
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

REMEDIES = {
    "system": "the locks are for Linux on x86-64",
    "glibc": "wheels of the GPU lock need 2.34: Debian 12, Ubuntu 22.04, RHEL 9 or newer, or a "
    "container",
    "python": "megatron-core needs 3.12, and SGLang has packages without wheels for newer ones",
    "open files": f"raise the hard limit to {OPEN_FILES} (limits.conf, LimitNOFILE): every request "
    "has a connection",
    "/dev/shm": "a container needs --shm-size=16g or --ipc=host",
    "disk for caches": "packages and compiled kernels take it; set HOME, or UV_CACHE_DIR and "
    "launch.compile_cache",
    "TMPDIR": "set it to a folder on this machine's disk",
    "temporary files": "sockets and stores of a launch lie there; set TMPDIR",
    "clock": "run chrony or systemd-timesyncd: traces of several nodes are laid side by side",
    "driver": f"CUDA 13 needs {DRIVER} or newer",
    "GPUs": "trainer ranks and engines take GPUs by number: only CUDA_VISIBLE_DEVICES can keep "
    "unlike ones apart",
    "compute mode": "nvidia-smi --compute-mode=0",
    "NVLink": "NCCL would silently go over PCIe: reset the GPUs, or take the node out",
    "nvcc": f"make setup-gpu installs it; or set CUDA_HOME to a toolkit of CUDA {CUDA}",
    "ninja": "make setup-gpu; or apt-get install ninja-build",
    "C compiler": "apt-get install gcc; or set CC",
    "C++ compiler": "apt-get install g++",
    "Python.h": "apt-get install python3.12-dev, or take a Python that uv installs: Triton "
    "compiles against it",
    "libibverbs": "apt-get install libibverbs1",
    "libnuma": "apt-get install libnuma1",
    "libcurl": "apt-get install libcurl4",
    "InfiniBand": "without it, weights between nodes go by NCCL or TCP; one node does not need it",
    "GPU memory by RDMA": "modprobe nvidia_peermem",
    "locked memory": "ulimit -l unlimited (limits.conf; Slurm: "
    "PropagateResourceLimitsExcept=MEMLOCK)",
    "mooncake": "weights.transport=mooncake is not there, auto takes another",
    "CUDA": "does torch fit the driver?",
    "peer access": "nvidia-smi topo -p2p r says why; weights between them go by shared memory or "
    "NCCL then",
    "write by cuda_ipc": "it needs peer access (nvidia-smi topo -p2p r) and one container, or "
    "--ipc=host; weights.transport=nccl needs neither",
    "write by shared_memory": "weights.transport=gloo does not need it",
    "write by mooncake": "weights.transport=nccl (on CPUs gloo) does not need it; auto would take "
    "it between several nodes",
    "write by nccl": "NCCL_DEBUG=INFO says why; trainer ranks need it too",
    "write by gloo": "does this host reach itself at 127.0.0.1?",
    "test writes": "see what is lacking above",
    "writes between nodes": "the first update of a run tries and audits them",
}

# A module with code or an extension of each package, since an empty folder would pass as a package.
PACKAGES = {
    "torch": "torch",
    "megatron-core": "megatron.core",
    "transformers": "transformers",
    "sglang": "sglang.srt.server_args",
    "mooncake": "mooncake.engine",
}
GPU_PACKAGES = {
    "transformer-engine": "transformer_engine.pytorch",
    "sglang's kernels": "sgl_kernel",
    "flashinfer": "flashinfer",
    "triton": "triton",
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


def _finding(
    subject: str, fine: bool, text: str, remedy: str | None = None, otherwise: str = LACKS
) -> Finding:
    """The finding OK if `fine`, else `otherwise` with the remedy; None: that of REMEDIES."""
    if fine:
        return Finding(subject, OK, text)
    if remedy is None:
        remedy = REMEDIES.get(subject, "")
    return Finding(subject, otherwise, text, remedy)


_lacks = partial(_finding, fine=False)
_note = partial(_finding, fine=False, otherwise=NOTE)


def has_driver() -> bool:
    """Whether NVIDIA's driver is loaded here, even without a working GPU.

    Imports no library, since torch takes seconds.
    """
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def machine(gpu: bool) -> list[Check]:
    """All checks, in the order in which they are printed."""
    checks: list[Check] = [_system, _python, _limits, _room, _temporary, _clock, *node(gpu)]
    modules = PACKAGES | GPU_PACKAGES if gpu else PACKAGES
    checks += [partial(_imported, name, module) for name, module in modules.items()]
    if gpu:
        checks.append(peers)
    return [*checks, partial(writes, gpu)]


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
            name = getattr(check, "func", check).__name__.strip("_")
            yield Finding(name, LACKS, f"could not be looked at: {error!r}")


def _system() -> Iterator[Finding]:
    system = f"{platform.system()} {platform.machine()}"
    yield _finding("system", system == "Linux x86_64", system)
    library, version = platform.libc_ver()
    fits = library == "glibc" and _numbers(version) >= GLIBC
    yield _finding("glibc", fits, version or "no glibc")


def _python() -> Iterator[Finding]:
    version = f"{platform.python_version()}, {sys.executable}"
    yield _finding("python", sys.version_info[:2] == (3, 12), version)


def _limits() -> Iterator[Finding]:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit == resource.RLIM_INFINITY:
        yield Finding("open files", OK, "unlimited")
    else:
        yield _finding("open files", limit >= OPEN_FILES, f"{limit} at most", otherwise=NOTE)


def _room() -> Iterator[Finding]:
    yield _free("/dev/shm", "/dev/shm", needed_gib=8)
    yield _free("disk for caches", os.path.expanduser("~"), needed_gib=30)


def _temporary() -> Iterator[Finding]:
    """Checks the folder for sockets and stores of a launch.

    Raises FileNotFoundError if there is no temporary folder.
    """
    path = tempfile.gettempdir()
    tmpdir = os.environ.get("TMPDIR")
    if tmpdir and os.path.abspath(tmpdir) != path:
        yield _note("TMPDIR", text=f"{tmpdir} cannot be written to, so {path} is taken")
    yield _free("temporary files", path, needed_gib=1)


def _free(subject: str, path: str, needed_gib: int) -> Finding:
    if not os.path.isdir(path):
        return _lacks(subject, text=f"{path} is not there")
    if not os.access(path, os.W_OK):
        return _lacks(subject, text=f"{path} cannot be written to")
    free_gib = shutil.disk_usage(path).free / (1 << 30)
    remedy = f"{needed_gib} GiB are wanted: {REMEDIES[subject]}"
    text = f"{free_gib:.1f} GiB free in {path}"
    return _finding(subject, free_gib >= needed_gib, text, remedy, otherwise=NOTE)


def _clock() -> Iterator[Finding]:
    """Checks that the clock is synchronised, since logs and traces of several nodes are compared.

    The kernel knows whether it is.
    """
    status = ctypes.create_string_buffer(512)  # struct timex; mode 0 only reads
    if ctypes.CDLL(None, use_errno=True).adjtimex(status) < 0:
        reason = os.strerror(ctypes.get_errno())
        remedy = "a container may forbid it: ask the host"
        yield _note("clock", text=f"cannot be asked: {reason}", remedy=remedy)
        return
    # the field after modes, offset, freq, maxerror and esterror
    if ctypes.c_int.from_buffer(status, 40).value & STA_UNSYNC:
        yield _note("clock", text="nothing keeps it right")
    else:
        yield Finding("clock", OK, "kept right")


def _driver() -> Iterator[Finding]:
    query = "--query-gpu=driver_version,name,memory.total,compute_mode"
    lines = nvidia_smi(query, "--format=csv,noheader").splitlines()
    if not lines:
        remedy = (
            f"install NVIDIA's driver {DRIVER} or newer; in a container, start it with --gpus all "
            "(docker) or --nv (apptainer)"
        )
        yield _lacks("driver", text="nvidia-smi shows no GPU", remedy=remedy)
        return
    versions, names, memories, modes = zip(*(line.split(", ") for line in lines))
    yield _finding("driver", _numbers(versions[0]) >= (DRIVER,), versions[0])
    kinds = sorted(set(names))
    text = f"{len(names)}: {', '.join(kinds)}, {memories[0]}"
    yield _finding("GPUs", len(kinds) == 1, text, otherwise=NOTE)
    exclusive = [gpu for gpu, mode in enumerate(modes) if re.search("Exclusive|Prohibited", mode)]
    if exclusive:
        gpu_list = ", ".join(map(str, exclusive))
        yield _lacks("compute mode", text=f"GPU {gpu_list}: {modes[exclusive[0]]}")


def capabilities() -> list[tuple[str, int]]:
    """(name, major number of the compute capability) of each GPU."""
    lines = nvidia_smi("--query-gpu=name,compute_cap", "--format=csv,noheader").splitlines()
    rows = [line.split(", ") for line in lines]
    return [(name, _numbers(capability)[0]) for name, capability in rows]


def _nvlinks() -> Iterator[Finding]:
    status = nvidia_smi("nvlink", "--status")
    problems = list(dead_nvlinks(status))
    for problem in problems:
        yield _lacks("NVLink", text=problem)
    if status and not problems:
        yield Finding("NVLink", OK, "no GPU has fewer links than another")


def dead_nvlinks(status: str) -> Iterator[str]:
    """Problems with NVLinks that are down, from the output of `nvidia-smi nvlink --status`.

    NCCL silently routes around such links, if need be over PCIe.

    GPUs without NVLink are fine if no GPU of the node has one.
    """
    sections = re.split(r"^GPU \d+:", status, flags=re.MULTILINE)[1:]
    up = [len(re.findall(r"Link \d+: [\d.]+ GB/s", section)) for section in sections]
    most = max(up, default=0)
    for gpu, count in enumerate(up):
        if count < most:
            yield f"GPU {gpu} has {count} NVLinks that are up, GPU {up.index(most)} has {most}"


def _cuda_compilers() -> Iterator[Finding]:
    """Checks for nvcc and ninja, with which engines compile kernels when they start."""
    nvcc = find_nvcc()
    if nvcc is None:
        yield _lacks("nvcc", text="is not there")
    else:
        release = _nvcc_release(nvcc)
        yield _finding("nvcc", _numbers(release)[:1] == (CUDA,), f"release {release}, {nvcc}")
    yield _file("ninja", find_program("ninja"))


def _nvcc_release(nvcc: Path) -> str:
    try:
        output = run_program(TRY_S, nvcc, "--version").stdout
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    match = re.search(r"release (\d+\.\d+)", output)
    return match[1] if match else "unknown"


def _file(subject: str, path: str | None, otherwise: str = LACKS) -> Finding:
    """The finding for a file that must be there. `path`: where it is; None if it is nowhere."""
    return _finding(subject, path is not None, path or "is not there", otherwise=otherwise)


def _compilers() -> Iterator[Finding]:
    """Checks for C and C++ compilers: Triton compiles its launchers, nvcc calls C++, Transformer
    Engine compiles at installation.
    """
    # the same order as Triton's
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    yield _file("C compiler", compiler)
    yield _file("C++ compiler", shutil.which("c++") or shutil.which("g++"))
    header = Path(sysconfig.get_path("include")) / "Python.h"
    yield _file("Python.h", str(header) if header.exists() else None)


def find_nvcc() -> Path | None:
    """CUDA's compiler, from CUDA_HOME, from wheels in this environment, or from PATH; None without
    one.
    """
    candidates = []
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        candidates.append(Path(home) / "bin/nvcc")
    wheels = Path(sysconfig.get_path("purelib"))
    candidates += sorted(wheels.glob("nvidia/cu*/bin/nvcc"), reverse=True)
    for nvcc in candidates:
        if os.access(nvcc, os.X_OK):
            return nvcc
    path = shutil.which("nvcc")
    return Path(path) if path else None


def find_program(name: str) -> str | None:
    """A program on PATH or beside this Python, since jobs often call an environment's programs
    without activating it.
    """
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def _network() -> Iterator[Finding]:
    """Checks the network between nodes. Mooncake needs RDMA's libraries even if it uses TCP."""
    devices = sorted(INFINIBAND.glob("*"))
    for name in ("ibverbs", "numa", "curl"):
        library = ctypes.util.find_library(name)
        yield _file(f"lib{name}", library, otherwise=LACKS if devices else NOTE)
    if not devices:
        yield _note("InfiniBand", text="no device")
        return
    names = ", ".join(device.name for device in devices)
    links = [(device / "device/driver").resolve().name for device in devices]
    drivers = {link.removesuffix("_core") for link in links}
    if drivers == {"efa"}:
        text = f"{names}: EFA, which is not InfiniBand"
        remedy = "Mooncake cannot write over it: set weights.transport=nccl"
        yield _note("InfiniBand", text=text, remedy=remedy)
        return
    yield Finding("InfiniBand", OK, names)
    for driver in sorted(drivers & NIC_MODULES.keys()):
        if not any(LIBRARIES.glob(f"lib*/**/lib{driver}*-rdmav*.so")):
            remedy = (
                f"install {NIC_MODULES[driver]}: Mooncake's library does not load without it, and "
                "weights would go by NCCL"
            )
            text = "its provider for libibverbs is not there"
            yield _lacks(f"lib{driver}", text=text, remedy=remedy)
    yield _registration()
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if resource.RLIM_INFINITY in (soft, hard):
        yield Finding("locked memory", OK, "unlimited")
    else:
        yield _lacks("locked memory", text=f"{hard >> 10} KiB at most")


def _registration() -> Finding:
    """Checks whether network cards can access GPU memory."""
    modules = {line.split()[0] for line in MODULES.read_text(encoding="utf-8").splitlines()}
    if "nvidia_peermem" in modules or "nv_peer_mem" in modules:
        text = "nvidia_peermem is loaded"
    elif "nvidia" in modules and _numbers(platform.release()) >= (5, 12):
        text = "by dmabuf (open kernel modules of the driver), as far as can be told without trying"
    else:
        return _lacks("GPU memory by RDMA", text="neither nvidia_peermem nor dmabuf")
    return Finding("GPU memory by RDMA", OK, text)


def _imported(name: str, module: str) -> Iterator[Finding]:
    """Imports the package in a separate process."""
    code = f"import {module} as module; print(getattr(module, '__file__', None))"
    remedy = REMEDIES.get(name, "make setup in a checkout, on GPUs make setup-gpu")
    otherwise = NOTE if name == "mooncake" else LACKS
    try:
        process = run_program(IMPORT_S, sys.executable, "-P", "-c", code)
    except subprocess.TimeoutExpired:
        text = f"import {module} took longer than {IMPORT_S:.0f} s"
        yield _lacks(name, text=text, remedy="is it on a slow file system?")
        return
    if process.returncode:
        cause = _last_line(process.stderr)
    elif process.stdout.split()[-1:] in ([], ["None"]):
        cause = "it is an empty folder"
    else:
        yield Finding(name, OK, f"{_version(module)}, import {module}")
        return
    yield _finding(name, False, f"import {module}: {cause}", remedy, otherwise)


def _last_line(stderr: str) -> str:
    return (stderr.strip().splitlines() or ["it died"])[-1]


def _version(module: str) -> str:
    from importlib import metadata

    packages = metadata.packages_distributions().get(module.split(".")[0])
    if packages:
        return metadata.version(packages[0])
    return "of an unknown version"


def peers() -> Iterator[Finding]:
    """Checks with torch whether the GPUs of this machine can open each other's memory."""
    code = (
        "import json, torch; n = torch.cuda.device_count() or exit('torch sees no GPU'); "
        "print(json.dumps([[a, b] for a in range(n) for b in range(n) if a != b and not "
        "torch.cuda.can_device_access_peer(a, b)]))"
    )
    process = run_program(TRY_S, sys.executable, "-P", "-c", code)
    if process.returncode:
        yield _lacks("CUDA", text=_last_line(process.stderr))
        return
    pairs = json.loads(process.stdout)
    if pairs:
        gpu, other = pairs[0]
        yield _note("peer access", text=f"GPU {gpu} cannot open the memory of GPU {other}")
    else:
        yield Finding("peer access", OK, "every GPU opens every other's memory")


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
        yield _lacks("test writes", text=problem)
    if gpu:
        yield _note("writes between nodes", text="not tried: they take a second node")


def _written(
    kind: str, source: str, target: str, is_default: bool, bytes: int, gb_per_s: float, error: str
) -> Finding:
    """The finding that a trial_writes.Write amounts to."""
    route = f"from {source} to {target}"
    if error:
        # weights.transport=auto uses it here, or trainer ranks need it
        otherwise = LACKS if is_default or kind == "nccl" else NOTE
        return _finding(f"write by {kind}", False, f"{route}: {error}", otherwise=otherwise)
    size = f"{bytes / (1 << 20):.0f} MiB"
    text = f"{size} {route}, {gb_per_s:.2f} GB/s, every byte as it was sent"
    return Finding(f"write by {kind}", OK, text)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


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
    overrides = "with --warm: overrides of CONFIG"
    gpu = "as for a node with GPUs; default: where NVIDIA's driver is loaded"
    as_json = "print one JSON object, and nothing else, on stdout"
    parser.add_argument("--warm", metavar="CONFIG", help=compiled)
    parser.add_argument("overrides", metavar="dotted.key=value", nargs="*", help=overrides)
    parser.add_argument("--gpu", action="store_true", help=gpu)
    parser.add_argument("--json", action="store_true", help=as_json)


def run(arguments: argparse.Namespace) -> RunPlan | None:
    """Runs the checks.

    Returns the plan whose engine shall compile here, if any. Raises ConfigError, and RuntimeError
    if anything is lacking.
    """
    from megarl.config.errors import ConfigError

    gpu = arguments.gpu or has_driver()
    if arguments.warm and arguments.json:
        raise ConfigError("--json: must be left out with --warm, which prints what it starts")
    if arguments.overrides and not arguments.warm:
        raise ConfigError(f"{arguments.overrides[0]}: settings go with --warm CONFIG")
    plan = _planned(arguments.warm, arguments.overrides) if arguments.warm else None
    purpose = "a run on GPUs" if gpu else "a run on CPUs"
    print_findings(machine(gpu), purpose, gpu=gpu, as_json=arguments.json)
    return plan


def _planned(config: str, settings: Sequence[str]) -> RunPlan:
    """The plan whose engine shall compile here.

    Raises ConfigError, also if an engine needs other or more GPUs than this machine has.
    """
    from megarl.config.errors import ConfigError
    from megarl.config.load import load_config
    from megarl.plan.resolve import resolve

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
        rows = list(map(asdict, findings))
        print(json.dumps({"ok": not lacking, "gpu": gpu, "findings": rows}))
    if lacking:
        raise RuntimeError(f"this machine lacks what {purpose} needs: {', '.join(lacking)}")
    if not as_json:
        print(f"all that {purpose} needs is there")


if __name__ == "__main__":
    # for `make setup-gpu`, which may run on a machine without a GPU
    try:
        installation = [_system, _python, _room, _temporary, _compilers]
        print_findings(installation, "an installation for GPUs", gpu=True)
    except RuntimeError as error:
        sys.exit(f"megarl: {error}")
