"""For the reshard tests: random models and layouts, the execution of their maps on real tensors,
and checks of the lists of copies.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from copies_reference import apply_copy, prove_copies
from hypothesis import strategies as st
from quantise_reference import block_rule
from reshard_reference import HF, HYBRID

from megarl.base.geometry import DP_ATTENTION_FAMILIES, GeneratorTopology, TrainerTopology
from megarl.kernels.quantise_rules import CHANNEL, TENSOR
from megarl.models import ModelSpec
from megarl.models.attention import Attention
from megarl.models.experts import Experts
from megarl.models.gated_delta_net import GatedDeltaNet
from megarl.models.latent_attention import MultiHeadLatentAttention
from megarl.models.norms import Norms
from megarl.models.paired_experts import PairedExperts
from megarl.reshard.execute import AmaxTable, amax_parts, peers
from megarl.reshard.layout import Layout
from megarl.reshard.map import Copy, ReshardMap
from megarl.reshard.schedule import batches_from

torch.set_num_threads(1)
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float8_e4m3fn")}
FP8_FAMILIES = (
    "gemma3",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "glm4_moe",
    "qwen3_next",
    "qwen3_5",
)
FAMILIES = (*FP8_FAMILIES, "gpt_oss")
RULES = {"block": block_rule(4, 4), "channel": CHANNEL, "tensor": TENSOR}
Case = tuple[ModelSpec, TrainerTopology, GeneratorTopology, str]


@st.composite
def cases(draw: st.DrawFn, fp8: bool = False) -> Case:
    """`fp8`: sizes at which no engine pads or cuts a block of 4."""
    name = draw(st.sampled_from(FP8_FAMILIES if fp8 else FAMILIES))
    latent = name == "deepseek_v3"
    sparse = name in ("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_next")
    sparse = sparse or (name == "qwen3_5" and draw(st.booleans()))
    tp = draw(st.sampled_from([1, 2, 4] if fp8 or latent else [1, 2, 3, 4]))
    pp, vpp = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1)]))
    etp = draw(st.sampled_from([1, 2])) if sparse else 1
    ep = draw(st.sampled_from([1, 2, 4])) if sparse else 1
    cp = draw(st.integers(1, 2))
    dp = draw(st.integers(1, 2)) * (etp * ep // math.gcd(etp * ep, tp * cp))
    generator_tp = draw(st.sampled_from([1, 2, 4]))
    generator_ep = (
        draw(st.sampled_from([n for n in (1, 2, 4) if generator_tp % n == 0])) if sparse else 1
    )
    of_gpus = fp8 or latent or name == "olmo2"
    # trainer and GPU engines refuse sizes that do not divide
    device = "cuda" if of_gpus else draw(st.sampled_from(["cpu", "cuda"]))
    dp_attention = 1
    if device == "cuda" and name in DP_ATTENTION_FAMILIES:
        dp_attention = draw(st.sampled_from([n for n in (1, 2, 4) if generator_tp % n == 0]))
    # 3 ranks cannot share one head, as 3 does not divide its rows
    fitting = [n for n in (1, 2, 3, 4, 8, 12) if n % tp == 0 or (tp % n == 0 and tp != 3)]
    kv = draw(st.sampled_from(fitting))
    if device == "cuda" and kv % generator_tp and generator_tp % kv:
        kv = tp * generator_tp
    heads = kv * draw(st.sampled_from([1, 2, 3]))
    if kv % tp or device == "cuda":
        heads *= tp * generator_tp
    unit = 16 if fp8 else tp * (generator_tp if device == "cuda" else 1)
    first = draw(st.sampled_from([None, vpp])) if pp > 1 else None
    last = (
        draw(st.sampled_from([None, 2 * vpp]))
        if pp > 1 and (first is None or vpp == 1 or pp > 2)
        else None
    )
    set_sizes = [n for n in (first, last) if n is not None]
    spec = ModelSpec(
        family=name,
        num_layers=sum(set_sizes) + (pp - len(set_sizes)) * vpp * draw(st.integers(1, 2)),
        hidden_size=draw(st.integers(1, 9)) + (3 if fp8 else 0),
        intermediate_size=unit * draw(st.integers(1, 3)),
        num_attention_heads=4 * generator_tp if latent else heads,
        num_kv_heads=4 * generator_tp if latent else kv,
        head_dim=4 * draw(st.integers(1, 2)),
        vocab_size=draw(st.integers(2, 200)),
        max_position_embeddings=16,
        tie_word_embeddings=draw(st.booleans())
        if name in ("llama", "qwen2", "qwen3", "qwen3_5")
        else name == "gemma3",
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        norms=Norms(before=name != "olmo2", after=name in ("olmo2", "gemma3")),
        vision_tower=name == "qwen3_5" and draw(st.booleans()),
    )
    attention = Attention(
        qkv_bias=name in ("qwen2", "glm4_moe", "gpt_oss"),
        output_bias=name == "gpt_oss",
        sinks=name == "gpt_oss",
        qk_norm=name in ("qwen3", "qwen3_moe", "olmo2", "gemma3", *HYBRID)
        or (name == "glm4_moe" and draw(st.booleans())),
        qk_norm_of_all_heads=name == "olmo2",
        gated=name in HYBRID,
    )
    spec = dataclasses.replace(spec, attention=attention)
    if sparse:
        shared = {"deepseek_v3": 2, "glm4_moe": 2, "qwen3_next": 1, "qwen3_5": 1}
        of_sigmoid = name in ("deepseek_v3", "glm4_moe")
        experts = (PairedExperts if name == "gpt_oss" else Experts)(
            count=4 * draw(st.integers(1, 2)),
            per_token=2,
            intermediate_size=etp * unit,
            shared_size=shared.get(name, 0) * unit * tp,
            shared_gate=name in HYBRID,
            first_layer=draw(st.integers(0, 1)) if of_sigmoid else 0,
            router_bias=of_sigmoid,
            module="block_sparse_moe" if name == "mixtral" else "mlp",
            router_dtype="float32" if name == "glm4_moe" else None,
            stacked=name == "qwen3_5" and draw(st.booleans()),
        )
        spec = dataclasses.replace(spec, experts=experts)
    if name in HYBRID:
        interval = draw(st.integers(2, 4))
        heads = tp * generator_tp
        linear = GatedDeltaNet(
            layers=tuple(layer for layer in range(spec.num_layers) if (layer + 1) % interval),
            key_heads=heads,
            value_heads=heads * draw(st.integers(1, 2)),
            # each kind has whole blocks
            key_dim=4 if fp8 and name == "qwen3_5" else draw(st.sampled_from([2, 4])),
            value_dim=4,
            conv_width=draw(st.integers(2, 4)),
            by_kind=name == "qwen3_5",
        )
        spec = dataclasses.replace(spec, linear_attention=linear)
    if latent:
        attention = MultiHeadLatentAttention(
            q_rank=4 * tp, kv_rank=8 * tp - 4, nope_dim=4, rope_dim=4, v_dim=4
        )
        spec = dataclasses.replace(spec, head_dim=8, attention=attention)
    if name in ("deepseek_v3", "glm4_moe", "qwen3_next") and draw(st.booleans()):
        drafts = draw(st.booleans())
        spec = dataclasses.replace(
            spec,
            mtp_layers=1,
            mtp_drafts=drafts,
            hidden_size=spec.hidden_size * tp,
            tie_word_embeddings=False,
        )
    trainer = TrainerTopology(
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        zero=draw(st.sampled_from([1, 1, 3])),
        first_stage_layers=first,
        last_stage_layers=last,
    )
    return (
        spec,
        trainer,
        GeneratorTopology(draw(st.integers(1, 3)), generator_tp, generator_ep, dp_attention),
        device,
    )


def empty(layout: Layout, rank: int) -> HF:
    return {
        t.name: torch.full(t.shape, float("nan")).to(DTYPES[t.dtype]) for t in layout.tensors(rank)
    }


def exchanged(map: ReshardMap, sources: list[HF]) -> list[AmaxTable]:
    """Every rank's table of amax after the exchange with its peers."""
    parts = [amax_parts(map, rank) for rank in range(map.source.world_size)]
    tables = [AmaxTable.measure(part, tensors) for part, tensors in zip(parts, sources)]
    sent = [list(table.entries) for table in tables]
    for rank, table in enumerate(tables):
        for peer in peers(parts[rank]):
            assert rank in peers(parts[peer])
            table.merge(sent[peer])
    return tables


def carry_out(map: ReshardMap, sources: list[HF], joined: bool) -> tuple[list[HF], list[Copy]]:
    """The destination tensors after all senders' copies (or joined writes)."""
    result = [empty(map.destination, rank) for rank in range(map.destination.world_size)]
    copies = []
    for rank, (tensors, table) in enumerate(zip(sources, exchanged(map, sources))):
        for copy in map.writes_from(rank) if joined else map.copies_from(rank):
            assert copy.source_rank == rank
            apply_copy(
                copy,
                tensors.get(copy.source_tensor),
                result[copy.destination_rank][copy.destination_tensor],
                table,
            )
            copies.append(copy)
    return result, copies


def assert_equal(actual: list[HF], expected: list[HF]) -> None:
    for rank, (tensors, expected_tensors) in enumerate(zip(actual, expected, strict=True)):
        assert tensors.keys() == expected_tensors.keys()
        for name, values in expected_tensors.items():
            assert tensors[name].dtype == values.dtype, (rank, name)
            assert torch.equal(bits(tensors[name]), bits(values)), (rank, name)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


def check_lists(map: ReshardMap, copies: list[Copy], joined: bool) -> None:
    """Checks that both ends make the same lists, that the proof accepts them, and that the summary
    counts them.
    """
    prove_copies(copies, map.source, map.destination)
    ranks = range(map.destination.world_size)
    received = []
    for rank in ranks:
        received += map.writes_to(rank) if joined else map.copies_to(rank)
    assert sorted(map_key(c) for c in received) == sorted(map_key(c) for c in copies)
    summary = map.summary()
    assert sum(c.bytes for c in copies) == summary.bytes == summary.bytes_minimum
    assert len(copies) == (summary.writes if joined else summary.copies)
    assert summary.tensors == sum(len(map.destination.tensors(rank)) for rank in ranks)
    if joined:
        scheduled = []
        for rank in range(map.source.world_size):
            for batch in batches_from(map, rank, 900):
                scheduled += batch.writes
        assert sorted(map_key(c) for c in scheduled) == sorted(map_key(c) for c in copies)


def map_key(copy: Copy) -> tuple:
    return (
        copy.source_rank,
        copy.destination_rank,
        copy.destination_tensor,
        copy.destination_box.start,
    )
