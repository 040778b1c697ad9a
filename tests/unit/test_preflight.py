"""What a node checks about its links. The texts are in the form that NVIDIA's driver (550 to 580) prints."""

from __future__ import annotations

import pytest

from megarl.launch import preflight
from megarl.launch.meeting import NodeReport


def status(*links: str) -> str:
    """Of one GPU per text: a letter per link, + up, - inactive."""
    lines = []
    for gpu, states in enumerate(links):
        lines.append(f"GPU {gpu}: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-0000-0000-00000000000{gpu})")
        lines += [f"\t Link {link}: {'26.562 GB/s' if state == '+' else '<inactive>'}" for link, state in enumerate(states)]
    return "\n".join(lines) + "\n"


def test_a_gpu_with_fewer_nvlinks_than_the_others_is_named():
    assert list(preflight.dead_nvlinks(status("+" * 18, "+" * 16 + "-+", "+" * 18))) == [
        "GPU 1 has 17 NVLinks that are up, GPU 0 has 18",
    ]
    assert list(preflight.dead_nvlinks(status("----", "++++"))) == ["GPU 0 has 0 NVLinks that are up, GPU 1 has 4"]


@pytest.mark.parametrize("text", ["", status("+" * 18, "+" * 18), status("----", "----"), status("", ""), status("++++")])
def test_nodes_whose_gpus_are_linked_alike_or_not_at_all_pass(text):
    assert list(preflight.dead_nvlinks(text)) == []


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
