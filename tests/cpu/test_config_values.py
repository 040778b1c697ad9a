"""Each value of a config.json is that of Transformers' own class for the file, or the file is
refused.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from trainer_cases import MODELS
from transformers import CONFIG_MAPPING

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.launch.inputs import check_configs
from megarl.models import auto_config, load_spec
from megarl.models.registry import architectures, check_as_transformers, differences
from megarl.plan.resolve import resolve

SIZES = {
    "architectures", "hidden_size", "intermediate_size", "max_position_embeddings", "model_type",
    "num_attention_heads",
    "num_hidden_layers", "rope_parameters", "text_config", "vocab_size",
}  # fmt: skip
# Of these, SGLang has another default, or none.
OF_ENGINES = {"full_attention_interval", "sliding_window", "swiglu_alpha"}
LINEAR = {"type": "linear", "factor": 4.0, "rope_theta": 700.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "theta beside": {"rope_theta": 700.0},
    "theta inside rope_scaling": {"rope_scaling": {"rope_type": "default", "rope_theta": 700.0}},
    "theta inside and beside": {
        "rope_scaling": {"rope_type": "default", "rope_theta": 700.0},
        "rope_theta": 900.0,
    },
    "none": {},
    "rope_scaling before rope_parameters": {
        "rope_scaling": LINEAR,
        "rope_parameters": {"rope_type": "default", "rope_theta": 900.0},
    },
    "linear, in the old form": {"rope_scaling": LINEAR},
    "llama3 without its length": {"rope_scaling": LLAMA3, "rope_theta": 700.0},
    "yarn in rope_scaling": {
        "rope_scaling": YARN,
        "rope_parameters": {"rope_type": "default", "rope_theta": 900.0},
    },
    "factor inside": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 700.0,
            "partial_rotary_factor": 0.5,
        }
    },
    "factor beside": {"rope_theta": 700.0, "partial_rotary_factor": 0.5},
}


def saved(family: str) -> dict[str, Any]:
    """The config.json that Transformers writes for a small model of the family."""
    config = MODELS[family]
    values = json.loads(config.to_json_string(use_diff=False))
    names = [
        name
        for name in architectures()
        if type(config).__name__.removesuffix("Config").removesuffix("Text") == name.split("For")[0]
    ]
    values["architectures"] = [sorted(names)[-1] if "text_config" in values else sorted(names)[0]]
    inner = values.get("text_config", values)
    if "linear_num_key_heads" in inner:  # SGLang needs them there
        inner |= {
            "full_attention_interval": 2,
            "partial_rotary_factor": 0.25,
            "rope_theta": inner["rope_parameters"]["rope_theta"],
        }
    return values


def compared(values: dict[str, Any]) -> str:
    """equal, refused, or the differing fields."""
    try:
        spec = load_spec(values)
    except ConfigError as error:
        return f"refused: {error}"
    reference = auto_config.read(json.loads(json.dumps(values)))
    if "problem" in reference:
        return f"refused: {reference['problem']}"
    return "; ".join(differences(values, reference, spec)) or "equal"


@pytest.mark.parametrize("family", MODELS)
def test_an_absent_key_is_the_default_of_transformers(family: str) -> None:
    full_config = saved(family)
    assert compared(full_config) == "equal"
    inner = full_config.get("text_config", full_config)
    for key in sorted(inner.keys() - SIZES):
        without = {name: value for name, value in inner.items() if name != key}
        result = compared(
            full_config | {"text_config": without} if "text_config" in full_config else without
        )
        assert (
            result == "equal"
            or (key in OF_ENGINES and result.startswith("refused"))
            or "is not a multiple of" in result
        ), (key, result)


@pytest.mark.parametrize("form", ROPES)
@pytest.mark.parametrize("family", MODELS)
def test_rotary_embeddings_are_read_as_by_transformers(family: str, form: str) -> None:
    full_config = saved(family)
    inner = full_config.get("text_config", full_config)
    bare = {
        key: value
        for key, value in inner.items()
        if key not in ("rope_parameters", "rope_theta", "partial_rotary_factor")
    }
    changed = bare | ROPES[form]
    result = compared(
        full_config | {"text_config": changed} if "text_config" in full_config else changed
    )
    assert result == "equal" or result.startswith("refused"), result


@pytest.mark.parametrize(
    "path",
    sorted(Path(__file__).parents[2].glob("configs/models/*/config.json")),
    ids=lambda path: path.parent.name,
)
def test_shipped_configurations_are_read_as_by_transformers(path: Path) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    if values["model_type"] not in CONFIG_MAPPING:
        pytest.skip("Transformers has no class for it")
    if "linear_num_key_heads" in values.get("text_config", values):
        pytest.skip("its period is not a key of Transformers' class")
    assert compared(values) == "equal"


WINDOWED = ("mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe")


@pytest.mark.parametrize("family", WINDOWED)
def test_only_windows_below_the_context_are_refused(family: str) -> None:
    """The context of these models is 256.

    Without the key, Transformers' window of Mistral is 4096.
    """
    values = saved(family) | {"use_sliding_window": True, "max_window_layers": 0}
    values.pop("layer_types", None)
    for window in (256, 257, None):
        assert compared(values | {"sliding_window": window}) == "equal", window
    below = (
        "refused: config: sliding_window = 255 is not supported, only null and windows of at "
        "least max_position_embeddings = 256 are"
    )
    assert compared(values | {"sliding_window": 255}) == below
    del values["sliding_window"]
    assert compared(values) == "equal"
    long = compared(values | {"max_position_embeddings": 8192})
    assert (
        long == "equal"
        or "sliding_window = 4096, the default of Transformers for an absent key, is not supported"
        in long
    )
    assert (long == "equal") == (family in ("mixtral", "phi3"))


@pytest.mark.parametrize("window_layers", [3, 4])
def test_windows_of_qwen_begin_at_max_window_layers(window_layers: int) -> None:
    values = saved("qwen2") | {
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": window_layers,
    }
    del values["layer_types"]
    assert (compared(values) == "equal") == (window_layers == 4)


@pytest.mark.parametrize("family", MODELS)
def test_model_type_must_be_of_the_architecture(family: str, tmp_path: Path) -> None:
    values = saved(family)
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    load_spec(tmp_path)
    for stated, problem in (
        ("vit", "is of ViT"),
        ("qwen7", "is unknown to transformers"),
        (None, "is unknown to transformers"),
    ):
        changed = values | {"model_type": stated}
        (tmp_path / "config.json").write_text(json.dumps(changed), encoding="utf-8")
        with pytest.raises(ConfigError) as error:
            load_spec(tmp_path)
        must = f"for {values['architectures'][0]} it must be"
        assert f"model_type = {stated!r} {problem}; {must}" in str(error.value)
        assert f"{values['model_type']!r}" in str(error.value)
        changed["auto_map"] = {"AutoConfig": "configuration.Config"}
        (tmp_path / "config.json").write_text(json.dumps(changed), encoding="utf-8")
        load_spec(tmp_path)


def test_reward_model_is_compared_with_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # the cache is empty
    values = saved("untied") | {
        "architectures": ["LlamaForSequenceClassification"],
        "num_labels": 1,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    check_as_transformers(str(tmp_path), load_spec(tmp_path))


def test_a_value_that_transformers_reads_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = saved("untied")
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))  # the cache is empty
    spec = load_spec(tmp_path)
    check_as_transformers(str(tmp_path), spec)
    with pytest.raises(
        ConfigError, match=r"transformers reads other values: MegaRL has rope_theta 11.0, not"
    ):
        check_as_transformers(str(tmp_path), dataclasses.replace(spec, rope_theta=11.0))
    values["num_hidden_layers"] = "two"
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ConfigError, match="transformers refuses it"):
        check_as_transformers(str(tmp_path), spec)


@pytest.mark.long
def test_every_model_of_a_run_is_compared_with_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # the cache is empty
    language = saved("untied")
    scalar = {
        "architectures": ["LlamaForSequenceClassification"],
        "num_labels": 1,
        "tie_word_embeddings": False,
    }
    two_layers = saved("qwen2") | {"architectures": ["Qwen2ForRewardModel"]}
    of_role = {
        "policy": language,
        "critic": language | scalar,
        "reference": language,
        "teacher": language,
        "rm": two_layers,
    }
    for name, values in of_role.items():
        folder = tmp_path / name
        folder.mkdir()
        values = values | {"initializer_range": f"that of the {name}"}  # MegaRL does not read it
        (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    config = load_config({
        "model": {"path": str(tmp_path / "policy"), "dtype": "float32"},
        "data": {"train": {"source": "synthetic:chain"}},
        "algorithm": {"name": "ppo", "kl_coef": 0.1, "distill": {"over": "vocabulary"}},
        "roles": {
            **{name: {"path": str(tmp_path / name)} for name in ("critic", "reference")},
            "teacher": {"path": str(tmp_path / "teacher"), "on": "trainer"},
            "rm": {"path": str(tmp_path / "rm"), "role": "reward_model"},
        },
        "reward": {"name": "roles.rm"},
        "rollout": {"max_tokens": 8},
        "cluster": {"gpu": "cpu"},
    })  # fmt: skip
    plan = resolve(config)
    for command, names in (
        ("sft", ["policy"]),
        ("eval", ["policy", "rm"]),
        ("train", ["policy", "critic", "reference", "teacher", "rm"]),
    ):
        with pytest.raises(ConfigError) as error:
            check_configs(plan, command, at_hand=False)
        assert [
            Path(problem.split("/config.json: ")[0]).name for problem in error.value.problems
        ] == names
        assert all("transformers refuses it" in problem for problem in error.value.problems)
