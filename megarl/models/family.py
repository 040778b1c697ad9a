"""What the module of a model family declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models import decoder
from megarl.models.parameters import LogicalTensor, Parameter
from megarl.models.spec import ModelSpec

REQUIRED = ("ARCHITECTURES", "read_spec")
Parameters = tuple[Parameter, ...]


@dataclass(frozen=True)
class Prediction:
    """Names in a family's layer for multi-token prediction.

    `names` and `draft_names`: the norms of embedding and hidden states, the projection, the last
    norm.
    """

    layer: str  # prefix of the decoder layer's names in checkpoints
    names: tuple[str, str, str, str]
    draft_layer: str  # prefix of its names in SGLang's draft model
    draft_names: tuple[str, str, str, str]
    counted: bool = True  # whether config.json has the number of layers; without it there is one
    # (name, logical tensor): a checkpoint repeats the tensor under `name`; a loader compares them
    copies: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Family:
    """The names that a module may declare. Tensors that it does not declare are those of the spec's
    blocks.
    """

    ARCHITECTURES: tuple[str, ...]  # names in config.json
    # (ConfigReader): reads config.json; refuses unsupported variants
    read_spec: Callable[[Any], ModelSpec]
    # tensors of the HF checkpoint, in forward order
    logical_tensors: Callable[[ModelSpec], tuple[LogicalTensor, ...]] = decoder.logical_tensors
    # parameters of the trainer
    megatron_parameters: Callable[[ModelSpec, TrainerTopology, str], Parameters] = (
        decoder.megatron_parameters
    )
    # parameters of one engine
    sglang_parameters: Callable[[ModelSpec, GeneratorTopology, str], Parameters] = (
        decoder.sglang_parameters
    )
    # parameters that a quantised engine keeps in fp8
    quantised_parameters: Callable[[ModelSpec], tuple[str, ...]] = decoder.quantised_parameters
    # checkpoint tensors that contain several, or have other names in files
    fused_tensors: Callable[[ModelSpec], Parameters] = lambda spec: ()
    UNUSED: tuple[str, ...] = ()  # prefixes of checkpoint tensors that are not loaded
    PREDICTION: Prediction | None = None

    @property
    def prediction(self) -> Prediction:
        assert self.PREDICTION, "a family without a layer for multi-token prediction"
        return self.PREDICTION

    @classmethod
    def of(cls, module: ModuleType) -> Family:
        names = [field.name for field in fields(cls)]
        return cls(**{name: vars(module)[name] for name in names if name in vars(module)})
