"""From config.json to a spec. Missing or unknown values are named with their file."""

from __future__ import annotations

import dataclasses
import json
import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.config.errors import ConfigError
from megarl.config.schema import GeneratorConfig, TrainerConfig
from megarl.estimate.memory import layer_activations, state_bytes
from megarl.models import load_spec
from megarl.models.attention import Attention
from megarl.models.block import LinearAttention
from megarl.models.norms import Norms
from megarl.models.paired_experts import PairedExperts
from megarl.models.parameters import LAYER, LogicalTensor, Parameter, Part, padded_vocab_size
from megarl.models.registry import attention_flops, family
from megarl.reshard.layout import generator_layout, hf_layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.proof import prove_exactly_once

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}

SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def without(key: str) -> dict:
    return {k: v for k, v in CONFIG.items() if k != key}


def test_reads_a_folder_a_file_and_a_dict_alike(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    spec = load_spec(CONFIG)
    assert load_spec(str(tmp_path)) == load_spec(tmp_path / "config.json") == spec
    assert (
        spec.family,
        spec.num_layers,
        spec.head_dim,
        spec.rope_theta,
        spec.tie_word_embeddings,
    ) == ("llama", 4, 32, 500000.0, True)


def test_states_the_tensors_that_transformers_saves():
    spec = load_spec({**without("head_dim"), "tie_word_embeddings": False})
    assert {t.name: t.shape for t in family(spec).logical_tensors(spec)} == {
        "model.embed_tokens.weight": (64, 128),
        "model.layers.{layer}.self_attn.q_proj.weight": (128, 128),
        "model.layers.{layer}.self_attn.k_proj.weight": (64, 128),
        "model.layers.{layer}.self_attn.v_proj.weight": (64, 128),
        "model.layers.{layer}.self_attn.o_proj.weight": (128, 128),
        "model.layers.{layer}.mlp.gate_proj.weight": (384, 128),
        "model.layers.{layer}.mlp.up_proj.weight": (384, 128),
        "model.layers.{layer}.mlp.down_proj.weight": (128, 384),
        "model.layers.{layer}.input_layernorm.weight": (128,),
        "model.layers.{layer}.post_attention_layernorm.weight": (128,),
        "model.norm.weight": (128,),
        "lm_head.weight": (64, 128),
    }


@pytest.mark.parametrize(
    "rope", [{"rope_scaling": SCALING}, {"rope_parameters": SCALING | {"rope_theta": 5e5}}]
)
def test_rope_is_read_in_the_old_and_in_the_new_form(rope):
    spec = load_spec({**CONFIG, **rope})
    assert spec.rope_theta == 5e5
    assert dict(spec.rope_scaling) == SCALING


@pytest.mark.parametrize(
    "rotary",
    [
        {"partial_rotary_factor": 0.25},
        {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}},
        {},
    ],
)
def test_partial_rotary_factor_is_read_in_old_and_new_form(rotary):
    config = json.loads(
        (Path(__file__).parents[2] / "configs" / "models" / "glm-4.6" / "config.json").read_text()
    )
    spec = load_spec(
        {
            **{key: value for key, value in config.items() if key != "partial_rotary_factor"},
            **rotary,
        }
    )
    assert (spec.partial_rotary_factor, spec.rope_theta, spec.rope_scaling) == (
        0.25 if rotary else 0.5,
        1e6,
        None,
    )


@pytest.mark.parametrize(
    ("stated", "token"), [(None, None), (0, 0), (63, 63), (-1, 63), (64, None), ([1, 2], None)]
)
def test_padding_token_is_that_of_nn_embedding(stated, token):
    """Llama 1's -1 is the last row. Two models that differ only in it have the same shape."""
    assert load_spec({**CONFIG, "pad_token_id": stated}).padding_token == token
    assert load_spec({**CONFIG, "pad_token_id": stated}) == load_spec(CONFIG)


@pytest.mark.parametrize(
    "key",
    [
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "vocab_size",
        "architectures",
    ],
)
def test_a_missing_key_is_named_with_its_file(tmp_path, key):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(without(key)))
    with pytest.raises(ConfigError) as error:
        load_spec(tmp_path)
    assert str(path) in str(error.value)
    assert f"{key} is missing" in str(error.value)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "supported: DeepseekV3ForCausalLM, .*LlamaForCausalLM, ",
        ),
        (
            {
                "architectures": ["HeliumForCausalLM"],
                "final_logit_softcapping": 30.0,
                "use_cache": True,
            },
            "(it has the keys of LlamaForCausalLM, except final_logit_softcapping = 30.0)",
        ),
        (
            {"attention_bias": True, "mlp_bias": True},
            "attention_bias = True is not supported, only False is\nconfig: mlp_bias = True",
        ),
        ({"hidden_size": "128"}, "hidden_size = '128'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3",
        ),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
        (
            {"architectures": ["Phi3ForCausalLM"], "sliding_window": 63},
            "sliding_window = 63 is not supported",
        ),
        (
            {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75},
            "partial_rotary_factor = 0.75 is not supported",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192},
            "sliding_window = 4096, the default of Transformers for an absent key, is not "
            "supported, only null and windows of at least",
        ),
    ],
)
def test_unsupported_values_are_refused_by_key_and_value(change, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace(")", r"\)")):
        load_spec({**CONFIG, **change})


def test_a_missing_folder_and_a_broken_file_are_named(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_spec(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json: cannot be read as JSON"):
        load_spec(tmp_path)


def test_vocabulary_is_padded_to_a_multiple_of_128_per_shard():
    cases = {(64, 1): 128, (64, 2): 256, (128256, 8): 129024, (1024, 8): 1024}
    assert {case: padded_vocab_size(*case) for case in cases} == cases


# Parameters in billions, from the model cards. DeepSeek-V3 and GLM-4.6 are without their
# multi-token prediction layers.
CARDS = {
    "qwen2.5-7b": 7.615616512,
    "qwen3-8b": 8.190735360,
    "mistral-7b-v0.3": 7.248023552,
    "gemma-3-1b": 0.999885952,
    "olmo-2-7b": 7.298617344,
    "phi-4": 14.659507200,
    "qwen3-30b-a3b": 30.532122624,
    "qwen3-235b-a22b": 235.093634560,
    "mixtral-8x7b": 46.702792704,
    "deepseek-v3": 671.026419200,
    "kimi-k2": 1026.408232448,
    "glm-4.6": 352.797829024,
    "gpt-oss-20b": 20.914757184,
    "gpt-oss-120b": 116.829156672,
    "qwen3-next-80b-a3b": 79.674391296,
    # without the vision tower, which the name's number includes
    "qwen3.5-397b-a17b": 396.346350336,
}


TRUNCATED = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
SIZES = {
    "gemma-3-1b": (1, 2),
    "qwen2.5-7b": (4, 4),
    "olmo-2-7b": (4, 2),
    "phi-4": (2, 2),
    "glm-4.6": (4, 4),
    "qwen3-next-80b-a3b": (2, 4),
    "qwen3.5-397b-a17b": (2, 8),
}  # tensor-parallel sizes of trainer and engine, for models that 4 and 8 do not fit


@pytest.mark.parametrize("model", CARDS)
def test_shipped_shapes_have_the_published_number_of_parameters(model):
    spec = load_spec(Path(__file__).parents[2] / "configs" / "models" / model)
    count = 0
    for tensor in family(spec).logical_tensors(spec):
        layers = tensor.layers or range(spec.num_layers if tensor.place == "layer" else 1)
        count += len(layers) * max(1, tensor.experts) * math.prod(tensor.shape)
    assert count == round(CARDS[model] * 1e9)


@pytest.mark.parametrize("model", CARDS)
@pytest.mark.parametrize("quantization", [None, "fp8_block", "fp8_channel"])
def test_every_family_is_resharded_at_its_real_size(model, quantization):
    spec = load_spec(Path(__file__).parents[2] / "configs" / "models" / model)
    experts = 8 if spec.experts else 1
    last = spec.num_layers - 1 if spec.num_layers % 2 else None
    trainer_tp, tp = SIZES.get(model, (4, 8))
    trainer = trainer_layout(
        spec,
        TrainerTopology(tp=trainer_tp, pp=2, dp=16, ep=experts, last_stage_layers=last),
        "bfloat16",
        "te",
    )
    engine = GeneratorTopology(engines=8, tp=tp, ep=min(experts, tp))
    if quantization and spec.family == "gpt_oss":
        with pytest.raises(
            ConfigError, match="generator.quantization: must be null for a gpt_oss model"
        ):
            generator_layout(spec, engine, "bfloat16", "cuda", quantization)
        return
    map = ReshardMap.build(
        trainer, generator_layout(spec, engine, "bfloat16", "cuda", quantization)
    )
    prove_exactly_once(map)
    summary = map.summary()
    assert summary.bytes == summary.bytes_minimum
    assert summary.receiver_max_over_mean < 1.02
    # runs of equal layers
    runs = (
        1 + len(set(range(spec.num_layers)) - set(spec.linear_layers)) if spec.linear_layers else 1
    )
    assert len(map.rows) < 2000 * runs  # the map does not grow with layers, experts or replicas


def test_a_family_that_mixes_dense_layers_in_is_refused():
    config = json.loads(
        (
            Path(__file__).parents[2] / "configs" / "models" / "qwen3-30b-a3b" / "config.json"
        ).read_text()
    )
    with pytest.raises(ConfigError, match="decoder_sparse_step = 2"):
        load_spec({**config, "decoder_sparse_step": 2})
    with pytest.raises(ConfigError, match=r"mlp_only_layers = \[0\]"):
        load_spec({**config, "mlp_only_layers": [0]})


@pytest.mark.parametrize(
    "model, change, message",
    [
        (
            "mixtral-8x7b",
            {"head_dim": 64},
            "head_dim = 64 is not hidden_size / num_attention_heads",
        ),
        (
            "mixtral-8x7b",
            {"rope_scaling": SCALING},
            "only a rope_theta that is a whole number is supported",
        ),
        (
            "gemma-3-1b",
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            "rope_type = 'linear' is not supported",
        ),
        (
            "gemma-3-1b",
            {"final_logit_softcapping": 30.0},
            "final_logit_softcapping = 30.0 is not supported",
        ),
        ("olmo-2-7b", {"head_dim": 64}, "head_dim = 64 is not hidden_size / num_attention_heads"),
        (
            "deepseek-v3",
            {"rope_scaling": {"rope_type": "yarn", "factor": 40}},
            "rope_scaling lacks beta_fast, ",
        ),
        (
            "qwen3-8b",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor = 0.5 is not supported, only 1.0 is",
        ),
        (
            "qwen3-next-80b-a3b",
            {"layer_types": ["full_attention"] * 48},
            "layer_types = .* is not supported",
        ),
        (
            "qwen3-next-80b-a3b",
            {"mlp_only_layers": [0]},
            r"mlp_only_layers = \[0\] is not supported",
        ),
        (
            "qwen3-next-80b-a3b",
            {"linear_num_value_heads": 24},
            "linear_num_value_heads = 24 is not a multiple of linear_num",
        ),
        (
            "deepseek-v3",
            {"rms_norm_eps": 1e-5},
            "rms_norm_eps = 1e-05 is not supported, only 1e-06 is",
        ),
        (
            "gpt-oss-20b",
            {"rope_scaling": {"rope_type": "default"}},
            "rope_type = 'default' is not supported, only 'yarn' is",
        ),
        (
            "gpt-oss-20b",
            {"rope_scaling": {"rope_type": "yarn", "factor": 32}},
            "rope_scaling lacks beta_fast, ",
        ),
        (
            "gpt-oss-20b",
            {"rope_scaling": TRUNCATED},
            "truncate = true in rope_scaling is not supported",
        ),
        (
            "gpt-oss-20b",
            {"rope_scaling": TRUNCATED | {"truncate": False, "mscale": 0.7}},
            "rope_scaling has mscale, which is",
        ),
        (
            "gpt-oss-20b",
            {"swiglu_alpha": 1.5},
            "swiglu_alpha = 1.5 is not supported, only 1.702 is",
        ),
        (
            "gpt-oss-20b",
            {"attention_bias": False},
            "attention_bias = False is not supported, only True is",
        ),
    ],
)
def test_models_that_engines_serve_differently_are_refused(model, change, message):
    config = json.loads(
        (Path(__file__).parents[2] / "configs" / "models" / model / "config.json").read_text()
    )
    with pytest.raises(ConfigError, match=message):
        load_spec({**config, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob = False is not supported, only True is"),
        (
            {"output_gate_type": "sigmoid"},
            "output_gate_type = 'sigmoid' is not supported, only 'swish' is",
        ),
        ({"layer_types": ["full_attention"] * 60}, "layer_types = .* is not supported"),
        ({"attn_output_gate": False}, "attn_output_gate = False is not supported, only True is"),
    ],
)
def test_text_config_beside_a_vision_tower_is_checked(change, message):
    config = json.loads(
        (
            Path(__file__).parents[2] / "configs" / "models" / "qwen3.5-397b-a17b" / "config.json"
        ).read_text()
    )
    with pytest.raises(ConfigError, match=message):
        load_spec({**config, "text_config": config["text_config"] | change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": [3]}, r"architectures = \[3\] is not a list of names"),
        (
            {"architectures": "Glm4MoeForCausalLM"},
            "architectures = 'Glm4MoeForCausalLM' is not a list of names",
        ),
        ({"rope_parameters": [1]}, r"rope_parameters = \[1\] is not a mapping"),
        ({"rope_scaling": "x"}, "rope_scaling = 'x' is not a mapping"),
        (
            {"partial_rotary_factor": 2.0},
            "partial_rotary_factor = 2.0 must be above 0, and at most 1",
        ),
    ],
)
def test_values_of_another_kind_are_refused(change, message):
    config = json.loads(
        (Path(__file__).parents[2] / "configs" / "models" / "glm-4.6" / "config.json").read_text()
    )
    with pytest.raises(ConfigError, match=message):
        load_spec(config | change)


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("llama-3.1-8b", {"rms_norm_eps": -1e-5}, "rms_norm_eps = -1e-05 is not a positive number"),
        ("llama-3.1-8b", {"rms_norm_eps": math.nan}, "rms_norm_eps = nan is not a positive number"),
        ("mixtral-8x7b", {"rope_theta": math.inf}, "rope_theta = inf is not a positive number"),
        ("llama-3.1-8b", {"rope_scaling": SCALING | {"factor": "8"}}, "factor = '8' is not a posi"),
        (
            "gemma-3-1b",
            {"rope_parameters": {"full_attention": 3}},
            "full_attention = 3 is not a ma",
        ),
        ("deepseek-v3", {"n_group": 0}, "n_group = 0 is not a positive integer"),
        ("deepseek-v3", {"first_k_dense_replace": 61}, "so none of 61 has experts"),
        ("llama-3.1-8b", {"head_dim": 127}, "127 dims of each head are rotated; .* an even number"),
        ("gpt-oss-20b", {"layer_types": 3}, "layer_types must be a list with a name for each"),
        ("gemma-3-1b", {"layer_types": ["full_attention"]}, "each of the num_hidden_layers = 26"),
        ("qwen2.5-7b", {"layer_types": True}, "layer_types must be a list"),
        ("gpt-oss-20b", {"layer_types": ["chunked_attention"] * 24}, "layer_types has chunked_att"),
    ],
)
def test_damaged_values_are_refused_by_key(model, change, message):
    path = Path(__file__).parents[2] / "configs" / "models" / model / "config.json"
    with pytest.raises(ConfigError, match=message):
        load_spec(json.loads(path.read_text()) | change)


@pytest.mark.parametrize(
    ("blocks", "problem"),
    [
        ({"attention": Attention(output_bias=True)}, "output_bias needs experts with biases"),
        ({"attention": Attention(qk_norm_of_all_heads=True)}, "needs qk_norm"),
        ({"attention": Attention(windowed_layers=(0,))}, "windowed_layers need a window"),
        ({"attention": Attention(window=4, windowed_layers=(4,))}, "not among the 4"),
        ({"norms": Norms(before=False)}, "norms must be before or after"),
        ({"experts": PairedExperts(4, 2, 8)}, "output_bias needs experts with biases"),
        ({"num_kv_heads": 3}, "4 attention heads are not a multiple of 3 key-value heads"),
    ],
)
def test_blocks_that_do_not_fit_are_problems(blocks, problem):
    spec = load_spec(CONFIG)
    assert [*spec.problems()] == []
    assert any(problem in text for text in dataclasses.replace(spec, **blocks).problems())


def test_groups_of_experts_divide_them():
    config = Path(__file__).parents[2] / "configs" / "models" / "deepseek-v3" / "config.json"
    spec = load_spec(json.loads(config.read_text()) | {"n_group": 3})
    assert "n_group = 3 must divide the 256 experts" in " ".join(spec.experts.problems())


def test_model_beside_a_vision_tower_differs_only_in_names():
    """In names of files' tensors: otherwise it is the language model alone."""
    config = json.loads(
        (
            Path(__file__).parents[2] / "configs" / "models" / "qwen3.5-397b-a17b" / "config.json"
        ).read_text()
    )
    beside = load_spec(config)
    alone = load_spec(
        config["text_config"]
        | {"architectures": ["Qwen3_5MoeForCausalLM"], "output_gate_type": "swish"}
    )
    assert alone == dataclasses.replace(beside, vision_tower=False)
    names = [
        {tensor.name for tensor in hf_layout(spec.cut(4), "bfloat16", fused=True).tensors(0)}
        for spec in (alone, beside)
    ]
    assert {
        name.replace("model.language_model.", "model.")
        for name in names[1]
        if ".experts." not in name
    } < names[0]
    assert {name for name in names[1] if ".experts." in name} == {
        f"model.language_model.layers.{layer}.mlp.experts.{kind}_proj"
        for layer in range(4)
        for kind in ("gate_up", "down")
    }
    tied = load_spec(config | {"tie_word_embeddings": True})
    assert tied.tie_word_embeddings
    assert not beside.tie_word_embeddings


def test_gpt_oss_has_windows_in_every_other_layer_by_default():
    """layer_types of config.json says otherwise."""
    config = json.loads(
        (
            Path(__file__).parents[2] / "configs" / "models" / "gpt-oss-20b" / "config.json"
        ).read_text()
    )
    spec = load_spec(config)
    assert spec == load_spec({key: value for key, value in config.items() if key != "layer_types"})
    assert spec.attention.windowed_layers == tuple(range(0, 24, 2))
    assert (
        spec.attention.window,
        spec.activation_limit,
    ) == (128, 7.0)
    without = load_spec(config | {"layer_types": ["full_attention"] * 24})
    assert without.attention.windowed_layers == ()


def test_windows_are_read_in_the_old_and_in_the_new_form():
    old = json.loads(
        (
            Path(__file__).parents[2] / "configs" / "models" / "gemma-3-1b" / "config.json"
        ).read_text()
    )
    new = {
        key: value
        for key, value in old.items()
        if not key.startswith("rope_") and key != "sliding_window_pattern"
    }
    new["rope_parameters"] = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 1e4},
    }
    new["layer_types"] = [
        ("sliding_attention", "full_attention")[layer in (5, 11, 17, 23)] for layer in range(26)
    ]
    spec = load_spec(old)
    assert spec == load_spec(new)
    attention = spec.attention
    assert len(attention.windowed_layers) == 22
    assert (spec.rope_theta, attention.windowed_rope_theta) == (1e6, 1e4)
    assert (attention.window, attention.scale) == (512, 1 / 16)


@pytest.mark.parametrize("labels", [{"num_labels": 1}, {"id2label": {"0": "LABEL_0"}}])
def test_sequence_classification_of_one_label_has_a_scalar_head(labels):
    """The head shares no weights with the embedding, whatever config.json says about tying."""
    spec = load_spec({**CONFIG, "architectures": ["LlamaForSequenceClassification"], **labels})
    assert spec == load_spec(CONFIG).with_scalar_head()
    assert (
        spec.head,
        spec.tie_word_embeddings,
    ) == ("scalar", False)
    tensors = {t.name: t.shape for t in family(spec).logical_tensors(spec)}
    assert tensors.pop("score.weight") == (1, 128)
    tied = load_spec(CONFIG)
    assert tensors == {t.name: t.shape for t in family(tied).logical_tensors(tied)}
    heads = [
        t
        for rank in range(4)
        for t in trainer_layout(spec, TrainerTopology(tp=2, pp=2), "float32").tensors(rank)
    ]
    heads = [t.shape for t in heads if t.name == "output_layer.weight"]
    assert heads == [(1, 128), (1, 128)], "whole, on both tensor ranks of the last stage alone"


@pytest.mark.parametrize("labels", [{}, {"num_labels": 3}, {"id2label": {"0": "bad", "1": "good"}}])
def test_more_than_one_label_is_refused(labels):
    with pytest.raises(ConfigError, match=r"LlamaForSequenceClassification has [23] labels"):
        load_spec({**CONFIG, "architectures": ["LlamaForSequenceClassification"], **labels})


def test_broken_sglang_module_hides_no_other_family(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def imported(name: str) -> SimpleNamespace:
        module = name.rpartition(".")[2]
        if module == "deepseek_v2":
            raise ImportError("no such operator")
        classes = {
            architecture: type(architecture, (), {})
            for architecture in ("Gemma3ForCausalLM", "Glm4MoeForCausalLM", "Qwen3NextForCausalLM")
        }
        return SimpleNamespace(EntryClass=type(module, (), {}), **classes)

    monkeypatch.setattr("importlib.import_module", imported)
    served = runpy.run_path(
        str(Path(__file__).parents[2] / "megarl/generator/architectures/unchanged.py")
    )["EntryClass"]
    expected = [
        "Gemma3ForCausalLM",
        "Glm4MoeForCausalLM",
        "llama",
        "llama_reward",
        "mixtral",
        "olmo2",
        "qwen3_moe",
        "Qwen3NextForCausalLM",
    ]
    assert [model_class.__name__ for model_class in served] == expected


@pytest.mark.parametrize(
    ("model", "change"),
    [
        ("glm-4.6", {"first_k_dense_replace": 0}),
        ("deepseek-v3", {"first_k_dense_replace": 0}),
        ("deepseek-v3", {"n_shared_experts": 0}),
    ],
)
def test_mixtures_without_dense_layers_or_shared_experts(model, change):
    values = json.loads(
        (Path(__file__).parents[2] / "configs/models" / model / "config.json").read_text()
    )
    spec = load_spec(values | change)
    assert 0 in (spec.experts.first_layer, spec.experts.shared_size)


@pytest.mark.parametrize(
    "model", ["qwen3-next-80b-a3b", "qwen3-30b-a3b", "glm-4.6", "mixtral-8x7b", "gpt-oss-20b"]
)
def test_tied_model_is_refused_where_sglang_never_ties(model):
    values = json.loads(
        (Path(__file__).parents[2] / "configs/models" / model / "config.json").read_text()
    )
    with pytest.raises(ConfigError, match="tie_word_embeddings = True is not supported"):
        load_spec(values | {"tie_word_embeddings": True})


def test_theta_of_qwen3_next_must_stand_where_sglang_reads_it():
    values = json.loads(
        (Path(__file__).parents[2] / "configs/models/qwen3-next-80b-a3b/config.json").read_text()
    )
    del values["rope_theta"]
    with pytest.raises(
        ConfigError,
        match="rope_theta = 700 must also stand beside rope_parameters: .* would take 10000",
    ):
        load_spec(
            values
            | {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 700.0,
                    "partial_rotary_factor": 0.25,
                }
            }
        )


DECAY = "model.layers.{layer}.decay.weight"


@dataclasses.dataclass(frozen=True)
class Decaying(LinearAttention):
    """A linear attention that the package does not know."""

    NAME = "decaying sums"
    QUANTISED = (DECAY,)
    INPUT_NORM = dict.fromkeys(("local", "te"), "input_layernorm.weight")
    width: int

    def logical(self, sizes):
        return [LogicalTensor(DECAY, (self.width, sizes.hidden_size), LAYER)]

    def megatron(self, sizes, topology, layer_spec):
        name = "decoder.layers.{layer}.self_attention.decay.weight"
        return [Parameter(name, LAYER, (Part(DECAY),), dim=0, groups=topology.tp)]

    def sglang(self, sizes, topology, device):
        return [Parameter(DECAY, LAYER, (Part(DECAY),), dim=0, groups=topology.tp)]

    def megatron_settings(self, sizes):
        return {}

    def flops(self, sizes, layers, length):
        return layers * 7.0

    def activation_elements(self, sizes, tp):
        return self.width / tp

    def state_bytes(self, item):
        return item * self.width


def test_new_block_answers_for_itself():
    plain = load_spec(CONFIG)
    spec = dataclasses.replace(plain, linear_attention=Decaying((0, 2), 64))
    source = trainer_layout(spec, TrainerTopology(tp=2, pp=2), "bfloat16")
    engines = generator_layout(spec, GeneratorTopology(2, 2, 1, 1), "bfloat16", "cuda")
    prove_exactly_once(ReshardMap.build(source, engines))
    names = {tensor.name for tensor in hf_layout(spec, "float32").tensors(0)}
    assert {name for name in names if "decay" in name} == {
        f"model.layers.{layer}.decay.weight" for layer in (0, 2)
    }
    assert attention_flops(spec, 9) == (attention_flops(plain, 9) + 7.0) / 2
    assert state_bytes(spec, GeneratorConfig(tp=2), 2) == 2 * 2 * 64 / 2
    saved = layer_activations(spec, TrainerConfig(), experts=False).saved
    attention = plain.attention.activation_elements(plain, 1)
    assert (
        layer_activations(plain, TrainerConfig(), experts=False).saved - saved
        == (attention - 64) / 2
    )
    assert spec.cut(2).linear_layers == (0,)
    assert family(spec).quantised_parameters(spec)[2] == DECAY
