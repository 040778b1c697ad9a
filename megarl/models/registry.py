"""Reads an HF config.json as a `ModelSpec`, and finds the family module with the spec's tensors.

`megarl.models.family` says what a family's module declares. Every module of the package that has
`ARCHITECTURES` is a family.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import json
import math
import os
import pkgutil
import re
import runpy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megarl.base.files import HubError, hub_file
from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.base.without_torch import ask_program
from megarl.config.errors import ConfigError
from megarl.config.limits import find_module, import_module
from megarl.models import auto_config, multi_token
from megarl.models.family import REQUIRED, Family
from megarl.models.parameters import LogicalTensor, Parameter
from megarl.models.spec import LM, ModelSpec, differing

SLIDING = "sliding_attention"
FULL = "full_attention"
LINEAR = "linear_attention"  # values of `layer_types`
CAUSAL_LM = "ForCausalLM"
CLASSIFICATION = "ForSequenceClassification"  # suffixes of architectures: head LM, head SCALAR


# Keys of rotary embeddings that Transformers requires.
ROPE_KEYS = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
ROPE_NUMBERS = (
    "factor low_freq_factor high_freq_factor original_max_position_embeddings beta_fast beta_slow "
    "mscale mscale_all_dim attention_factor"
).split()
# Keys that change what a model computes, in one vendor alone or in models of other families, and
# their values without effect.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "dual_chunk_attention_config": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "is_causal": (None, True),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "no_rope_layers": (None, []),
    "per_layer_config": (None, {}),
    "residual_multiplier": (None, 1),
    "rope_is_neox_style": (None, True),
    "use_bidirectional_attention": (None, False),
}


def rope_type(rope: Mapping[str, Any]) -> str:
    """Its type, under its name or the one before."""
    return str(rope.get("rope_type", rope.get("type", "default")))


class ConfigReader:
    """Reads keys of one config.json; every error names the file and the key."""

    def __init__(self, source: str, values: Mapping[str, Any]):
        self.source = source
        self.values = values
        self.defaults: dict[str, Any] = {}  # see `assume`
        # key -> problem, for variants that the family does not support
        self.unsupported: dict[str, str] = {}

    def assume(self, **defaults: Any) -> None:
        """Sets the values of absent keys, which must be the defaults of the family's configuration
        class in Transformers. Sizes without which a config.json must be incomplete have none here.
        """
        self.defaults |= defaults

    def value(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, self.defaults.get(key, default))

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.value(key)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.source}: {key} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            allowed = "a positive integer" if minimum == 1 else f"an integer of at least {minimum}"
            raise ConfigError(f"{self.source}: {key} = {value!r} is not {allowed}")
        return value

    def renamed(self, key: str, alias: str) -> int:
        """The integer `key`, which some files have under the name `alias`."""
        values_of_names = {}
        for name in (key, alias):
            if self.values.get(name) is not None:
                values_of_names[name] = self.values.get(name)
        if len(values_of_names) == 2 and values_of_names[key] != values_of_names[alias]:
            raise ConfigError(
                f"{self.source}: {key} = {values_of_names[key]!r} and {alias} = "
                f"{values_of_names[alias]!r} are two names of one number"
            )
        return self.integer(alias if alias in values_of_names else key)

    def number(self, key: str, default: float) -> float:
        value = self.value(key)
        if value is None:
            return default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise ConfigError(f"{self.source}: {key} = {value!r} is not a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.source}: {key} = {value!r} is neither true nor false")
        return value

    def rope(self) -> tuple[float, Mapping[str, Any] | None]:
        """(theta, scaling or None), in every form that Transformers reads (modeling_rope_utils.py:
        convert_rope_params_to_dict).
        """
        rope = self._rotary()
        theta = ConfigReader(self.source, rope).number(
            "rope_theta", self.number("rope_theta", 10000.0)
        )
        scaling = {}
        for key, value in rope.items():
            if key not in ("rope_theta", "partial_rotary_factor", "type"):
                scaling[key] = value
        kind = scaling["rope_type"] = rope_type(rope)
        if kind == "default":
            return theta, None
        if kind in ("llama3", "yarn", "longrope"):
            scaling.setdefault(
                "original_max_position_embeddings", self.integer("max_position_embeddings")
            )
        missing = [key for key in ROPE_KEYS.get(kind, ()) if scaling.get(key) is None]
        if missing:
            raise ConfigError(
                f"{self.source}: the rotary embedding of type {kind} lacks {', '.join(missing)}"
            )
        of_scaling = ConfigReader(self.source, scaling)
        for key in ROPE_NUMBERS:
            of_scaling.number(key, 1.0)
        return theta, scaling

    def layer_kinds(self) -> list[str] | None:
        """`layer_types`, one for each layer; None if the file does not have it."""
        kinds = self.value("layer_types")
        if kinds is None:
            return None
        layers = self.integer("num_hidden_layers")
        is_list = isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
        if not is_list or len(kinds) != layers:
            raise ConfigError(
                f"{self.source}: layer_types must be a list with a name for each of the "
                f"num_hidden_layers = {layers} layers"
            )
        return kinds

    def windowed_layers(self, otherwise: Sequence[str]) -> tuple[int, ...]:
        """The layers with a window: those of `layer_types`, or else of `otherwise`."""
        kinds = self.layer_kinds() or otherwise
        unknown = sorted(set(kinds) - {SLIDING, FULL})
        if unknown:
            raise ConfigError(
                f"{self.source}: layer_types has {', '.join(unknown)}; only {FULL} and {SLIDING} "
                "are supported"
            )
        return tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING)

    def partial_rotary_factor(self, default: float = 1.0) -> float:
        """The factor beside theta, or else from its own key."""
        of_rope = ConfigReader(self.source, self._rotary())
        factor = of_rope.number(
            "partial_rotary_factor", self.number("partial_rotary_factor", default)
        )
        if not 0 < factor <= 1:
            raise ConfigError(
                f"{self.source}: partial_rotary_factor = {factor} must be above 0, and at most 1"
            )
        return factor

    def _rotary(self) -> Mapping[str, Any]:
        """Parameters of the rotary embedding.

        Like Transformers, takes `rope_scaling` alone if a file also has `rope_parameters`.
        """
        return self.mapping("rope_scaling") or self.mapping("rope_parameters")

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.value(key) or {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.source}: {key} = {value!r} is not a mapping")
        return value

    def expect(self, key: str, default: Any, allowed: Any) -> None:
        """Notes a problem if the value is not `allowed`.

        All problems are reported together, after the family has read all keys.
        """
        value = self.value(key, default)
        if value != allowed:
            self.unsupported[key] = (
                f"{self.source}: {key} = {value!r} is not supported, only {allowed!r} is"
            )

    def expect_no_window(self) -> None:
        """Notes a problem if `sliding_window` is shorter than the context, for models of which
        SGLang ignores it.
        """
        if self.window_has_effect():
            key = "sliding_window"
            if key in self.values:
                default_text = ""
            else:
                default_text = ", the default of Transformers for an absent key,"
            context = f"max_position_embeddings = {self.integer('max_position_embeddings')}"
            problem = (
                f"{key} = {self.value(key)!r}{default_text} is not supported, only null and "
                f"windows of at least {context} are"
            )
            self.unsupported[key] = f"{self.source}: {problem}"

    def window_has_effect(self) -> bool:
        """Whether `sliding_window` hides a part of the longest context."""
        window = self.value("sliding_window")
        return window is not None and self.integer("sliding_window") < self.integer(
            "max_position_embeddings"
        )

    def spec(self, family: Family) -> ModelSpec:
        """The spec that `family` reads. Raises ConfigError."""
        try:
            spec = family.read_spec(self)
        except ConfigError as error:
            raise ConfigError([*self.unsupported.values(), *error.problems]) from error
        problems = [*self.unsupported.values()]
        problems += [f"{self.source}: {problem}" for problem in spec.problems()]
        if problems:
            raise ConfigError(problems)
        return replace(
            spec, padding_token=_padding_token(self.value("pad_token_id"), spec.vocab_size)
        )

    def refuse_keys(self, keys: Iterable[str], architecture: str) -> None:
        """Notes those of `keys`, from WITHOUT_EFFECT, that have an effect."""
        for key in keys:
            if self.values.get(key) not in WITHOUT_EFFECT[key]:
                self.unsupported[key] = (
                    f"{self.source}: {key} = {self.values[key]!r} is not supported for "
                    f"{architecture}"
                )


def load_spec(
    model: str | Path | Mapping[str, Any],
    setting: str = "model.path",
    own_family: str | None = None,
    mtp: bool = False,
    read_as: Mapping[str, Any] = MappingProxyType({}),
) -> ModelSpec:
    """The shape of a model, from a checkpoint folder, a config.json, a hub name, or the contents of
    a config.

    Args: setting: the key that names the model, for messages; own_family: a family module outside
    this package (`model.family`); mtp: read its layer for multi-token prediction, which must exist;
    read_as: values that take the place of the file's. Raises ConfigError that names file and key if
    something is missing, or the architecture or the model type is unknown.
    """
    if isinstance(model, Mapping):
        return _read("config", model, own_family, mtp)
    path = _config_file(str(model), setting)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds {type(values).__name__}, expected a JSON object")
    values |= read_as
    spec = _read(str(path), values, own_family, mtp)
    if own_family is None:
        _check_model_type(path, values)
    return spec


# Model types that SGLang reads with a class of Transformers (srt/utils/hf_transformers/common.py).
_OF_SGLANG = {"kimi_k2": "DeepseekV3Config"}


@functools.cache
def _config_classes() -> Mapping[str, str]:
    """Model type -> class in Transformers, from a file of Transformers that imports nothing."""
    package = importlib.util.find_spec("transformers")
    assert package is not None and package.origin is not None
    table = Path(package.origin).with_name("models") / "auto" / "auto_mappings.py"
    return runpy.run_path(str(table))["CONFIG_MAPPING_NAMES"] | _OF_SGLANG


def _check_model_type(path: Path, values: Mapping[str, Any]) -> None:
    """Raises ConfigError unless engines find the class of `architectures` by `model_type`, or code
    in the folder.
    """
    if "auto_map" in values:
        return
    model_type = values.get("model_type")
    architecture = values["architectures"][0]
    prefix = architecture.partition("For")[0]
    fitting = [name for name, of in _config_classes().items() if _prefix(of) == prefix]
    if model_type not in fitting:
        known = _config_classes().get(str(model_type))
        is_what = f"is of {_prefix(known)}" if known else "is unknown to transformers"
        raise ConfigError(
            f"{path}: model_type = {model_type!r} {is_what}; for {architecture} it must be "
            f"{' or '.join(map(repr, fitting))}"
        )


def _prefix(config_class: str) -> str:
    """The name with which the model's architectures begin: Qwen2 of Qwen2Config."""
    return config_class.removesuffix("Config").removesuffix("Text")


# Keys that engines read, and that Transformers' classes of gated delta nets keep elsewhere or do
# not have.
_OF_ENGINES = ("full_attention_interval", "rope_theta", "partial_rotary_factor")


def check_as_transformers(
    model: str,
    spec: ModelSpec,
    setting: str = "model.path",
    read_as: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raises ConfigError if Transformers' own class reads another value than `spec` from the
    model's config.json, or refuses the file.

    `model`, `setting`, `read_as`: those of `load_spec`, which has read `spec`. Without a class in
    Transformers there is nothing to compare.
    """
    path = _config_file(model, setting)
    try:
        transformers_values = ask_program(
            program=auto_config.__file__,
            arguments=[str(path.absolute())],
            kind="configs",
            decided_by=[path.read_bytes()],
        )
    except ValueError as error:
        raise ConfigError(f"{path}: transformers cannot read it: {error}") from error
    problem = transformers_values.get("problem")
    if problem:
        raise ConfigError(f"{path}: transformers refuses it: {problem}")
    if "problem" in transformers_values:
        return
    values = {**json.loads(path.read_text(encoding="utf-8")), **read_as}
    differing = differences(values, {**transformers_values, **read_as}, spec)
    if differing:
        raise ConfigError(
            f"{path}: transformers reads other values: MegaRL has {'; '.join(differing)}"
        )


def differences(
    values: Mapping[str, Any], transformers_values: dict[str, Any], spec: ModelSpec
) -> list[str]:
    """The fields of `spec`, read from config.json's `values`, that differ from those read from
    `transformers_values`, all values of Transformers' class for that file.
    """
    inner = transformers_values.get("text_config", transformers_values)
    if spec.linear_layers:
        inner |= {
            key: of_language(values)[key] for key in _OF_ENGINES if key in of_language(values)
        }
    transformers_spec = _read(
        "transformers",
        transformers_values | {"architectures": values["architectures"]},
        None,
        spec.mtp_layers > 0,
    )
    transformers_spec = replace(
        transformers_spec, mtp_drafts=spec.mtp_drafts
    )  # a setting of the run
    return [*differing(spec, transformers_spec, compared=False)]


def family(spec: ModelSpec) -> Family:
    """What the module of `spec` declares."""
    if is_own(spec):
        return Family.of(import_module(spec.family))
    return Family.of(importlib.import_module(f"megarl.models.{spec.family}"))


def logical_tensors(spec: ModelSpec) -> tuple[LogicalTensor, ...]:
    """The tensors of an HF checkpoint that are loaded, including those for multi-token
    prediction.
    """
    module = family(spec)
    return (*module.logical_tensors(spec), *multi_token.logical(spec, module))


def megatron_parameters(
    spec: ModelSpec, topology: TrainerTopology, layer_spec: str
) -> tuple[Parameter, ...]:
    """Parameters of the trainer."""
    module = family(spec)
    return (
        *module.megatron_parameters(spec, topology, layer_spec),
        *multi_token.megatron(spec, topology, layer_spec, module),
    )


def sglang_parameters(
    spec: ModelSpec, topology: GeneratorTopology, device: str
) -> tuple[Parameter, ...]:
    """Parameters of one engine, and of its draft model."""
    module = family(spec)
    return (
        *module.sglang_parameters(spec, topology, device),
        *multi_token.sglang(spec, topology, device, module),
    )


def quantised_parameters(spec: ModelSpec) -> tuple[str, ...]:
    """The parameters that a quantised engine keeps in fp8."""
    module = family(spec)
    return (*module.quantised_parameters(spec), *multi_token.quantised(spec, module))


def fused_tensors(spec: ModelSpec) -> tuple[Parameter, ...]:
    """The tensors of an HF checkpoint that contain several logical tensors, one below the other."""
    return family(spec).fused_tensors(spec)


def is_own(spec: ModelSpec) -> bool:
    """Whether the family is outside this package.

    `spec.family` is then the module's full name or its file.
    """
    return spec.family not in _modules()


@functools.cache
def _modules() -> tuple[str, ...]:
    return tuple(info.name for info in pkgutil.iter_modules([os.path.dirname(__file__)]))


@functools.cache
def architectures() -> dict[str, Family]:
    """Architecture name in config.json -> family."""
    modules = [importlib.import_module(f"megarl.models.{name}") for name in _modules()]
    result: dict[str, Family] = {}
    for module in modules:
        for name in getattr(module, "ARCHITECTURES", ()):
            result[name] = Family.of(module)
    return result


def _read(source: str, values: Mapping[str, Any], own_family: str | None, mtp: bool) -> ModelSpec:
    spec = _read_model(source, values, own_family)
    if mtp:
        return replace(spec, mtp_layers=multi_token.read_layers(source, values, spec, family(spec)))
    return spec


def _read_model(source: str, values: Mapping[str, Any], own_family: str | None) -> ModelSpec:
    names = values.get("architectures")
    if not names:
        raise ConfigError(f"{source}: architectures is missing")
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ConfigError(f"{source}: architectures = {names!r} is not a list of names")
    if not names[0].endswith(CLASSIFICATION):
        return _read_decoder(source, values, names[0], own_family)
    spec = _read_decoder(
        source, values, names[0].removesuffix(CLASSIFICATION) + CAUSAL_LM, own_family
    )
    # Hugging Face's default is two
    labels = values.get("num_labels", len(values.get("id2label") or range(2)))
    if labels != 1:
        raise ConfigError(
            f"{source}: {names[0]} has {labels} labels (num_labels, id2label); only one, a score, "
            "is supported"
        )
    return spec.with_scalar_head()


def _read_decoder(
    source: str, values: Mapping[str, Any], architecture: str, own_family: str | None
) -> ModelSpec:
    if own_family is not None:
        return _read_own(source, values, architecture, own_family)
    families = architectures()
    if architecture not in families:
        allowed = (
            f"{', '.join(sorted(families))}, the same with {CLASSIFICATION}, or one of your "
            "own (model.family, docs/extending.md)"
        )
        near = _nearest(source, values)
        raise ConfigError(
            f"{source}: architectures = {values['architectures']!r} is not supported{near}; "
            f"supported: {allowed}"
        )
    reader = ConfigReader(source, of_language(values))
    reader.refuse_keys(WITHOUT_EFFECT, architecture)
    return reader.spec(families[architecture])


def of_language(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the language model.

    If there is a vision tower, config.json has them in a section of their own.
    """
    if not isinstance(text := values.get("text_config"), Mapping):
        return values
    return {
        **text,
        "architectures": values["architectures"],
        "tie_word_embeddings": values.get("tie_word_embeddings", False),
    }


class _Noting(dict[str, Any]):
    """A mapping that notes which keys are read."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


FEW = 6
_INCIDENTAL = re.compile(  # keys without effect on the model that is trained
    r"_.*|architectures|model_type|auto_map|.*dtype|.*_token_id|.*version|.*dropout|initializer_range|use_cache|pretraining_tp"
    r"|num_nextn_predict_layers"
)


def _nearest(source: str, values: Mapping[str, Any]) -> str:
    """If the config.json of a supported architecture differs in only a few keys, names the nearest
    one and these keys; otherwise empty.
    """
    candidates: list[tuple[int, str, list[str]]] = []
    for name, module in architectures().items():
        reader = ConfigReader(source, noting := _Noting(values))
        try:
            module.read_spec(reader)
        except ConfigError:
            continue
        unread = set()
        for key in values:
            if key not in noting.read and not _INCIDENTAL.fullmatch(key):
                unread.add(key)
        keys = sorted(unread | reader.unsupported.keys() | (reader.defaults.keys() - values.keys()))
        candidates.append((len(keys), name, keys))
    count, name, keys = min(candidates, default=(FEW + 1, "", []))
    if count > FEW:
        return ""
    differing = ", ".join(
        f"{key} = {values[key]!r}" if key in values else f"{key}, which is missing" for key in keys
    )
    return f" (it has the keys of {name}" + (f", except {differing})" if keys else ")")


def _padding_token(token_id: Any, vocab_size: int) -> int | None:
    """The padding token, as Hugging Face's models use `pad_token_id`.

    All families pass it to nn.Embedding, which counts a negative number from the end of the
    vocabulary.
    """
    if isinstance(token_id, int) and -vocab_size <= token_id < vocab_size:
        return token_id % vocab_size
    return None


def _read_own(source: str, values: Mapping[str, Any], architecture: str, name: str) -> ModelSpec:
    """Raises ConfigError also for keys that change the model, and that the module does not read."""
    if name in _modules():
        raise ConfigError(
            f"model.family={name}: megarl.models has a module of this name; rename yours"
        )
    module = find_module(name, f"model.family={name}")
    missing = [declared for declared in REQUIRED if not hasattr(module, declared)]
    if missing:
        raise ConfigError(
            f"model.family={name}: the module lacks {', '.join(missing)}; docs/extending.md says "
            "what a family declares"
        )
    if architecture not in module.ARCHITECTURES:
        raise ConfigError(
            f"{source}: architectures = {architecture!r}; model.family={name} is for "
            f"{', '.join(module.ARCHITECTURES)}"
        )
    reader = ConfigReader(source, noting := _Noting(values))
    spec = reader.spec(Family.of(module))
    reader.refuse_keys(sorted(WITHOUT_EFFECT.keys() - noting.read), architecture)
    if reader.unsupported:
        raise ConfigError([*reader.unsupported.values()])
    return replace(spec, family=name)


def _config_file(model: str, setting: str) -> Path:
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
        if not path.exists():
            raise ConfigError(f"{setting}={model}: the folder holds no config.json")
    if path.exists():
        return path
    # A hub name is owner/name. Anything else, or anything that looks like a path, is a missing
    # folder.
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ConfigError(f"{setting}={model}: does not exist")
    try:
        return hub_file(model, "config.json")
    except HubError as error:
        raise ConfigError(f"{setting}={model}: no local folder; {error}") from error


def flops_per_token(spec: ModelSpec, length: float) -> float:
    """FLOPs per token of a forward pass over the whole model, for sequences of `length` tokens."""
    dense, expert = active_elements(spec)
    outputs = spec.vocab_size if spec.head == LM else 1
    return 2 * (dense + expert + outputs * spec.hidden_size) + spec.num_layers * attention_flops(
        spec, length
    )


def attention_flops(spec: ModelSpec, length: float) -> float:
    """Forward FLOPs per token and layer beside linear layers (scores and weighted values, or
    states), a mean over layers.
    """
    flops = sum(mixer.flops(spec, len(layers), length) for mixer, layers in spec.mixers)
    return flops / spec.num_layers


def active_elements(spec: ModelSpec) -> tuple[float, float]:
    """(dense, experts): numbers of elements in all matrices that one token is multiplied by."""
    # a dict is not hashable, and the result does not depend on it
    return _active_elements(replace(spec, rope_scaling=None))


@functools.lru_cache(maxsize=64)
def _active_elements(spec: ModelSpec) -> tuple[float, float]:
    dense = expert = 0.0
    for tensor in family(spec).logical_tensors(spec):
        if tensor.place != "layer" or len(tensor.shape) < 2:
            continue
        layers = spec.num_layers if tensor.layers is None else len(tensor.layers)
        if tensor.experts:
            assert spec.experts
            expert += layers * math.prod(tensor.shape) * spec.experts.per_token
        else:
            dense += layers * math.prod(tensor.shape)
    return dense, expert


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def missing_folder(key: str, path: str) -> Iterable[str]:
    """A problem if the folder does not exist. A path whose first folder exists counts as local."""
    is_hub_name = HUB_NAME.fullmatch(path) and not Path(path.split("/")[0]).is_dir()
    if Path(path).is_file():
        yield f"{key}={path}: must be a folder, not a file"
    elif not is_hub_name and not Path(path).is_dir():
        folder_text = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
        yield f"{key}={path}: no such folder{folder_text}{did_you_mean(Path(path))}"


def did_you_mean(path: Path) -> str:
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names)
    if near:
        return f"; did you mean {' or '.join(str(path.parent / name) for name in near)}?"
    return ""
