"""The transport for each pair of ranks, by table; and refusals with their messages."""

from __future__ import annotations

import os
import sys

import msgspec
import pytest

from megarl.config.errors import ConfigError
from megarl.messaging.host import Host
from megarl.weight_sync.transports import mooncake
from megarl.weight_sync.transports.choice import (
    AUTO,
    check_transport,
    describe_pairs,
    on_one_host,
    this_host,
    transport_between,
    transport_class,
    transport_pairs,
)
from megarl.weight_sync.transports.gloo import GlooTransport
from megarl.weight_sync.transports.nccl import NcclTransport


def host(
    name: str,
    cuda: bool = False,
    mooncake: bool = True,
    infiniband: bool = False,
    network: str = "",
) -> Host:
    capabilities = ("mooncake",) * mooncake + ("infiniband",) * infiniband
    return Host(f"memory of {name}", f"network of {network or name}", name, cuda, capabilities)


@pytest.mark.parametrize(
    "trainer, generator, expected",
    [
        (host("a"), host("a"), "shared_memory"),
        (host("a", cuda=True), host("a", cuda=True), "cuda_ipc"),
        (host("a"), host("b"), "mooncake"),
        (host("a", cuda=True), host("b", cuda=True), "mooncake"),
        (host("a", cuda=True, mooncake=False), host("b", cuda=True), "nccl"),
        (host("a", mooncake=False), host("b"), "gloo"),
        (host("a", cuda=True), host("b", mooncake=False), "gloo"),  # one GPU is not enough for NCCL
        (host("a", cuda=True), host("a"), "shared_memory"),  # an engine on the CPU
        # a process without CUDA cannot map GPU memory
        (host("a"), host("a", cuda=True), "mooncake"),
        (host("a", mooncake=False), host("a", cuda=True), "gloo"),
        # two network namespaces of one machine are two hosts
        (host("a"), host("a", network="of a namespace"), "mooncake"),
        (host("a"), host("b", network="a"), "mooncake"),  # two containers on the host's network
    ],
)
def test_auto(trainer, generator, expected):
    assert transport_between(AUTO, trainer, generator) == expected


@pytest.mark.parametrize(
    "kind, trainer, generator, hindrance",
    [
        (
            "shared_memory",
            host("a"),
            host("b"),
            "share no memory: other machine, or container; between them work mooncake, gloo$",
        ),
        (
            "shared_memory",
            host("a", cuda=True),
            host("a", cuda=True),
            "lie on the GPU; between them work cuda_ipc, mooncake, nccl, gloo",
        ),
        ("cuda_ipc", host("a", cuda=True), host("b", cuda=True), "share no memory"),
        ("cuda_ipc", host("a"), host("a"), "the trainer runs without CUDA"),
        ("cuda_ipc", host("a", cuda=True), host("a"), "lie on the CPU"),
        ("nccl", host("a"), host("b", cuda=True), "do not both have CUDA"),
        (
            "mooncake",
            host("a"),
            host("b", mooncake=False),
            "does not import on the generator's host",
        ),
        (
            "mooncake",
            host("a", mooncake=False),
            host("b", mooncake=False),
            "on the trainer's and the generator's host",
        ),
    ],
)
def test_impossible_transport_is_refused_with_its_ranks(kind, trainer, generator, hindrance):
    with pytest.raises(ConfigError, match=hindrance) as caught:
        transport_pairs(kind, [trainer], [generator])
    message = (
        f"weights.transport={kind}: trainer rank 0 on {trainer.name} and generator rank 0 "
        f"on {generator.name} "
    )
    assert str(caught.value).startswith(message)


def test_shared_memory_on_request_crosses_network_namespaces():
    assert (
        transport_between("shared_memory", host("a"), host("a", network="of a namespace"))
        == "shared_memory"
    )


def test_pairs_are_mixed_and_both_sides_agree():
    trainers = [host("a"), host("b")]
    generators = [host("b"), host("a"), host("c", mooncake=False)]
    pairs = transport_pairs(AUTO, trainers, generators)
    listed = [[pairs.kinds[kind] for kind in of_generator] for of_generator in pairs.table.tolist()]
    assert listed == [
        ["mooncake", "shared_memory"],
        ["shared_memory", "mooncake"],
        ["gloo", "gloo"],
    ]
    assert pairs.trainers("shared_memory") == [{1}, {0}, set()]
    assert pairs.trainers("gloo")[2] == range(2)
    assert describe_pairs(pairs) == ", ".join(
        f"{kind} for 2 of 6 pairs of ranks" for kind in ("mooncake", "shared_memory", "gloo")
    )
    for generator, kinds in zip(generators, listed):
        travelled = msgspec.json.decode(msgspec.json.encode(generator), type=Host)
        assert [transport_between(AUTO, trainer, travelled) for trainer in trainers] == kinds


def test_rdma_needs_it_everywhere():
    capable = host("a", cuda=True, infiniband=True)
    plain = host("b", cuda=True)
    assert mooncake.protocol_of([capable, capable]) == "rdma"
    assert mooncake.protocol_of([capable, plain]) == "tcp"
    assert mooncake.protocol_of([host("a", infiniband=True)]) == "tcp"


@pytest.mark.parametrize(
    ("protocol", "devices", "forced"),
    [("tcp", ["mlx5_0"], "1"), ("tcp", [], None), ("rdma", ["mlx5_0"], None)],
)
def test_mooncake_is_kept_from_rdma_where_that_was_not_chosen(
    monkeypatch, tmp_path, protocol, devices, forced
):
    """Mooncake's engine ignores the protocol setting and uses its own host's devices, which a peer
    may not have.
    """
    pytest.importorskip("mooncake.engine")
    for device in devices:
        (tmp_path / device).mkdir()
    monkeypatch.setattr(mooncake, "_DEVICES", tmp_path)  # instead of /sys/class/infiniband
    monkeypatch.setenv("MC_FORCE_TCP", "")  # restored afterwards, whatever is set meanwhile
    monkeypatch.delenv("MC_FORCE_TCP")
    assert mooncake.open_engine("127.0.0.1", protocol).get_rpc_port()
    assert os.environ.get("MC_FORCE_TCP") == forced


def test_this_process_shares_a_host_with_itself():
    assert on_one_host(this_host(), this_host())
    assert this_host().name


def test_transport_missing_on_this_host_is_refused_early():
    if this_host().cuda:
        pytest.skip("this host has CUDA")
    for kind in ("nccl", "cuda_ipc"):
        with pytest.raises(
            ConfigError,
            match=f"weights.transport={kind}: two ranks on .*CUDA; between them work "
            "shared_memory, ",
        ):
            check_transport(kind)
    check_transport("gloo")


@pytest.mark.parametrize("name, expected", [("gloo", GlooTransport), ("nccl", NcclTransport)])
def test_names_of_transports_give_their_classes(name, expected):
    assert transport_class(name) is expected


def test_a_transport_of_ones_own_goes_by_its_import_path():
    path = "megarl.weight_sync.transports.gloo:GlooTransport"
    assert transport_pairs(path, [host("a")], [host("a")]).kinds == (path,)


@pytest.mark.parametrize(
    "name",
    [
        "no_such",
        "no.such.module:Class",
        "megarl.base.rollout_types:Sample",
        "megarl.base.rollout_types:Nothing",
        "megarl.weight_sync.transports.base:Transport",
    ],
)
def test_unknown_transport_is_a_config_error(name):
    with pytest.raises(ConfigError, match=f"weights.transport={name}"):
        transport_class(name)


def test_a_transport_with_one_end_is_a_config_error(tmp_path, monkeypatch):
    """Otherwise the missing end would show only when the engines run and their memory is opened."""
    body = "    connect = prepare = write = fence = close = lambda self, *_: None\n"
    (tmp_path / "half_transport.py").write_text(
        f"from megarl.weight_sync.transports.base import Transport\nclass Half(Transport):\n{body}"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError,
        match="weights.transport=half_transport:Half: must be a complete subclass .* whose "
        "`memory` is one of",
    ):
        transport_class("half_transport:Half")


def test_incomplete_transport_is_refused_with_what_it_lacks(tmp_path, monkeypatch):
    body = (
        "class Place(Memory): ...\nclass Bare(Transport):\n    memory = Place\n    connect = "
        "prepare = close = lambda self, *_: None\n"
    )
    (tmp_path / "bare_transport.py").write_text(
        f"from megarl.weight_sync.transports.base import Memory, Transport\n{body}"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="; it lacks fence, write, open; see docs/extending.md"):
        transport_class("bare_transport:Bare")


def test_a_class_in_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "own_transport.py").write_text(
        "from megarl.weight_sync.transports.gloo import GlooTransport as Mine\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry not in ("", os.getcwd())])
    assert transport_class("own_transport:Mine") is GlooTransport
