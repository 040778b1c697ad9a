"""What a machine is asked by `megarl doctor`, and a node before a run. Texts are as NVIDIA's driver (550 to 580) prints them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.launch import doctor, environment, preflight
from megarl.launch.meeting import NodeReport


def status(*links: str) -> str:
    """Of one GPU per text: a letter per link, + up, - inactive."""
    lines = []
    for gpu, states in enumerate(links):
        lines.append(f"GPU {gpu}: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-0000-0000-00000000000{gpu})")
        lines += [f"\t Link {link}: {'26.562 GB/s' if state == '+' else '<inactive>'}" for link, state in enumerate(states)]
    return "\n".join(lines) + "\n"


def test_a_gpu_with_fewer_nvlinks_than_the_others_is_named():
    assert list(doctor.dead_nvlinks(status("+" * 18, "+" * 16 + "-+", "+" * 18))) == [
        "GPU 1 has 17 NVLinks that are up, GPU 0 has 18",
    ]
    assert list(doctor.dead_nvlinks(status("----", "++++"))) == ["GPU 0 has 0 NVLinks that are up, GPU 1 has 4"]


@pytest.mark.parametrize("text", ["", status("+" * 18, "+" * 18), status("----", "----"), status("", ""), status("++++")])
def test_nodes_whose_gpus_are_linked_alike_or_not_at_all_pass(text):
    assert list(doctor.dead_nvlinks(text)) == []


def test_an_infiniband_port_that_is_down_here_and_up_elsewhere_is_named(tmp_path):
    """One that is down on all nodes, as the second of two ports often is, keeps nobody from running."""
    reports = []
    for node, states in enumerate((("4: ACTIVE\n", "1: DOWN\n"), ("1: DOWN\n", "2: INIT\n"), ())):
        for number, state in enumerate(states):
            port = tmp_path / str(node) / f"mlx5_{number}/ports/1"
            port.mkdir(parents=True)
            (port / "state").write_text(state)
        ports = preflight.infiniband_ports(tmp_path / str(node))
        reports.append(NodeReport(node, f"h{node}", "", gpus=8, ports={}, versions={}, problems=[], infiniband=ports))
    assert preflight.disagreements(reports) == ["node 1 (h1): InfiniBand port mlx5_0:1 is down, but up on other nodes"]


def smi(driver: str = "580.95.05", mode: str = "Default", names: tuple[str, ...] = ("NVIDIA H100 80GB HBM3",) * 2):
    """nvidia-smi of a machine whose GPUs have these names."""
    rows = "".join(f"{driver}, {name}, 81559 MiB, {mode}\n" for name in names)
    return lambda *arguments: rows if arguments[0].startswith("--query-gpu") else status(*["++"] * len(names))


def findings(monkeypatch, check, **shown) -> dict[str, doctor.Finding]:
    monkeypatch.setattr(doctor, "nvidia_smi", smi(**shown))
    return {finding.what: finding for finding in doctor.look([check])}


def test_a_driver_that_fits_and_one_that_does_not(monkeypatch):
    assert {each.state for each in findings(monkeypatch, doctor._driver).values()} == {doctor.OK}
    old = findings(monkeypatch, doctor._driver, driver="570.124.06")["driver"]
    assert old.state == doctor.LACKS and "580 or newer" in old.remedy
    mixed = findings(monkeypatch, doctor._driver, names=("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"))["GPUs"]
    assert mixed.state == doctor.NOTE and "A100" in mixed.found and "H100" in mixed.found
    exclusive = findings(monkeypatch, doctor._driver, mode="Exclusive_Process")["compute mode"]
    assert exclusive.state == doctor.LACKS and exclusive.found == "GPU 0, 1: Exclusive_Process"
    assert "docker" in findings(monkeypatch, doctor._driver, names=())["driver"].remedy


def test_a_check_that_fails_is_told_and_the_others_go_on():
    def broken():
        raise OSError(5, "no such device")
        yield

    found = list(doctor.look([broken, doctor._python]))
    assert found[0].state == doctor.LACKS and "no such device" in found[0].found and found[1].what == "python"


@pytest.mark.parametrize(
    "driver, modules, provider, lacking",
    [
        ("mlx5_core", "nvidia_peermem 16384 0\nnvidia 1 0\n", "libmlx5-rdmav34.so", set()),
        ("mlx5_core", "nvidia 1 0\n", "libmlx5-rdmav34.so", set()),  # by dmabuf
        ("mlx5_core", "ext4 1 0\n", "libmlx5-rdmav34.so", {"GPU memory by RDMA"}),
        ("mlx5_core", "nvidia_peermem 1 0\n", "libefa-rdmav34.so", {"libmlx5"}),
    ],
)
def test_network_cards_that_cannot_write_to_gpus_are_named(tmp_path, monkeypatch, driver, modules, provider, lacking):
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: f"lib{name}.so.1")
    monkeypatch.setattr(doctor.platform, "release", lambda: "6.8.0")
    found = {finding.what: finding for finding in doctor.look([of_network(tmp_path, monkeypatch, driver, modules, provider)])}
    assert {what for what, each in found.items() if each.state == doctor.LACKS} - {"locked memory"} == lacking
    assert found["InfiniBand"].found == "mlx5_0"


def of_network(folder, monkeypatch, driver: str, modules: str, provider: str):
    """The check of the network, on a machine with one card of this driver."""
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
    found = {finding.what: finding for finding in doctor.look([of_network(tmp_path, monkeypatch, "efa", "nvidia 1 0\n", "libefa.so")])}
    assert found["InfiniBand"].state == doctor.NOTE and "weights.transport=nccl" in found["InfiniBand"].remedy


def test_an_empty_folder_is_not_a_package(tmp_path, monkeypatch):
    (tmp_path / "hollow").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (hollow,), (absent,), (there,) = (list(doctor._imported("torch", module)) for module in ("hollow", "nowhere_at_all", "json"))
    assert hollow.state == absent.state == doctor.LACKS and "an empty folder" in hollow.found and "No module named" in absent.found
    assert there.state == doctor.OK


def test_a_node_with_gpus_and_without_transformer_engine_trains_only_where_it_is_asked_to(monkeypatch):
    monkeypatch.setattr(doctor, "has_driver", lambda: True)
    monkeypatch.setattr(doctor, "node", lambda gpu: [])
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    plan: Any = SimpleNamespace(config=SimpleNamespace(trainer=SimpleNamespace(local_layers=False)))
    assert "trainer.local_layers=false: must be true" in preflight.problems_here(plan, trains=True, shared=False)[0]
    assert preflight.problems_here(plan, trains=False, shared=False) == []
    plan.config.trainer.local_layers = True
    assert preflight.problems_here(plan, trains=True, shared=False) == []


def test_each_host_keeps_what_it_compiles_in_a_folder_of_its_own(tmp_path, monkeypatch):
    for name in environment._COMPILED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    monkeypatch.setattr(environment.socket, "gethostname", lambda: "n7")
    found = environment.compiling(str(tmp_path))
    assert found.pop("TRITON_CACHE_DIR") == "/mine"
    assert all(Path(path).parent == tmp_path / "n7" for path in found.values()) and len(set(found.values())) == len(found)


def test_jobs_find_compilers_without_an_active_environment(monkeypatch):
    monkeypatch.setattr(doctor, "has_driver", lambda: True)
    monkeypatch.setattr(doctor, "find_nvcc", lambda: Path("/env/nvidia/cu13/bin/nvcc"))
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    found = environment.compiling(None)
    assert found["CUDA_HOME"] == "/env/nvidia/cu13" and found["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda")
    assert "CUDA_HOME" not in environment.compiling(None)
