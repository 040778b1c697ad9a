"""Adapter folders in PEFT's format: adapter_config.json and adapter_model.safetensors.

Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl.base.files import write_whole
from megarl.config.errors import ConfigError
from megarl.config.keys import yaml_text
from megarl.lora.layout import Lora, target
from megarl.lora.settings import LoraConfig
from megarl.models.spec import ModelSpec
from megarl.trainer.hf_files import READ_DTYPES, header

SETTINGS_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SHOWN = 10  # most misfitting tensors that a message shows
# Settings of PEFT that would change the meaning of an adapter. Each is off if its value is false in
# Python.
_REFUSED = (
    "use_dora",
    "use_rslora",
    "fan_in_fan_out",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
)
# Initialisations that subtract something from the weights. PEFT does this again when it loads.
_CHANGE_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")


def shown(logical_name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """A tensor's name and shape in the file.

    A factor that all experts of a layer share has a dim of 1 for experts, as SGLang requires.
    """
    parts = logical_name.split(".")
    of_all = "experts" in parts and not parts[parts.index("experts") + 1].isdigit()
    return _PREFIX + logical_name, ((1, *shape) if of_all else shape)


def adapter_settings(
    lora: Lora, targets: Sequence[str], base: str | None, dropout: float
) -> dict[str, Any]:
    """The content of adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": dropout,
        "target_modules": list(targets),
        "bias": "none",
        "inference_mode": True,
    }


def empty_adapter(folder: Path, lora: Lora, targets: Sequence[str]) -> Path:
    """Writes the settings of an adapter whose weights engines get later.

    Several processes may do this at once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / SETTINGS_FILE, json.dumps(adapter_settings(lora, targets, None, 0.0)))
    return folder


def check_adapter(spec: ModelSpec, config: LoraConfig) -> None:
    """Raises ConfigError with all reasons why the run's adapters cannot begin with the folder
    `lora.init`.
    """
    lora = Lora.of(config)
    assert lora is not None and config.init is not None
    folder = Path(config.init)
    try:
        settings = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
        tensor_headers = header(folder / TENSORS_FILE)
    except (OSError, ValueError) as error:  # includes ConfigError
        raise ConfigError(
            f"lora.init={config.init}: is not the folder of a PEFT adapter: {error}"
        ) from error
    # otherwise misfitting tensors are only a consequence
    problems = [*_settings_problems(settings, spec, config, lora)]
    if not problems:
        problems = [*_tensor_problems(tensor_headers, spec, lora)]
        if len(problems) > _SHOWN:
            problems[_SHOWN:] = [f"{len(problems) - _SHOWN} more tensors"]
        else:
            problems[_SHOWN:] = []
    if problems:
        raise ConfigError([f"lora.init={config.init}: {problem}" for problem in problems])


def _settings_problems(
    settings: dict[str, Any], spec: ModelSpec, config: LoraConfig, lora: Lora
) -> Iterator[str]:
    if settings.get("peft_type") != "LORA":
        yield f"its peft_type is {settings.get('peft_type')}, not LORA"
    for peft_key, key, value in (
        ("r", "lora.rank", lora.rank),
        ("lora_alpha", "lora.alpha", lora.alpha),
    ):
        if settings.get(peft_key) != value:
            yield f"its {peft_key} is {settings.get(peft_key)}; {key}={value:g}"
    names = set()
    for tensor in lora.hf_layout(spec, "float32").tensors(0):
        names.add(target(tensor.name.rpartition(".lora_")[0]))
    file_targets = settings.get("target_modules")
    # a text would be a pattern
    if (
        not isinstance(file_targets, str)
        and {name.rpartition(".")[2] for name in file_targets or ()} != names
    ):
        yield (
            f"its target_modules are {', '.join(sorted(file_targets or ()))}; "
            f"lora.targets={yaml_text(config.targets)} are {', '.join(sorted(names))}"
        )
    init_method = str(settings.get("init_lora_weights", True))
    if init_method.lower().startswith(_CHANGE_WEIGHTS):
        yield (
            f"its init_lora_weights is {init_method}: it has changed the model's own weights; save "
            "it with PEFT as an ordinary adapter"
        )
    if settings.get("bias", "none") != "none":
        yield f"its bias is {settings['bias']}; it must be none"
    for name in _REFUSED:
        if settings.get(name):
            yield f"its {name} is {yaml_text(settings[name])}, which is not supported"


def _tensor_problems(tensor_headers: dict[str, Any], spec: ModelSpec, lora: Lora) -> Iterator[str]:
    expected_shapes = dict(
        shown(tensor.name, tensor.shape) for tensor in lora.hf_layout(spec, "float32").tensors(0)
    )
    for name, shape in expected_shapes.items():
        if name not in tensor_headers:
            yield f"tensor {name} is missing in {TENSORS_FILE}"
        elif (
            tuple(tensor_headers[name]["shape"]) != shape
            or tensor_headers[name]["dtype"] not in READ_DTYPES
        ):
            yield (
                f"tensor {name} is {tensor_headers[name]['dtype']} of shape "
                f"{tuple(tensor_headers[name]['shape'])}; it must have shape {shape}"
            )
    for name in tensor_headers:
        if name not in expected_shapes:
            yield f"tensor {name} belongs to no target"
