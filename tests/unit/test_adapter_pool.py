"""Adapters in SGLang's pool: which ones it can serve, and that the map writes the same slices as
SGLang's loader.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from adapter_reference import expected_on
from copies_reference import apply_copy
from resolving import MODEL, config, problems_of
from small_maps import Discard

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.lora.layout import Lora, is_adapter, unserved
from megarl.lora.plan import sends_adapters, why_merged
from megarl.lora.updates import AdapterUpdates
from megarl.messaging.messages import WeightsGrant, WeightsOffer
from megarl.models import load_spec
from megarl.plan.resolve import RunPlan, resolve
from megarl.reshard.layout import combined_layout, generator_layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.proof import prove_exactly_once
from megarl.weight_sync.content import sent_layout, weights_map
from megarl.weight_sync.transports.base import Endpoint, Landing, RemoteTensor
from megarl.weight_sync.writing import FullUpdates, worth_it

MODELS = MODEL.parent
ALL = Lora(4, 8.0, ("all",))
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def spec_of(model: str):
    spec = load_spec(MODELS / model)
    experts = replace(spec.experts, count=4) if spec.experts else None
    return replace(spec, num_layers=2, experts=experts, vocab_size=64)


def map_of(plan: RunPlan) -> ReshardMap:
    return weights_map(
        plan,
        sent_layout(plan, trainer_layout(plan.spec, plan.trainer_topology, "float32"), "local"),
    )


@pytest.mark.parametrize(
    ("model", "trainer", "engine", "device", "targets"),
    [
        ("tiny-llama", {}, {}, "cpu", ("all",)),
        ("tiny-llama", {"tp": 2}, {}, "cpu", ("all",)),
        ("tiny-llama", {"pp": 2}, {"tp": 2}, "cpu", ("all",)),
        ("tiny-llama", {"tp": 2, "dp": 2}, {"tp": 2, "engines": 2}, "cpu", ("all",)),
        ("qwen3-8b", {"tp": 4}, {"tp": 8}, "cuda", ("all",)),
        ("qwen3-30b-a3b", {"dp": 2, "ep": 2}, {"tp": 2, "ep": 2}, "cpu", ATTENTION),
        ("qwen3-30b-a3b", {"tp": 2, "dp": 2, "ep": 2}, {"tp": 4, "ep": 2}, "cuda", ("all",)),
        ("qwen3-30b-a3b", {"pp": 2, "dp": 2, "ep": 4, "tp": 2}, {"tp": 2}, "cuda", ("all",)),
        ("qwen3-30b-a3b", {"dp": 2, "ep": 2, "tp": 2}, {"tp": 4, "ep": 2}, "cuda", "shared"),
    ],
)
def test_map_writes_what_sglang_would_slice(
    model: str, trainer: dict, engine: dict, device: str, targets: Any
) -> None:
    """Base and adapters are in one map, as in a run. Every byte is written once."""
    spec = spec_of(model)
    sizes = GeneratorTopology(**engine)
    lora = replace(ALL, shared=True) if targets == "shared" else replace(ALL, targets=targets)
    assert not unserved(spec, sizes, device, lora)
    topology = TrainerTopology(**trainer)
    adapters = lora.trainer_layout(spec, topology, "float32")
    pool = lora.pool_layout(spec, sizes, "float32", device)
    prove_exactly_once(
        ReshardMap.build(
            combined_layout(trainer_layout(spec, topology, "float32"), adapters),
            combined_layout(generator_layout(spec, sizes, "float32", device), pool),
        )
    )
    generator = torch.Generator().manual_seed(0)
    full = {
        tensor.name: torch.randn(tensor.shape, generator=generator)
        for tensor in lora.hf_layout(spec, "float32").tensors(0)
    }
    trainer_tensors = []
    for rank in range(adapters.world_size):
        trainer_tensors.append({})
        for tensor in adapters.tensors(rank):
            values = torch.zeros(tensor.shape)
            for piece in tensor.pieces:
                logical = full[piece.logical_name][piece.logical.slices()]
                values[piece.local.slices()] = logical.reshape(piece.local.shape)
            trainer_tensors[rank][tensor.name] = values
    map = ReshardMap.build(adapters, pool)
    for rank in range(pool.world_size):
        engine_tensors = {
            tensor.name: torch.full(tensor.shape, torch.nan) for tensor in pool.tensors(rank)
        }
        assert all(is_adapter(name) for name in engine_tensors)
        for copy in map.copies_to(rank):
            source = trainer_tensors[copy.source_rank].get(copy.source_tensor or "")
            apply_copy(copy, source, engine_tensors[copy.destination_tensor])
        expected = {}
        for layer in range(spec.num_layers):
            expected |= expected_on(
                rank % sizes.tp, full, sizes, layer, spec.experts.count if spec.experts else 0
            )
        assert engine_tensors.keys() == expected.keys()
        assert all(torch.equal(engine_tensors[name], expected[name]) for name in expected)
    engine_shapes = {
        tensor.name: tensor.engine_shape for tensor in pool.tensors(0) if tensor.engine_shape
    }
    if engine_shapes:
        assert lora.shared and len(engine_shapes) == 4
        w2_shape = engine_shapes["model.layers.1.mlp.experts.w2.lora_B"]
        assert w2_shape == (1, spec.hidden_size, 4)


@pytest.mark.parametrize(
    ("model", "device", "targets", "sizes", "reasons"),
    [
        ("tiny-llama", "cpu", ("all",), {}, []),
        ("qwen3-8b", "cuda", ("all",), {"tp": 2, "dp_attention": 2}, ["generator.dp_attention=2"]),
        ("deepseek-v3", "cuda", ("o_proj",), {}, ["a deepseek_v3 model's latent attention"]),
        (
            "tiny-llama",
            "cpu",
            ("q_proj",),
            {},
            [
                "model.layers.*.self_attn.qkv_proj in one tensor, and lora.targets leaves out "
                "k_proj and"
            ],
        ),
        ("qwen3-30b-a3b", "cpu", ATTENTION, {}, []),
        ("qwen3-30b-a3b", "cuda", ("all",), {}, []),
        (
            "qwen3-30b-a3b",
            "cpu",
            ("all",),
            {},
            [
                "kernels for adapters of model.layers.*.mlp.experts.w13 need a GPU",
                "experts.w2 need",
            ],
        ),
        (
            "qwen3-30b-a3b",
            "cuda",
            ("gate_proj", "up_proj"),
            {},
            ["only on gate, up and down together"],
        ),
        (
            "mixtral-8x7b",
            "cuda",
            ("w1", "w2", "w3"),
            {},
            ["names of the projections of model.layers.*.block_sparse_moe.experts.w13", "w2"],
        ),
    ],
)
def test_adapters_that_engines_cannot_serve_are_named(
    model: str, device: str, targets: tuple[str, ...], sizes: dict, reasons: list[str]
) -> None:
    problems = unserved(
        spec_of(model), GeneratorTopology(**sizes), device, replace(ALL, targets=targets)
    )
    for problem, reason in zip(problems, reasons, strict=True):
        assert reason in problem


def test_adapters_are_sent_alone_unless_merged(tmp_path) -> None:
    spec = load_spec(MODEL)
    for overrides, sent_alone in (
        ([], False),
        (["lora.rank=8"], True),
        (["lora.rank=8", "lora.sync=merge"], False),
    ):
        assert sends_adapters(config(tmp_path, *overrides), spec) == sent_alone
    delta = ["lora.rank=8", "weights.delta=auto"]
    assert not sends_adapters(config(tmp_path, *delta), spec)
    assert resolve(config(tmp_path, *delta))
    assert why_merged(config(tmp_path, *delta), spec) == [
        "weights.delta=auto looks for changes in all weights"
    ]
    assert problems_of(tmp_path, *delta, "lora.sync=adapter") == [
        "lora.sync=adapter: must be merge or auto: weights.delta=auto looks for changes in all "
        "weights"
    ]


def test_hashes_of_an_adapter_update_cover_all_weights(tmp_path) -> None:
    """The frozen weights' part comes from the full update, some of whose boxes landed.

    The result is as if all were sent again.
    """
    run = config(
        tmp_path, "lora.rank=4", f"model.path={MODELS}/tiny-llama", "rollout.max_tokens=64"
    )
    map = map_of(resolve(run))
    model = {tensor.name: torch.randn(tensor.shape) for tensor in map.source.tensors(0)}
    tensors = [
        RemoteTensor(tensor.name, tensor.shape, tensor.dtype, ())
        for tensor in map.destination.tensors(0)
    ]
    landings = [
        Landing(copy.destination_tensor, copy.destination_box.start, 0)
        for copy in map.copies_from(0)
        if "gate_up" in copy.destination_tensor
    ]
    trace: Any = None  # no hashes are compared
    adapters = AdapterUpdates(Discard(), map, 0, run)
    reference = FullUpdates(Discard(), map, 0, run)
    adapters.offer(3, -1, model, trace)
    adapters.connect(map, [Endpoint(0, "mooncake", "", 0, tensors, landings)], model)
    reference.connect(map, [Endpoint(0, "mooncake", "", 0, tensors)], model)

    for version in (4, 6):
        reference.offer(version, -1, model, trace)
        [(full_update, expected)] = reference.write(WeightsGrant(version), model)
        [(landed, unfinished), (direct, shares)] = adapters.write(WeightsGrant(version), model)
        assert unfinished is None and shares == expected
        assert landed.bytes > 0
        assert landed.bytes + direct.bytes == full_update.bytes
        for name in filter(is_adapter, model):
            model[name] = torch.randn_like(model[name])
        offer = adapters.offer(version + 1, -1, model, trace)
        assert worth_it([offer], version) and not worth_it([offer], version + 1)
        assert 0 < offer.delta_bytes < offer.full_bytes
        [(sent, shares)] = adapters.write(WeightsGrant(version + 1, delta=True), model)
        [(_, expected)] = reference.write(WeightsGrant(version + 1), model)
        assert shares == expected and sent.bytes == offer.delta_bytes


def test_idle_rank_does_not_prevent_an_adapter_update(tmp_path) -> None:
    run = config(
        tmp_path,
        "lora.rank=4",
        f"model.path={MODELS}/tiny-llama",
        "rollout.max_tokens=64",
        "trainer.dp=64",
        "rollout.prompts_per_step=64",
    )
    map = map_of(resolve(run))
    assert not list(map.copies_from(63))
    trace: Any = None
    idle = AdapterUpdates(Discard(), map, 63, run)
    assert not worth_it([idle.offer(4, -1, {}, trace)], 3)
    idle.connect(map, [], {})
    sender = WeightsOffer(5, 4, delta_bytes=1, changed_bytes=1, full_bytes=9)
    assert worth_it([idle.offer(5, -1, {}, trace), sender], 4)
