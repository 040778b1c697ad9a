"""Models and layouts for tests of checkpoints: random ones, and those that once failed."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import trainer_cases
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megarl.base.geometry import TrainerTopology
from megarl.config.errors import ConfigError
from megarl.models.registry import load_spec
from megarl.reshard.layout import trainer_layout

MOST_RANKS = 8
DTYPES = ("float32", "bfloat16")
Chain = dict[str, Any]  # name, model, dtype, layouts: see checkpoint_worker.py

TIED = {
    "num_hidden_layers": 2,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_size": 224,
    "intermediate_size": 96,
    "vocab_size": 1003,
}
POWERS = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 512,
}
DENSE_FIRST = {"num_hidden_layers": 4, "first_k_dense_replace": 2}
# (name, family, settings, dtype, layouts). These failed in Megatron's own format. The first two
# were saved wrong, because a tied embedding is a padded bucket of its own. In the last two, a
# pipeline stage without experts could not be saved, or not be loaded.
KNOWN: list[tuple[str, str, dict[str, Any], str, list[dict[str, int]]]] = [
    ("tied_odd_width", "qwen2", TIED, "float32",
    [{"tp": 2, "pp": 2}, {"dp": 3}, {"tp": 2, "dp": 2}, {"pp": 2, "dp": 3}]),
    ("tied_dp3", "qwen2", POWERS, "bfloat16",
    [{"pp": 2, "dp": 3}, {}, {"pp": 2, "dp": 3}, {"tp": 2, "pp": 2, "zero": 0}]),
    ("no_experts_zero1", "deepseek_v3", DENSE_FIRST, "float32",
    [{"pp": 2, "dp": 2, "first_stage_layers": 1}, {}, {"dp": 3}]),
    ("no_experts_zero0", "deepseek_v3", DENSE_FIRST, "bfloat16", [
        {"pp": 2, "dp": 2, "ep": 2, "zero": 0, "first_stage_layers": 1}, {"pp": 2, "dp": 2},
    ]),
    ("sharded", "deepseek_v3", DENSE_FIRST, "bfloat16", [
        {"tp": 2, "dp": 3, "zero": 3}, {"dp": 2, "ep": 2}, {"dp": 4, "ep": 2, "zero": 3},
        {"pp": 2, "dp": 2, "zero": 3}, {"dp": 2, "zero": 0},
    ]),
]  # fmt: skip


def known_chains(folder: Path) -> list[Chain]:
    return [
        _chain(folder, name, _model(family, settings), dtype, layouts)
        for name, family, settings, dtype, layouts in KNOWN
    ]


def random_chains(folder: Path, seed: int, count: int, layouts: int) -> list[Chain]:
    """`count` models of all families in turn, each with several different layouts."""
    random = Random(seed)
    families = list(trainer_cases.MODELS)
    return [
        _random_chain(folder, f"random_{seed}_{i}", random, families[i % len(families)], layouts)
        for i in range(count)
    ]


def _random_chain(folder: Path, name: str, random: Random, family: str, count: int) -> Chain:
    """A random model and layouts.

    Sizes are no powers of two, so that few divide the alignment of Megatron's buckets.
    """
    heads, groups = random.choice([(2, 1), (4, 2), (6, 2), (4, 4), (8, 4), (14, 2)])
    if family == "deepseek_v3":
        groups = heads
    settings = {
        "num_attention_heads": heads, "num_key_value_heads": groups,
        "hidden_size": heads * random.choice([4, 6, 8, 10]),
        "num_hidden_layers": random.randint(2, 6), "vocab_size": random.randint(40, 700),
        "tie_word_embeddings": random.random() < 0.5,
    }  # fmt: skip
    layered = family in ("deepseek_v3", "glm4_moe", "glm4_moe_air")  # the first layers are dense
    key = (
        "moe_intermediate_size"
        if layered or family in ("qwen3_moe", "qwen3_next", "qwen3_5_moe")
        else "intermediate_size"
    )
    settings[key] = 4 * random.randint(3, 20)
    if layered:
        settings["first_k_dense_replace"] = max(
            1, random.randint(0, settings["num_hidden_layers"] - 1)
        )
    config = _model(family, settings)
    try:
        spec = load_spec(config)
    except ConfigError:  # a family that has its output layer always tied, or never
        config["tie_word_embeddings"] = not config["tie_word_embeddings"]
        spec = load_spec(config)
    dtype = random.choice(DTYPES)
    layouts: list[dict[str, int]] = []
    while len(layouts) < count:
        layout = _layout(random, spec.num_layers, bool(spec.experts))
        topology = TrainerTopology(**layout)
        if (
            topology.world_size <= MOST_RANKS
            and layout not in layouts
            and _supported(spec, topology, dtype)
        ):
            layouts.append(layout)
    return _chain(folder, name, config, dtype, layouts)


def _layout(random: Random, layers: int, experts: bool) -> dict[str, int]:
    axes = {
        "tp": [1, 1, 2, 4],
        "pp": [1, 2, 3, 4],
        "vpp": [1, 1, 2],
        "cp": [1, 1, 2],
        "dp": [1, 2, 3, 4, 5, 6, 7],
        "zero": [1, 3, 0],
    }
    axes |= {"ep": [1, 2, 4], "etp": [1, 2]} if experts else {}
    layout = {axis: random.choice(sizes) for axis, sizes in axes.items()}
    if layout["pp"] > 1 and random.random() < 0.3:
        layout["first_stage_layers"] = random.randint(1, layers - 1)
    return layout


def _supported(spec: Any, topology: TrainerTopology, dtype: str) -> bool:
    latent = spec.family == "deepseek_v3"
    if (topology.vpp > 1 and topology.pp == 1) or (spec.num_kv_heads % topology.tp and not latent):
        return False
    if spec.family == "gpt_oss" and topology.etp > 1:  # Megatron has no biases there
        return False
    if spec.linear_attention and spec.linear_attention.key_heads % (topology.tp * topology.cp):
        return False
    try:
        trainer_layout(spec, topology, dtype)
    except ConfigError:
        return False
    return True


def _model(family: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A config.json."""
    model = trainer_cases.MODELS[family]
    config = getattr(model, "text_config", model).to_dict()
    config.pop("layer_types", None)
    if family not in ("qwen3", "qwen3_moe", "glm4_moe", "glm4_moe_air", *trainer_cases.HYBRID):
        config.pop("head_dim", None)  # it was that of the earlier number of heads
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]
    return {**config, "architectures": [architecture], **settings}


def _chain(
    folder: Path, name: str, config: dict[str, Any], dtype: str, layouts: list[dict[str, int]]
) -> Chain:
    model = folder / f"{name}.json"
    model.write_text(json.dumps(config))
    return {"name": name, "model": str(model), "dtype": dtype, "layouts": layouts}
