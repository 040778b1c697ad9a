"""Layouts against dumps of live engines, and the shapes and topologies that must be refused."""

from __future__ import annotations

import pytest

from megarl.config.errors import ConfigError
from megarl.models import ModelSpec
from megarl.plan.topology import GeneratorTopology, TrainerTopology
from megarl.reshard.layout import generator_layout, hf_layout, stage_of_layer, trainer_layout

# named_parameters() of SGLang 0.5.21's TP workers on the CPU, one layer of two: hidden 128, ffn 256, 8 heads of 16.
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
SGLANG_KV1_VOCAB500_TP2 = SGLANG_KV4_VOCAB512_TP2.replace("qkv_proj.weight (128", "qkv_proj.weight (160").replace("(128, 64)", "(128, 128)")
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


def spec(kv: int = 4, vocab: int = 512, layers: int = 1, tied: bool = False, ffn: int = 256, heads: int = 8) -> ModelSpec:
    return ModelSpec("llama", layers, 128, ffn, heads, kv, 16, vocab, 2048, tied, 1e-6, 1e4)


def parsed(dump: str) -> list[tuple[str, tuple[int, ...]]]:
    lines = [line.split(" ", 1) for line in dump.strip().splitlines()]
    return [(name, tuple(int(n) for n in shape.strip("(),").split(",") if n)) for name, shape in lines]


@pytest.mark.parametrize(
    "kv, vocab, tp, dump",
    [(4, 512, 1, SGLANG_KV4_VOCAB512_TP1), (4, 512, 2, SGLANG_KV4_VOCAB512_TP2), (1, 500, 2, SGLANG_KV1_VOCAB500_TP2)],
)
def test_generator_layout_equals_a_live_engine(kv, vocab, tp, dump):
    layout = generator_layout(spec(kv, vocab), GeneratorTopology(engines=2, tp=tp), "bfloat16", device="cpu")
    for rank in range(2 * tp):
        tensors = layout.tensors(rank)
        assert [(t.name, t.shape) for t in tensors] == parsed(dump)
        assert {t.dtype for t in tensors} == {"bfloat16"}


def test_cpu_engines_hold_zeros_where_they_padded_heads_and_gpu_engines_the_same_kv_head_twice():
    one_kv = spec(kv=1, vocab=500)
    cpu = generator_layout(one_kv, GeneratorTopology(tp=2), "float32", device="cpu").tensors(1)[1]
    assert cpu.name.endswith("qkv_proj.weight") and cpu.pieces == ()
    gpu = generator_layout(one_kv, GeneratorTopology(tp=2), "float32", device="cuda").tensors(1)[1]
    assert gpu.shape == (64 + 16 + 16, 128)
    found = [(p.logical_name.split(".")[-2], p.logical.start[0], p.logical.shape[0]) for p in gpu.pieces]
    assert found == [("q_proj", 64, 64), ("k_proj", 0, 16), ("v_proj", 0, 16)]


def test_tied_output_layer_is_one_parameter_except_on_a_last_stage_of_its_own():
    tied = spec(layers=2, tied=True)
    assert "lm_head.weight" not in {t.name for t in generator_layout(tied, GeneratorTopology(), "float32").tensors(0)}
    assert "lm_head.weight" not in {t.name for t in hf_layout(tied, "float32").tensors(0)}
    assert "output_layer.weight" not in {t.name for t in trainer_layout(tied, TrainerTopology(), "float32").tensors(0)}
    last = trainer_layout(tied, TrainerTopology(pp=2), "float32").tensors(1)[-1]
    assert last.name == "output_layer.weight" and last.pieces[0].logical_name == "model.embed_tokens.weight"


def test_transformer_engine_keeps_the_norms_inside_the_linear_layers():
    names = {t.name for t in trainer_layout(spec(), TrainerTopology(), "bfloat16", norm_names="te").tensors(0)}
    assert {"decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"} <= names
    assert "decoder.layers.0.input_layernorm.weight" not in names


def test_layers_are_split_over_stages_as_megatron_does():
    assert stage_of_layer(8, TrainerTopology(pp=2)) == (0, 0, 0, 0, 1, 1, 1, 1)
    # the example in megatron's get_num_layers_to_build
    assert stage_of_layer(8, TrainerTopology(pp=2, vpp=2)) == (0, 0, 1, 1, 0, 0, 1, 1)
    assert stage_of_layer(5, TrainerTopology(pp=3, first_stage_layers=1, last_stage_layers=1)) == (0, 1, 1, 1, 2)
    assert stage_of_layer(7, TrainerTopology(pp=3, last_stage_layers=1)) == (0, 0, 0, 1, 1, 1, 2)
    # chunks of 1, 2, 1 layers in turn: megatron's offsets of stage 1 are 0 * 4 + 1 and 1 * 4 + 1
    uneven = TrainerTopology(pp=3, vpp=2, first_stage_layers=2, last_stage_layers=2)
    assert stage_of_layer(8, uneven) == (0, 1, 1, 2, 0, 1, 1, 2)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: trainer_layout(spec(kv=3, heads=9), TrainerTopology(tp=2), "float32"), "tp = 2 does not divide num_attention_heads = 9"),
        (lambda: trainer_layout(spec(ffn=255), TrainerTopology(tp=2), "float32"), "trainer.tp = 2 does not divide intermediate_size = 255"),
        (lambda: trainer_layout(spec(kv=4, heads=12), TrainerTopology(tp=6), "float32"), "trainer.tp = 6 .*num_key_value_heads = 4"),
        (lambda: trainer_layout(spec(layers=3), TrainerTopology(pp=2), "float32"), "trainer.pp = 2 does not divide num_hidden_layers = 3"),
        (lambda: trainer_layout(spec(layers=4), TrainerTopology(pp=2, first_stage_layers=4), "float32"), "first_stage_layers = 4: num_hidden"),
        (lambda: trainer_layout(spec(layers=4), TrainerTopology(first_stage_layers=4), "float32"), "needs trainer.pp of at least 2"),
        (lambda: trainer_layout(spec(), TrainerTopology(), "float32", norm_names="apex"), "norm_names = 'apex'"),
        (lambda: trainer_layout(spec(), TrainerTopology(), "int4"), "dtype = 'int4'"),
        (lambda: generator_layout(spec(), GeneratorTopology(tp=3), "float32"), "generator.tp = 3 does not divide num_attention_heads = 8"),
        (lambda: generator_layout(spec(ffn=255), GeneratorTopology(tp=2), "float32"), "r.tp = 2 does not divide intermediate_size = 255"),
        (lambda: generator_layout(spec(), GeneratorTopology(), "float32", device="tpu"), "device = 'tpu'"),
    ],
)
def test_what_the_engines_cannot_do_is_refused_by_key_and_value(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_a_rank_outside_the_layout_is_an_error():
    with pytest.raises(ValueError, match="0 to 0, not 1"):
        hf_layout(spec(), "float32").tensors(1)
