"""Layouts against dumps of live engines; shapes and topologies that must be refused."""

from __future__ import annotations

import pytest
import torch
from quantise_reference import block_rule

from megarl.base.geometry import Box, GeneratorTopology, TrainerTopology
from megarl.config.errors import ConfigError
from megarl.models import ModelSpec, load_spec
from megarl.reshard.layout import (
    LocalTensor,
    Piece,
    generator_layout,
    hf_layout,
    row_chunks,
    stage_of_layer,
    trainer_layout,
)

# named_parameters() of SGLang 0.5.21's TP workers on the CPU, one layer of two: hidden 128, ffn
# 256, 8 heads of 16.
SGLANG_KV4_VOCAB512_TP2 = """
model.embed_tokens.weight (256, 128)
model.layers.0.self_attn.qkv_proj.weight (128, 128)
model.layers.0.self_attn.o_proj.weight (128, 64)
model.layers.0.mlp.gate_up_proj.weight (256, 128)
model.layers.0.mlp.down_proj.weight (128, 128)
model.layers.0.input_layernorm.weight (128,)
model.layers.0.post_attention_layernorm.weight (128,)
model.norm.weight (128,)
lm_head.weight (256, 128)
"""
SGLANG_KV1_VOCAB500_TP2 = SGLANG_KV4_VOCAB512_TP2.replace(
    "qkv_proj.weight (128", "qkv_proj.weight (160"
).replace("(128, 64)", "(128, 128)")
SGLANG_KV4_VOCAB512_TP1 = """
model.embed_tokens.weight (512, 128)
model.layers.0.self_attn.qkv_proj.weight (256, 128)
model.layers.0.self_attn.o_proj.weight (128, 128)
model.layers.0.mlp.gate_up_proj.weight (512, 128)
model.layers.0.mlp.down_proj.weight (128, 256)
model.layers.0.input_layernorm.weight (128,)
model.layers.0.post_attention_layernorm.weight (128,)
model.norm.weight (128,)
lm_head.weight (512, 128)
"""

# The same with dtypes: Qwen3-MoE with 8 experts of 64 rows, unquantised, and in blocks of 32 at tp
# 2; Llama per channel and per tensor.
SGLANG_QWEN3_MOE_TP1 = """
model.embed_tokens.weight (512, 128) float32
model.layers.0.self_attn.qkv_proj.weight (256, 128) float32
model.layers.0.self_attn.o_proj.weight (128, 128) float32
model.layers.0.self_attn.q_norm.weight (16,) float32
model.layers.0.self_attn.k_norm.weight (16,) float32
model.layers.0.mlp.experts.w13_weight (8, 128, 128) float32
model.layers.0.mlp.experts.w2_weight (8, 128, 64) float32
model.layers.0.mlp.gate.weight (8, 128) float32
model.layers.0.input_layernorm.weight (128,) float32
model.layers.0.post_attention_layernorm.weight (128,) float32
model.norm.weight (128,) float32
lm_head.weight (512, 128) float32
"""
SGLANG_QWEN3_MOE_FP8_BLOCK_TP2 = """
model.embed_tokens.weight (256, 128) bfloat16
model.layers.0.self_attn.qkv_proj.weight (128, 128) float8_e4m3fn
model.layers.0.self_attn.qkv_proj.weight_scale_inv (4, 4) float32
model.layers.0.self_attn.o_proj.weight (128, 64) float8_e4m3fn
model.layers.0.self_attn.o_proj.weight_scale_inv (4, 2) float32
model.layers.0.self_attn.q_norm.weight (16,) bfloat16
model.layers.0.self_attn.k_norm.weight (16,) bfloat16
model.layers.0.mlp.experts.w13_weight (8, 64, 128) float8_e4m3fn
model.layers.0.mlp.experts.w2_weight (8, 128, 32) float8_e4m3fn
model.layers.0.mlp.experts.w13_weight_scale_inv (8, 2, 4) float32
model.layers.0.mlp.experts.w2_weight_scale_inv (8, 4, 1) float32
model.layers.0.mlp.gate.weight (8, 128) bfloat16
model.layers.0.input_layernorm.weight (128,) bfloat16
model.layers.0.post_attention_layernorm.weight (128,) bfloat16
model.norm.weight (128,) bfloat16
lm_head.weight (256, 128) bfloat16
"""
SGLANG_LLAMA_FP8_BLOCK_TP1 = """
model.embed_tokens.weight (512, 128) bfloat16
model.layers.0.self_attn.qkv_proj.weight (256, 128) float8_e4m3fn
model.layers.0.self_attn.qkv_proj.weight_scale_inv (8, 4) float32
model.layers.0.self_attn.o_proj.weight (128, 128) float8_e4m3fn
model.layers.0.self_attn.o_proj.weight_scale_inv (4, 4) float32
model.layers.0.mlp.gate_up_proj.weight (512, 128) float8_e4m3fn
model.layers.0.mlp.gate_up_proj.weight_scale_inv (16, 4) float32
model.layers.0.mlp.down_proj.weight (128, 256) float8_e4m3fn
model.layers.0.mlp.down_proj.weight_scale_inv (4, 8) float32
model.layers.0.input_layernorm.weight (128,) bfloat16
model.layers.0.post_attention_layernorm.weight (128,) bfloat16
model.norm.weight (128,) bfloat16
lm_head.weight (512, 128) bfloat16
"""
SGLANG_LLAMA_FP8_CHANNEL_TP1 = """
model.embed_tokens.weight (512, 128) bfloat16
model.layers.0.self_attn.qkv_proj.weight (128, 256) float8_e4m3fn
model.layers.0.self_attn.qkv_proj.weight_scale (1, 256) float32
model.layers.0.self_attn.o_proj.weight (128, 128) float8_e4m3fn
model.layers.0.self_attn.o_proj.weight_scale (1, 128) float32
model.layers.0.mlp.gate_up_proj.weight (128, 512) float8_e4m3fn
model.layers.0.mlp.gate_up_proj.weight_scale (1, 512) float32
model.layers.0.mlp.down_proj.weight (256, 128) float8_e4m3fn
model.layers.0.mlp.down_proj.weight_scale (1, 128) float32
model.layers.0.input_layernorm.weight (128,) bfloat16
model.layers.0.post_attention_layernorm.weight (128,) bfloat16
model.norm.weight (128,) bfloat16
lm_head.weight (512, 128) bfloat16
"""
SGLANG_LLAMA_FP8_TENSOR_TP1 = """
model.embed_tokens.weight (512, 128) bfloat16
model.layers.0.self_attn.qkv_proj.weight (128, 256) float8_e4m3fn
model.layers.0.self_attn.qkv_proj.weight_scale () float32
model.layers.0.self_attn.o_proj.weight (128, 128) float8_e4m3fn
model.layers.0.self_attn.o_proj.weight_scale () float32
model.layers.0.mlp.gate_up_proj.weight (128, 512) float8_e4m3fn
model.layers.0.mlp.gate_up_proj.weight_scale () float32
model.layers.0.mlp.down_proj.weight (256, 128) float8_e4m3fn
model.layers.0.mlp.down_proj.weight_scale () float32
model.layers.0.input_layernorm.weight (128,) bfloat16
model.layers.0.post_attention_layernorm.weight (128,) bfloat16
model.norm.weight (128,) bfloat16
lm_head.weight (512, 128) bfloat16
"""

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 128,
    "intermediate_size": 256,
}
QWEN3_MOE |= {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
QWEN3_MOE |= {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


def spec(
    kv: int = 4,
    vocab: int = 512,
    layers: int = 1,
    tied: bool = False,
    ffn: int = 256,
    heads: int = 8,
) -> ModelSpec:
    return ModelSpec("llama", layers, 128, ffn, heads, kv, 16, vocab, 2048, tied, 1e-6, 1e4)


def parsed(dump: str) -> list[tuple[str, tuple[int, ...]]]:
    lines = [line.split(" ", 1) for line in dump.strip().splitlines()]
    return [
        (name, tuple(int(n) for n in shape.strip("(),").split(",") if n)) for name, shape in lines
    ]


@pytest.mark.parametrize(
    "kv, vocab, tp, dump",
    [
        (4, 512, 1, SGLANG_KV4_VOCAB512_TP1),
        (4, 512, 2, SGLANG_KV4_VOCAB512_TP2),
        (1, 500, 2, SGLANG_KV1_VOCAB500_TP2),
    ],
)
def test_generator_layout_equals_a_live_engine(kv, vocab, tp, dump):
    layout = generator_layout(
        spec(kv, vocab), GeneratorTopology(engines=2, tp=tp), "bfloat16", device="cpu"
    )
    for rank in range(2 * tp):
        tensors = layout.tensors(rank)
        assert [(t.name, t.shape) for t in tensors] == parsed(dump)
        assert {t.dtype for t in tensors} == {"bfloat16"}


@pytest.mark.parametrize(
    "model, tp, quantization, dtype, dump",
    [
        (QWEN3_MOE, 1, None, "float32", SGLANG_QWEN3_MOE_TP1),
        (QWEN3_MOE, 2, block_rule(32, 32), "bfloat16", SGLANG_QWEN3_MOE_FP8_BLOCK_TP2),
        (None, 1, block_rule(32, 32), "bfloat16", SGLANG_LLAMA_FP8_BLOCK_TP1),
        (None, 1, "fp8_channel", "bfloat16", SGLANG_LLAMA_FP8_CHANNEL_TP1),
        (None, 1, "fp8_tensor", "bfloat16", SGLANG_LLAMA_FP8_TENSOR_TP1),
    ],
)
def test_experts_and_scales_lie_as_in_a_live_engine(model, tp, quantization, dtype, dump):
    """Per-channel scales are [out, 1] here and [1, out] there: the same memory."""
    model_spec = spec() if model is None else load_spec(model)
    layout = generator_layout(model_spec, GeneratorTopology(tp=tp), dtype, "cpu", quantization)
    live = {name: (shape, kind) for name, shape, kind in map(with_dtype, dump.strip().splitlines())}
    planned = {
        t.name: (t.engine_shape if t.engine_shape is not None else t.shape, t.dtype)
        for t in layout.tensors(tp - 1)
    }
    if quantization == "fp8_channel":
        planned = {
            name: (shape[::-1] if name.endswith("_scale") else shape, kind)
            for name, (shape, kind) in planned.items()
        }
    assert planned == live


def with_dtype(line: str) -> tuple[str, tuple[int, ...], str]:
    name, description = line.split(" ", 1)
    shape, _, kind = description.rpartition(" ")
    return name, tuple(int(n) for n in shape.strip("(),").split(",") if n), kind


def test_experts_stand_on_their_own_mesh():
    """tp 4, dp 2, ep 4, etp 2 on 8 ranks.

    Megatron's RankGenerator(tp=2, ep=4, dp=1, order "tp-cp-ep-dp-pp") gives the tensor groups [0,
    1], [2, 3], …, and the expert groups [0, 2, 4, 6] and [1, 3, 5, 7].
    """
    moe = load_spec(QWEN3_MOE)
    layout = trainer_layout(moe, TrainerTopology(tp=4, dp=2, ep=4, etp=2), "bfloat16")
    for rank in range(8):
        expert_tensors = [
            t for t in layout.tensors(rank) if "local_experts" in t.name and "linear_fc2" in t.name
        ]
        assert [t.name.split(".")[6] for t in expert_tensors] == [
            str(rank // 2 * 2),
            str(rank // 2 * 2 + 1),
        ]
        assert {(t.shape, t.pieces[0].logical.start) for t in expert_tensors} == {
            ((128, 32), (0, rank % 2 * 32))
        }
        attention = [t for t in layout.tensors(rank) if "linear_proj" in t.name]
        assert {t.pieces[0].logical.start for t in attention} == {(0, rank % 4 * 32)}
    te = {
        t.name
        for t in trainer_layout(moe, TrainerTopology(ep=2, dp=2), "bfloat16", "te").tensors(1)
    }
    assert "decoder.layers.0.mlp.experts.linear_fc1.weight4" in te
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in te


def test_engines_give_each_run_of_ranks_its_experts():
    """SGLang: moe_ep_rank = tp_rank // moe_tp, moe_tp_rank = tp_rank % moe_tp (runtime_context.py)."""
    layout = generator_layout(
        load_spec(QWEN3_MOE), GeneratorTopology(tp=4, ep=2), "bfloat16", "cuda"
    )
    for rank in range(4):
        w2 = next(t for t in layout.tensors(rank) if t.name.endswith("w2_weight"))
        assert w2.shape == (4, 128, 32)
        names = [
            f"model.layers.0.mlp.experts.{4 * (rank // 2) + e}.down_proj.weight" for e in range(4)
        ]
        assert [p.logical_name for p in w2.pieces] == names
        assert {p.logical.start for p in w2.pieces} == {(0, 0, rank % 2 * 32)}


def test_padded_heads_are_zeros_on_cpu_and_copies_on_gpu():
    one_kv = spec(kv=1, vocab=500)
    cpu = generator_layout(one_kv, GeneratorTopology(tp=2), "float32", device="cpu").tensors(1)[1]
    assert cpu.name.endswith("qkv_proj.weight")
    assert cpu.pieces == ()
    gpu = generator_layout(one_kv, GeneratorTopology(tp=2), "float32", device="cuda").tensors(1)[1]
    assert gpu.shape == (64 + 16 + 16, 128)
    gpu_pieces = [
        (p.logical_name.split(".")[-2], p.logical.start[0], p.logical.shape[0]) for p in gpu.pieces
    ]
    assert gpu_pieces == [("q_proj", 64, 64), ("k_proj", 0, 16), ("v_proj", 0, 16)]


def test_tied_output_layer_is_a_parameter_only_on_a_later_stage():
    tied = spec(layers=2, tied=True)
    assert "lm_head.weight" not in {
        t.name for t in generator_layout(tied, GeneratorTopology(), "float32").tensors(0)
    }
    assert "lm_head.weight" not in {t.name for t in hf_layout(tied, "float32").tensors(0)}
    assert "output_layer.weight" not in {
        t.name for t in trainer_layout(tied, TrainerTopology(), "float32").tensors(0)
    }
    last = trainer_layout(tied, TrainerTopology(pp=2), "float32").tensors(1)[-1]
    assert last.name == "output_layer.weight"
    assert last.pieces[0].logical_name == "model.embed_tokens.weight"


def test_transformer_engine_has_norms_inside_linear_layers():
    names = {
        t.name
        for t in trainer_layout(spec(), TrainerTopology(), "bfloat16", layer_spec="te").tensors(0)
    }
    assert {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    } <= names
    assert "decoder.layers.0.input_layernorm.weight" not in names


def test_layers_are_split_over_stages_as_megatron_does():
    assert stage_of_layer(8, TrainerTopology(pp=2)) == (0, 0, 0, 0, 1, 1, 1, 1)
    # the example in megatron's get_num_layers_to_build
    assert stage_of_layer(8, TrainerTopology(pp=2, vpp=2)) == (0, 0, 1, 1, 0, 0, 1, 1)
    assert stage_of_layer(5, TrainerTopology(pp=3, first_stage_layers=1, last_stage_layers=1)) == (
        0,
        1,
        1,
        1,
        2,
    )
    assert stage_of_layer(7, TrainerTopology(pp=3, last_stage_layers=1)) == (0, 0, 0, 1, 1, 1, 2)
    # chunks of 1, 2, 1 layers in turn: megatron's offsets of stage 1 are 0 * 4 + 1 and 1 * 4 + 1
    uneven = TrainerTopology(pp=3, vpp=2, first_stage_layers=2, last_stage_layers=2)
    assert stage_of_layer(8, uneven) == (0, 1, 1, 2, 0, 1, 1, 2)


@pytest.mark.parametrize(
    "build, message",
    [
        (
            lambda: trainer_layout(spec(kv=3, heads=9), TrainerTopology(tp=2), "float32"),
            "trainer.tp=2: .* 9 attention heads",
        ),
        (
            lambda: trainer_layout(spec(ffn=255), TrainerTopology(tp=2), "float32"),
            "trainer.tp=2: .* 255 ffn rows",
        ),
        (
            lambda: trainer_layout(spec(kv=4, heads=12), TrainerTopology(tp=6), "float32"),
            "trainer.tp=6: .* 4 key-value heads",
        ),
        (  # (3 + 2) * 16 rows
            lambda: trainer_layout(spec(kv=1, heads=3), TrainerTopology(tp=3), "float32"),
            "trainer.tp=3: must divide the model's 80 rows of queries, keys and values",
        ),
        (
            lambda: trainer_layout(spec(layers=3), TrainerTopology(pp=2), "float32"),
            "trainer.pp=2: must divide the model's 3 layers",
        ),
        (
            lambda: trainer_layout(
                spec(layers=4), TrainerTopology(pp=2, first_stage_layers=4), "float32"
            ),
            "first_stage_layers=4: must leave at least one of the model's 4 layers to each other "
            "stage of trainer.pp=2",
        ),
        (
            lambda: trainer_layout(
                spec(layers=4),
                TrainerTopology(pp=2, first_stage_layers=1, last_stage_layers=1),
                "float32",
            ),
            "first_stage_layers=1, trainer.last_stage_layers=1: must be the model's 4 layers "
            "together",
        ),
        (
            lambda: trainer_layout(
                spec(layers=4), TrainerTopology(first_stage_layers=4), "float32"
            ),
            "needs trainer.pp of at least 2",
        ),
        (
            lambda: trainer_layout(spec(), TrainerTopology(), "float32", layer_spec="apex"),
            "layer_spec = 'apex'",
        ),
        (lambda: trainer_layout(spec(), TrainerTopology(), "int4"), "dtype = 'int4'"),
        (
            lambda: generator_layout(spec(), GeneratorTopology(tp=3), "float32"),
            "generator.tp=3: .* 8 attention heads",
        ),
        (
            lambda: generator_layout(spec(ffn=255), GeneratorTopology(tp=2), "float32"),
            "generator.tp=2: .* 255 ffn rows",
        ),
        (
            lambda: generator_layout(spec(), GeneratorTopology(), "float32", device="tpu"),
            "device = 'tpu'",
        ),
        (
            lambda: generator_layout(spec(), GeneratorTopology(), "bfloat16", "cuda", "fp4"),
            "generator.quantization = 'fp4'",
        ),
        (
            lambda: generator_layout(
                spec(), GeneratorTopology(tp=4), "bfloat16", "cuda", "fp8_block"
            ),
            "a rank must hold multiples of 128",
        ),
        (
            lambda: generator_layout(
                spec(kv=1), GeneratorTopology(tp=2), "bfloat16", "cpu", "fp8_channel"
            ),
            "is padded",
        ),
        (
            lambda: trainer_layout(load_spec(QWEN3_MOE), TrainerTopology(ep=3, dp=3), "float32"),
            "trainer.ep=3: must divide .* experts",
        ),
        (
            lambda: trainer_layout(load_spec(QWEN3_MOE), TrainerTopology(ep=2), "float32"),
            "= 1, the ranks of a stage",
        ),
        (
            lambda: generator_layout(
                load_spec(QWEN3_MOE), GeneratorTopology(tp=4, ep=8), "float32"
            ),
            "generator.ep=8: must divide gen",
        ),
    ],
)
def test_unsupported_layouts_are_refused_by_key_and_value(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize(("rows", "count"), [(8, 4), (10, 4), (3, 4), (1, 2), (9, 1)])
def test_sharded_rows_are_those_of_fully_shard(rows, count):
    """torch.chunk, and empty chunks where it has none."""
    whole = torch.arange(rows * 2).view(rows, 2)
    chunks = [*whole.chunk(count)] + [whole[:0]] * count
    pieces = (
        Piece(Box((0, 0), (rows - 1, 2)), "a", Box((5, 0), (rows - 1, 2))),
        Piece(Box((rows - 1, 0), (1, 2)), "b", Box((0, 0), (1, 2))),
    )
    for chunk, tensor in zip(
        chunks, row_chunks(LocalTensor("w", (rows, 2), "float32", pieces), count)
    ):
        values = torch.full(tensor.shape, -1)
        for piece in tensor.pieces:
            first = 5 if piece.logical_name == "a" else 1 - rows
            assert piece.logical.shape == piece.local.shape
            rows_of_piece = torch.arange(piece.logical.start[0], piece.logical.end[0]) - first
            values[piece.local.slices()] = whole[rows_of_piece]
        assert torch.equal(values, chunk)


def test_a_rank_outside_the_layout_is_an_error():
    with pytest.raises(ValueError, match="0 to 0, not 1"):
        hf_layout(spec(), "float32").tensors(1)
