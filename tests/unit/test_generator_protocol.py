"""The requests of launcher and generator process to an engine, and the comparison of audit hashes.

No engine runs here.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import pickle
import pickletools
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from small_maps import tiny_map

from megarl.base.geometry import Box, GeneratorTopology
from megarl.config.errors import ConfigError
from megarl.generator import cpu_support
from megarl.generator.client import Parallelism, content_of, tensor_payload
from megarl.generator.hooks import once
from megarl.generator.server import EngineKeys, EngineSettings, server_command
from megarl.messaging.host import Host
from megarl.messaging.link import Hub, Peer, RunKey
from megarl.messaging.messages import WorkerReply
from megarl.reshard.forwarding import Relay, SentTensors
from megarl.reshard.layout import LayoutError, LocalTensor
from megarl.weight_sync import commands
from megarl.weight_sync.audit import (
    AuditError,
    compare,
    differing,
    digest_of,
    expected_hashes_of,
    packed,
    packed_shares,
)
from megarl.weight_sync.commands import Audit, Connect, ConnectRelays, Open
from megarl.weight_sync.engine.loader import EngineWorker, as_arranged
from megarl.weight_sync.transports.base import GroupMembers, Incoming, Offer, RemoteTensor
from megarl.weight_sync.workers import Workers, check_layout, check_parallelism

KEYS = EngineKeys("a", "b")
SETTINGS = EngineSettings(
    "models/x",
    "float32",
    port=1234,
    context_length=64,
    max_running_requests=8,
    tp=2,
    device="cpu",
    cores=(0, 1),
)


def test_post_load_work_runs_on_modules_then_the_model():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    processed: list[str] = []
    model.post_load_weights = lambda: processed.append("the model's own")
    worker = EngineWorker(lambda: 0, Host)
    worker.finish(
        lambda part, device: processed.extend(name for name, _ in part.named_modules()),
        model,
        torch.device("cpu"),
    )
    assert processed == ["", "0", "1", "the model's own"]


def test_server_command_keeps_keys_out_of_argv():
    keys = EngineKeys.generate()
    argv, environment = server_command(SETTINGS, keys)
    assert len({keys.api, keys.admin}) == 2 and min(len(keys.api), len(keys.admin)) >= 40
    assert not any(key in word for key in (keys.api, keys.admin) for word in argv)
    assert {keys.api, keys.admin} <= set(environment.values())
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"


def test_server_command_prefers_the_users_server_args():
    argv, _ = server_command(
        SETTINGS, EngineKeys("a", "b"), {"chunked_prefill_size": 32, "sleep_on_idle": False}
    )
    arguments = json.loads(argv[-1])
    assert arguments["chunked_prefill_size"] == 32 and arguments["sleep_on_idle"] is False
    assert arguments["host"] == "127.0.0.1"
    assert arguments["tp_size"] == 2
    assert arguments["max_total_tokens"] == 8 * 64


def test_server_command_of_replicas_of_attention():
    """SGLang itself divides the requests, but not the keys and values."""
    argv, _ = server_command(dataclasses.replace(SETTINGS, dp_attention=2), EngineKeys("a", "b"))
    arguments = json.loads(argv[-1])
    assert (arguments["tp_size"], arguments["attn_dp_size"]) == (2, 2)
    assert (arguments["max_running_requests"], arguments["max_total_tokens"]) == (8, 8 * 64 // 2)


def test_gpu_command_has_none_of_the_cpu_settings():
    settings = EngineSettings("models/x", "bfloat16", 1, 64, 8, device="cuda")
    argv, environment = server_command(settings, KEYS)
    arguments = json.loads(argv[-1])
    for name in (
        "attention_backend",
        "disable_overlap_schedule",
        "sleep_on_idle",
        "max_total_tokens",
    ):
        assert name not in arguments
    for name in ("SGLANG_USE_CPU_ENGINE", "SGLANG_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        assert name not in environment
    cpu_argv, _ = server_command(SETTINGS, KEYS)
    cpu_arguments = json.loads(cpu_argv[-1])
    assert arguments["moe_runner_backend"] == "triton"
    assert arguments["enable_fp32_lm_head"] is True
    assert cpu_arguments.get("moe_runner_backend") is None
    assert cpu_arguments.get("enable_fp32_lm_head") is None


def test_gpu_engines_disable_expandable_segments(monkeypatch):
    """Other processes can open only memory that is in fixed segments."""
    settings = EngineSettings("models/x", "bfloat16", 1, 64, 8, device="cuda")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    _, environment = server_command(settings, KEYS)
    allocator = "max_split_size_mb:512,expandable_segments:False"
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == allocator
    assert "PYTORCH_ALLOC_CONF" not in environment
    assert "PYTORCH_CUDA_ALLOC_CONF" not in server_command(SETTINGS, KEYS)[1]


def test_no_gpu_engine_computes_in_float32(monkeypatch):
    settings = EngineSettings("models/x", "float32", 1, 64, 8)
    monkeypatch.setattr(cpu_support, "cuda_available", lambda: True)
    with pytest.raises(
        ConfigError, match="model.dtype=float32: must be bfloat16 for engines on GPUs"
    ):
        server_command(settings, KEYS)
    assert server_command(settings, KEYS, {"attention_backend": "torch_native"})


def test_only_gpu_engines_take_a_dtype_of_the_kv_cache(monkeypatch):
    settings = EngineSettings("models/x", "bfloat16", 1, 64, 8)
    monkeypatch.setattr(cpu_support, "cuda_available", lambda: True)
    assert server_command(settings, KEYS, {"kv_cache_dtype": "fp8_e4m3"})
    monkeypatch.setattr(cpu_support, "cuda_available", lambda: False)
    assert server_command(settings, KEYS, {"kv_cache_dtype": "auto"})
    for planned in (settings, dataclasses.replace(settings, device="cpu")):
        with pytest.raises(ConfigError) as error:
            server_command(planned, KEYS, {"kv_cache_dtype": "fp8_e4m3"})
        assert str(error.value) == (
            "generator.server_args.kv_cache_dtype=fp8_e4m3: must be auto for engines on CPUs: "
            "their attention computes in the model's dtype alone"
        )


def test_tensor_payload_is_the_same_where_megatron_is_imported(monkeypatch):
    """Megatron replaces a function of torch, and pickle would then refer to the replacement."""
    plain = tensor_payload(b"abc")
    replaced = types.ModuleType("megatron.core.safe_globals")
    exec("def safe_load_from_bytes(b): ...", vars(replaced))
    monkeypatch.setitem(sys.modules, replaced.__name__, replaced)
    monkeypatch.setattr(torch.storage, "_load_from_bytes", replaced.safe_load_from_bytes)
    assert tensor_payload(b"abc") == plain
    assert b"ctorch.storage\n_load_from_bytes\n" in base64.b64decode(plain)


def test_tensor_payload_is_plain_data_in_a_pickle():
    content = bytes(range(256)) * 3
    pickled = base64.b64decode(tensor_payload(content))
    named = {
        str(argument)
        for opcode, argument, _ in pickletools.genops(pickled)
        if "GLOBAL" in opcode.name
    }
    assert named == {
        "torch._utils _rebuild_tensor_v2",
        "torch.storage _load_from_bytes",
        "collections OrderedDict",
    }
    assert content_of(pickle.loads(pickled)) == content


def test_command_is_read_from_the_device_of_the_worker():
    """SGLang's WeightUpdater moves every tensor to the worker's GPU before it calls a loader, but
    NumPy reads only host memory.
    """
    on_gpu = SimpleNamespace(cpu=lambda: torch.frombuffer(bytearray(b"command"), dtype=torch.uint8))
    assert content_of([("command", on_gpu)]) == b"command"


def test_commands_survive_the_wire():
    box = Box((0, 2), (3, 4))
    members = GroupMembers((0,), (1, 2), (0, 0, 1))
    for command in (
        Connect(2, "tcp://h:1", "new", "/k"),
        Open(
            "gloo",
            "a.b:C",
            {1: Offer("tcp", [("w", box)], "h:1", members, [Incoming(0, "w", box, 1)], 5.0)},
        ),
        ConnectRelays(b"endpoints", {1: [Relay(1, 2, "w", 3, 24)]}, 5.0),
        Audit(),
    ):
        assert commands.decode(commands.encode(command)) == command


def test_compare_adds_shares_and_names_differences():
    tensors = SentTensors(tiny_map(tp=2, pp=1, dp=2, generator_tp=1))
    name = "model.layers.1.mlp.down_proj.weight"
    senders = {
        copy.source_rank for copy in tensors.map.writes_to(1) if copy.destination_tensor == name
    }
    assert len(senders) == 2
    hashes: list[dict[str, int]] = [{}, {}]  # of each engine
    for place in range(tensors.places[-1]):
        engine, tensor = tensors.name(place)
        hashes[engine][tensor] = 0
    sent = []
    for source in range(4):
        share = 2**64 - 1 - source
        shares: dict[int, dict[str, int]] = {}
        for place in tensors.sent_by(source):
            engine, tensor = tensors.name(place)
            shares.setdefault(engine, {})[tensor] = share
            hashes[engine][tensor] = (hashes[engine][tensor] + share) % 2**64
        sent.append(packed_shares(shares))
    compare([packed(hashes[0]), packed(hashes[1])], sent, tensors)
    hashes[1][name] += 1
    ranks = ", ".join(map(str, sorted(senders)))
    problem = f"failed:\n{name} on generator rank 1 is not what trainer rank {ranks} sent$"
    with pytest.raises(AuditError, match=problem):
        compare([packed(hashes[0]), packed(hashes[1])], sent, tensors)
    compare([packed(hashes[0]), None], sent, tensors)  # a lost engine gives no hashes
    digests = [digest_of(packed(hashes[0])), digest_of(packed(hashes[1]))]
    expected = expected_hashes_of(sent, tensors)
    assert differing(digests, expected, tensors) == [1]
    assert not differing([digests[0], None], expected, tensors)
    del hashes[0][name]
    hashed = len(hashes[0])
    problem = f"generator rank 0 has hashed {hashed} tensors, the reshard map has {hashed + 1}"
    with pytest.raises(AuditError, match=problem):
        compare([packed(hashes[0]), None], sent, tensors)
    with pytest.raises(AuditError, match="trainer rank 3 has sent hashes of 0 tensors"):
        compare([None, None], [*sent[:3], b""], tensors)


def test_layout_check_names_each_difference():
    planned = [
        LocalTensor(name, (4, 2), "float32", ()) for name in ("same", "gone", "strided", "bf16")
    ]
    planned += [
        LocalTensor("transposed", (4, 2), "float32", (), (2, 4)),
        LocalTensor("scalar", (1, 1), "float32", (), ()),
    ]
    planned += [LocalTensor("square", (3, 3), "float32", (), (3, 3))]
    live = [
        RemoteTensor("same", (4, 2), "float32", (2, 1)),
        RemoteTensor("transposed", (2, 4), "float32", (1, 2)),
        RemoteTensor("scalar", (), "float32", ()),
        RemoteTensor("square", (3, 3), "float32", (3, 1)),  # the plan has it transposed
        RemoteTensor("strided", (4, 2), "float32", (1, 4)),
        RemoteTensor("bf16", (4, 2), "bfloat16", (2, 1)),
        RemoteTensor("extra", (1,), "float32", (1,)),
    ]
    with pytest.raises(LayoutError) as failure:
        check_layout([live], SimpleNamespace(tensors=lambda rank: planned))
    lines = str(failure.value).splitlines()[1:]
    assert [line.split(":")[0] for line in lines] == [
        "generator rank 0 has extra, which the layout does not know",
        "generator rank 0 has no gone",
        "generator rank 0, bf16",
        "generator rank 0, square",
        "generator rank 0, strided",
    ]


def test_parameters_are_arranged_without_a_copy():
    values = torch.arange(6.0).view(2, 3)
    for parameter, shape in (
        (values.t(), (2, 3)),
        (values[0, 1], (1, 1)),
        (values[:, 0].clone(), (2, 1, 1)),
        (values, None),
    ):
        arranged = as_arranged(parameter, shape)
        assert tuple(arranged.shape) == (shape or (2, 3))
        assert arranged.data_ptr() == parameter.data_ptr()
        assert arranged.is_contiguous()
    assert torch.equal(as_arranged(values.t(), (2, 3)), values)
    with pytest.raises(RuntimeError, match="view"):
        as_arranged(values[:, :2], (4, 1))


def test_command_of_a_quantised_engine_loads_no_weights():
    for quantization, method in (
        ("fp8_block", "fp8"),
        ("fp8_channel", "w8a8_fp8"),
        ("fp8_tensor", "compressed-tensors"),
    ):
        argv, _ = server_command(
            dataclasses.replace(SETTINGS, quantization=quantization), EngineKeys("a", "b")
        )
        arguments = json.loads(argv[-1])
        assert (arguments["quantization"], arguments["load_format"]) == (method, "dummy")
        assert (
            json.loads(arguments["json_model_override_args"])["quantization_config"]["quant_method"]
            == method
        )
        argv, _ = server_command(
            dataclasses.replace(SETTINGS, quantization=quantization, text_only=True),
            EngineKeys("a", "b"),
        )
        overrides = json.loads(json.loads(argv[-1])["json_model_override_args"])
        assert overrides.pop("language_model_only")
        assert overrides == json.loads(arguments["json_model_override_args"])
    argv, _ = server_command(dataclasses.replace(SETTINGS, text_only=True), EngineKeys("a", "b"))
    assert json.loads(json.loads(argv[-1])["json_model_override_args"]) == {
        "language_model_only": True
    }
    argv, _ = server_command(SETTINGS, EngineKeys("a", "b"))
    assert (
        not {"quantization", "load_format", "json_model_override_args"}
        & json.loads(argv[-1]).keys()
    )


def test_slow_model_modules_are_disabled_for_other_families():
    disabled = "SGLANG_DISABLED_MODEL_ARCHS"
    for family, modules in (("llama", "qwen3_5"), ("qwen3_5", None), ("", None)):
        _, environment = server_command(
            dataclasses.replace(SETTINGS, family=family), EngineKeys("a", "b")
        )
        assert environment.get(disabled) == modules


def test_work_after_loading_is_done_once_a_layer():
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    processed = []
    for layer in (*layers, layers[0]):
        once(lambda method, layer: processed.append(layer), None, layer)
    assert processed == layers


def test_engine_of_unplanned_sizes_is_refused():
    class WrongSizes:
        url = "http://here"

        async def parallelism(self, timeout_s: float) -> Parallelism:
            return Parallelism(tp_size=2, ep_size=1, attn_dp_size=1)

    workers = Workers([WrongSizes()], [2], None, timeout_s=1)
    asyncio.run(check_parallelism(workers, [GeneratorTopology(1, 2)]))
    problem = (
        "engine http://here runs with tp=2, ep=1, dp_attention=1, the reshard map is for tp=2, "
        "ep=1, dp_attention=2"
    )
    with pytest.raises(LayoutError, match=problem):
        asyncio.run(check_parallelism(workers, [GeneratorTopology(1, 2, 1, 2)]))


def test_engine_with_a_small_kv_cache_gives_a_warning(capsys):
    """SGLang takes what is free of the GPU, and only logs that it is less
    (kv_cache_configurator.py, _apply_token_constraints).
    """

    class SmallCache:
        url = "http://here"

        def __init__(self, tokens: int):
            self.tokens = tokens

        async def parallelism(self, timeout_s: float) -> Parallelism:
            return Parallelism(
                tp_size=1, ep_size=1, max_total_tokens=10_000, max_total_num_tokens=self.tokens
            )

    for tokens in (9_990, 9_000):
        workers = Workers([SmallCache(tokens)], [1], None, timeout_s=1)
        asyncio.run(check_parallelism(workers, [GeneratorTopology(1, 1)]))
    warning = (
        "engine http://here has a KV cache of 9,000 tokens, not of the planned 10,000: "
        "something else holds memory of its GPU"
    )
    assert capsys.readouterr().out.splitlines() == [warning]


def test_answers_of_a_lost_engine_are_ignored():
    """Its rank now belongs to another engine, so its old answer must not count for that one."""

    class LateAnswer:
        async def command(
            self, encoded: bytes, tp: int, timeout_s: float, empty_cache: bool = False
        ) -> None:
            for connection, payload in (
                ("0123abcd", b"of the lost one"),
                (workers.connection, b"of the living"),
            ):
                peers.append(Peer(f"engine.0.{connection}", key, hub.address))
                peers[-1].send(WorkerReply(0, "Describe", "", payload))
                await asyncio.sleep(0.2)  # in this order

    async def run() -> list[bytes]:
        return await workers.run_all(commands.Describe())

    key = RunKey.generate()
    peers = []
    with contextlib.closing(Hub("generator.0", key)) as hub:
        workers = Workers([LateAnswer()], [1], hub, timeout_s=20)
        try:
            assert asyncio.run(run()) == [b"of the living"]
        finally:
            for peer in peers:
                peer.close()
