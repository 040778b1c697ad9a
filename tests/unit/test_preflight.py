"""The checks of `megarl doctor`, and of a node before a run.

The texts are those of NVIDIA's driver (550 to 580).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl import cli
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.launch import doctor, launcher, start
from megarl.launch.meeting import NodeReport, scratch_folder


def status(*links: str) -> str:
    """nvidia-smi's NVLink status, with one GPU per text and one letter per link: + is up, - is
    inactive.
    """
    lines = []
    for gpu, states in enumerate(links):
        lines.append(
            f"GPU {gpu}: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-0000-0000-00000000000{gpu})"
        )
        lines += [
            f"\t Link {link}: {'26.562 GB/s' if state == '+' else '<inactive>'}"
            for link, state in enumerate(states)
        ]
    return "\n".join(lines) + "\n"


def test_a_gpu_with_fewer_nvlinks_than_the_others_is_named():
    assert list(doctor.dead_nvlinks(status("+" * 18, "+" * 16 + "-+", "+" * 18))) == [
        "GPU 1 has 17 NVLinks that are up, GPU 0 has 18",
    ]
    assert list(doctor.dead_nvlinks(status("----", "++++"))) == [
        "GPU 0 has 0 NVLinks that are up, GPU 1 has 4"
    ]


@pytest.mark.parametrize(
    "text", ["", status("+" * 18, "+" * 18), status("----", "----"), status("", ""), status("++++")]
)
def test_nodes_whose_gpus_are_linked_alike_or_not_at_all_pass(text):
    assert list(doctor.dead_nvlinks(text)) == []


def test_infiniband_port_down_on_one_node_alone_is_named(tmp_path):
    """A port that is down on all nodes, often the second of two, does not prevent a run."""
    reports = []
    for node, states in enumerate((("4: ACTIVE\n", "1: DOWN\n"), ("1: DOWN\n", "2: INIT\n"), ())):
        for number, state in enumerate(states):
            port = tmp_path / str(node) / f"mlx5_{number}/ports/1"
            port.mkdir(parents=True)
            (port / "state").write_text(state)
        ports = launcher.infiniband_ports(tmp_path / str(node))
        reports.append(
            NodeReport(
                node, f"h{node}", "", gpus=8, ports={}, versions={}, problems=[], infiniband=ports
            )
        )
    assert launcher.disagreements(reports) == [
        "node 1 (h1): InfiniBand port mlx5_0:1 is down, but up on other nodes"
    ]


def smi(
    driver: str = "580.95.05",
    mode: str = "Default",
    names: tuple[str, ...] = ("NVIDIA H100 80GB HBM3",) * 2,
):
    """nvidia-smi on a machine whose GPUs have these names."""
    rows = "".join(f"{driver}, {name}, 81559 MiB, {mode}\n" for name in names)
    return lambda *arguments: (
        rows if arguments[0].startswith("--query-gpu") else status(*["++"] * len(names))
    )


def findings(monkeypatch, check, **shown) -> dict[str, doctor.Finding]:
    monkeypatch.setattr(doctor, "nvidia_smi", smi(**shown))
    return {finding.what: finding for finding in doctor.run_checks([check])}


def test_a_driver_that_fits_and_one_that_does_not(monkeypatch):
    assert {finding.state for finding in findings(monkeypatch, doctor._driver).values()} == {
        doctor.OK
    }
    old = findings(monkeypatch, doctor._driver, driver="570.124.06")["driver"]
    assert old.state == doctor.LACKS
    assert "580 or newer" in old.remedy
    mixed = findings(
        monkeypatch, doctor._driver, names=("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")
    )["GPUs"]
    assert mixed.state == doctor.NOTE
    assert "A100" in mixed.found
    assert "H100" in mixed.found
    exclusive = findings(monkeypatch, doctor._driver, mode="Exclusive_Process")["compute mode"]
    assert exclusive.state == doctor.LACKS
    assert exclusive.found == "GPU 0, 1: Exclusive_Process"
    assert "docker" in findings(monkeypatch, doctor._driver, names=())["driver"].remedy


def test_failed_check_is_reported_and_stops_no_other():
    def broken():
        raise OSError(5, "no such device")
        yield

    results = list(doctor.run_checks([broken, doctor._python]))
    assert results[0].state == doctor.LACKS
    assert "no such device" in results[0].found
    assert results[1].what == "python"


@pytest.mark.parametrize(
    "driver, modules, provider, lacking",
    [
        ("mlx5_core", "nvidia_peermem 16384 0\nnvidia 1 0\n", "libmlx5-rdmav34.so", set()),
        ("mlx5_core", "nvidia 1 0\n", "libmlx5-rdmav34.so", set()),  # through dmabuf
        ("mlx5_core", "ext4 1 0\n", "libmlx5-rdmav34.so", {"GPU memory by RDMA"}),
        ("mlx5_core", "nvidia_peermem 1 0\n", "libefa-rdmav34.so", {"libmlx5"}),
    ],
)
def test_network_cards_that_cannot_write_to_gpus_are_reported(
    tmp_path, monkeypatch, driver, modules, provider, lacking
):
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: f"lib{name}.so.1")
    monkeypatch.setattr(doctor.platform, "release", lambda: "6.8.0")
    results = {
        finding.what: finding
        for finding in doctor.run_checks(
            [of_network(tmp_path, monkeypatch, driver, modules, provider)]
        )
    }
    assert {check for check, result in results.items() if result.state == doctor.LACKS} - {
        "locked memory"
    } == lacking
    assert results["InfiniBand"].found == "mlx5_0"


def of_network(folder, monkeypatch, driver: str, modules: str, provider: str):
    """The check of the network on a machine with one card of this driver."""
    (folder / "drivers" / driver).mkdir(parents=True)
    (folder / "infiniband/mlx5_0/device").mkdir(parents=True)
    (folder / "infiniband/mlx5_0/device/driver").symlink_to(folder / "drivers" / driver)
    (folder / "modules").write_text(modules)
    (folder / "usr/lib/x/libibverbs").mkdir(parents=True)
    (folder / "usr/lib/x/libibverbs" / provider).touch()
    for name, path in (("INFINIBAND", "infiniband"), ("MODULES", "modules"), ("LIBRARIES", "usr")):
        monkeypatch.setattr(doctor, name, folder / path)
    return doctor._network


def test_efa_is_not_taken_for_infiniband(tmp_path, monkeypatch):
    results = {
        finding.what: finding
        for finding in doctor.run_checks(
            [of_network(tmp_path, monkeypatch, "efa", "nvidia 1 0\n", "libefa.so")]
        )
    }
    assert results["InfiniBand"].state == doctor.NOTE
    assert "weights.transport=nccl" in results["InfiniBand"].remedy


@pytest.mark.parametrize("release, state", [("13.0", doctor.OK), ("12.8", doctor.LACKS)])
def test_compiler_of_another_cuda_version_is_reported(tmp_path, monkeypatch, release, state):
    (tmp_path / "bin").mkdir()
    path = Path(
        program(
            tmp_path / "bin", f"echo 'Cuda compilation tools, release {release}, V{release}.48'"
        )
    )
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    path.rename(tmp_path / "bin/nvcc")
    finding = next(iter(doctor.run_checks([doctor._cuda_compilers])))
    assert (finding.state, finding.found) == (state, f"release {release}, {tmp_path}/bin/nvcc")


def test_compiler_that_does_not_answer_is_reported(tmp_path, monkeypatch):
    """And ninja is looked for all the same."""
    (tmp_path / "bin").mkdir()
    Path(program(tmp_path / "bin", "exec sleep 600")).rename(tmp_path / "bin/nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "TRY_S", 0.05)
    for script in (b"#!/bin/sh\nexec sleep 600\n", b"#!/no/such/shell\n"):
        (tmp_path / "bin/nvcc").write_bytes(script)
        nvcc, ninja = doctor.run_checks([doctor._cuda_compilers])
        assert (nvcc.state, nvcc.found) == (
            doctor.LACKS,
            f"release unknown, {tmp_path}/bin/nvcc",
        )
        assert "set CUDA_HOME" in nvcc.remedy
        assert ninja.what == "ninja"


def test_an_installation_asks_before_it_has_any_package():
    """`make setup-gpu` checks in an empty environment."""
    command = [sys.executable, "-S", "-m", "megarl.launch.doctor"]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60
    )
    assert "Traceback" not in result.stderr
    assert "glibc" in result.stdout
    assert "Python.h" in result.stdout


def test_the_environments_own_nvcc_is_taken_before_that_of_path(tmp_path, monkeypatch):
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    for folder in ("bin", "site/nvidia/cu13/bin"):
        (tmp_path / folder).mkdir(parents=True)
        Path(program(tmp_path / folder)).rename(tmp_path / folder / "nvcc")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path / "empty"))
    assert doctor.find_nvcc() == tmp_path / "bin/nvcc"
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path / "site"))
    assert doctor.find_nvcc() == tmp_path / "site/nvidia/cu13/bin/nvcc"


def test_folders_that_cannot_be_used_are_named(tmp_path, monkeypatch):
    (tmp_path / "home").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr(doctor.tempfile, "tempdir", None)
    results = {
        finding.what: finding for finding in doctor.run_checks([doctor._room, doctor._temporary])
    }
    assert results["disk for caches"].state == doctor.LACKS
    assert "set HOME" in results["disk for caches"].remedy
    assert results["TMPDIR"].state == doctor.NOTE
    assert results["TMPDIR"].found.startswith(f"{tmp_path / 'nowhere'} cannot be written to, so ")
    assert results["temporary files"].state in (doctor.OK, doctor.NOTE)


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["generator.tp=2"], "generator.tp=2: settings go with --warm CONFIG"),
        (["--warm", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["--warm", "configs/quickstart.yaml", "--json"], "--json: must be left out with --warm"),
        (
            ["--json", "trainer.tp=2", "--warm", "configs/quickstart.yaml", "bogus=1"],
            "--json: must be left out with --warm",
        ),
        (
            ["--warm", "configs/8b_aipo.yaml"],
            "cluster.gpu=H100: there is no GPU here to compile for",
        ),
        (
            ["--warm", "configs/quickstart.yaml", "generator.tp=7", "--gpu"],
            "generator.tp=7: must divide",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_any_check(arguments, problem, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "gpus", tuple)
    monkeypatch.setattr(doctor, "print_findings", lambda *_, **__: pytest.fail("it looked"))
    assert cli.main(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert problem in err
    assert not out


def test_warm_refuses_an_engine_of_more_gpus_than_present(monkeypatch, refusal):
    monkeypatch.setattr(doctor, "gpus", lambda: [object()] * 2)
    assert (
        "generator.tp=4: must be at most 2, the GPUs of this machine, to compile for "
        "cluster.gpu=H100 here"
        in refusal("doctor", "--warm", "configs/8b_aipo.yaml", "generator.tp=4")
    )


def program(folder: Path, *lines: str) -> str:
    path = folder / "python"
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return str(path)


def test_failed_test_writes_are_reported_with_a_remedy(tmp_path, monkeypatch):
    pair = {"source": "cuda:0", "target": "cuda:1", "bytes": 0, "gb_per_s": 0.0, "error": ""}
    attempts = [
        pair | {"kind": "cuda_ipc", "is_default": True, "error": "invalid device context"},
        pair | {"kind": "mooncake", "is_default": False, "error": "it does not start by rdma"},
        pair | {"kind": "nccl", "is_default": False, "error": "unhandled system error"},
        pair | {"kind": "gloo", "is_default": False, "bytes": 1 << 30, "gb_per_s": 2.0},
    ]
    lines = [f"echo '{json.dumps(finding)}'" for finding in attempts]
    monkeypatch.setattr(
        doctor.sys,
        "executable",
        program(tmp_path, *lines, "echo CUDA error: an illegal memory access >&2", "exit 3"),
    )
    *writes, died, between = doctor.writes(gpu=True)
    assert [finding.state for finding in writes] == [
        doctor.LACKS,
        doctor.NOTE,
        doctor.LACKS,
        doctor.OK,
    ]
    assert all(finding.remedy for finding in writes[:3])
    assert writes[0].what == "write by cuda_ipc"
    assert writes[0].found == "from cuda:0 to cuda:1: invalid device context"
    assert writes[3].found == "1024 MiB from cuda:0 to cuda:1, 2.00 GB/s, every byte as it was sent"
    assert died.state == doctor.LACKS
    assert died.found == "CUDA error: an illegal memory access"
    assert between.state == doctor.NOTE
    assert "a second node" in between.found


def test_hanging_test_writes_are_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.sys, "executable", program(tmp_path, "exec sleep 600"))
    monkeypatch.setattr(doctor, "WRITES_S", 0.05)
    (late,) = doctor.writes(gpu=False)
    assert late.state == doctor.LACKS
    assert late.found.startswith("not finished within 0 s")


def test_an_empty_folder_is_not_a_package(tmp_path, monkeypatch):
    (tmp_path / "hollow").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [hollow] = doctor._imported("torch", "hollow")
    [absent] = doctor._imported("torch", "nowhere_at_all")
    [present] = doctor._imported("torch", "json")
    assert hollow.state == absent.state == doctor.LACKS
    assert "an empty folder" in hollow.found
    assert "No module named" in absent.found
    assert present.state == doctor.OK


@pytest.fixture
def gpu_node(monkeypatch):
    """The problems that a sound node with two GPUs of this kind finds in its part of a run with
    these settings.
    """
    monkeypatch.setattr(doctor, "has_driver", lambda: True)
    monkeypatch.setattr(doctor, "node", lambda gpu: [])
    monkeypatch.setattr(
        launcher.importlib.util,
        "find_spec",
        lambda name: SimpleNamespace(origin="/env/transformer_engine/__init__.py"),
    )
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)

    def problems(
        trains: bool, serves: bool, settings: str = "", gpu: str = "NVIDIA H100 80GB HBM3, 9.0"
    ) -> list[str]:
        monkeypatch.setattr(doctor, "nvidia_smi", lambda *_: f"{gpu}\n{gpu}\n")
        plan: Any = SimpleNamespace(config=load_config("configs/8b_aipo.yaml", settings.split()))
        return launcher.problems_here(plan, trains, serves, shared=False)

    return problems


def test_gpu_trainer_needs_transformer_engine_or_local_layers(gpu_node, monkeypatch):
    assert gpu_node(True, True) == []
    for absent in (None, SimpleNamespace(origin=None)):
        monkeypatch.setattr(
            launcher.importlib.util, "find_spec", lambda name, absent=absent: absent
        )
        (problem,) = gpu_node(True, False)
        assert "trainer.local_layers=false: must be true" in problem
    assert gpu_node(False, True) == []
    assert gpu_node(True, False, "trainer.local_layers=true") == []


def test_shared_trainer_memory_has_no_expandable_segments(gpu_node, monkeypatch):
    for value, on in (
        ("expandable_segments:True", 1),
        ("max_split_size_mb:512, expandable_segments:true", 1),
        ("expandable_segments:False", 0),
    ):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", value)
        problems = gpu_node(True, True)
        assert len(problems) == on
        assert all(
            problem.startswith(f"PYTORCH_ALLOC_CONF={value}: must be without")
            for problem in problems
        )
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "weights.transport=mooncake" in gpu_node(True, False, "weights.transport=mooncake")[0]
    # engines: generator/server.py
    assert gpu_node(True, False, "weights.transport=nccl") == []
    assert gpu_node(False, True) == []


def test_fp8_blocks_are_refused_by_the_gpu_of_the_node(gpu_node):
    blocks = "generator.quantization=fp8_block"
    b200 = "NVIDIA B200, 10.0"
    assert gpu_node(False, True, blocks) == []
    assert gpu_node(False, True, "", b200) == []
    assert gpu_node(True, False, blocks, b200) == []
    (problem,) = gpu_node(False, True, blocks, b200)
    assert problem.startswith(
        "generator.quantization=fp8_block: with NVIDIA B200 here needs "
        "generator.server_args.fp8_gemm_runner_backend"
    )
    linear = f"{blocks} generator.server_args.fp8_gemm_runner_backend=flashinfer_trtllm"
    assert gpu_node(False, True, linear, b200) == []
    (problem,) = gpu_node(
        False, True, f"{linear} generator.server_args.moe_runner_backend=deep_gemm", b200
    )
    assert "needs generator.server_args.moe_runner_backend of triton; it is deep_gemm" in problem
    # SGLang uses CUTLASS there
    assert gpu_node(False, True, blocks, "NVIDIA RTX PRO 6000, 12.0") == []


def test_each_host_has_its_own_folder_of_compiled_kernels(tmp_path, monkeypatch):
    for name in start._CACHE_FOLDERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    monkeypatch.setattr(start.socket, "gethostname", lambda: "n7")
    base = start.compiled_folder(str(tmp_path / "kept"), tmp_path / "scratch")
    environment = start.compiling(base)
    assert environment.pop("TRITON_CACHE_DIR") == str(tmp_path / "mine")
    assert all(Path(path).parent == tmp_path / "kept/n7" for path in environment.values())
    assert len(set(environment.values())) == len(environment)


@pytest.mark.parametrize("home", ["file/below", "file", None])
def test_kernels_go_to_scratch_without_a_writable_home(tmp_path, monkeypatch, home):
    """HOME is below a file, is a file, or is not set for a user without an account.

    Then every cache still has a place.
    """
    for name in start._CACHE_FOLDERS:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("HOME", raising=False)
    if home:
        monkeypatch.setenv("HOME", str(tmp_path / home))
    else:
        monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert start.compiled_folder(None, tmp_path / "scratch") == tmp_path / "scratch/compiled"


def test_named_caches_that_cannot_be_written_are_refused(tmp_path, monkeypatch):
    for name in start._CACHE_FOLDERS:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError,
        match="launch.compile_cache=.*/file/a: must be a folder that can be written to: Not a "
        "directory",
    ):
        start.compiled_folder(str(tmp_path / "file/a"), tmp_path / "scratch")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(
        ConfigError,
        match="TORCHINDUCTOR_CACHE_DIR=.*/file: must be a folder that can be written to: File exists",
    ):
        start.compiled_folder(None, tmp_path / "scratch")


def test_a_launch_without_a_temporary_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    monkeypatch.setenv("TMPDIR", "/missing")
    with (
        pytest.raises(
            ConfigError, match="TMPDIR=/missing: no folder for temporary files can be written to"
        ),
        scratch_folder(),
    ):
        pass


def test_jobs_find_compilers_without_an_active_environment(monkeypatch):
    monkeypatch.setattr(doctor, "has_driver", lambda: True)
    monkeypatch.setattr(doctor, "find_nvcc", lambda: Path("/env/nvidia/cu13/bin/nvcc"))
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    environment = start.compiling(Path("kept"))
    assert environment["CUDA_HOME"] == "/env/nvidia/cu13"
    assert environment["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda")
    assert "CUDA_HOME" not in start.compiling(Path("kept"))
