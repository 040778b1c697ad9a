"""What every decoder has, and what the rest of the package asks of the blocks that a family
composes.

A block is a frozen dataclass with its own settings. It declares its tensors on all three sides
(`logical`, `megatron`, `sglang`, and `QUANTISED`: the SGLang parameters that are in fp8 when the
engine is quantised), its FLOPs and memory, and Megatron's arguments for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models.parameters import LogicalTensor, Parameter

LM = "lm"
SCALAR = "scalar"


@dataclass(frozen=True)
class Sizes:
    """What every decoder has."""

    # the module with its tensors: "llama" in megarl.models, the full name for a user's own module
    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int  # of dense layers; 0 if every layer has experts
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = None
    # what the last layer maps hidden states to: LM, the vocabulary; SCALAR, one number (reward
    # models, critics)
    head: str = LM
    # share of each head's dims that are rotated, from the first on
    partial_rotary_factor: float = 1.0

    @property
    def rope_type(self) -> str:
        """Hugging Face's name for the scaling of rotary embeddings."""
        scaling = self.rope_scaling or {}
        return scaling.get("rope_type") or scaling.get("type") or "default"


@dataclass(frozen=True)
class TokenMixer(ABC):
    """A block through which tokens reach each other: attention, or a linear form of it.

    The norm before it is a tensor of `norms`.
    """

    QUANTISED: ClassVar[tuple[str, ...]]
    # Where Megatron keeps the norm before the block: in the local layer spec, it is a module of its
    # own; Transformer Engine fuses it into the first linear layer if there is one.
    INPUT_NORM: ClassVar[Mapping[str, str]]
    # whether SGLang can serve the block's weights in fp8 only in the format of blocks
    ONLY_FP8_BLOCKS: ClassVar[bool] = False
    NAME: ClassVar[str]  # for messages

    @abstractmethod
    def logical(self, sizes: Sizes) -> list[LogicalTensor]:
        """Tensors of the HF checkpoint."""

    @abstractmethod
    def megatron(self, sizes: Sizes, topology: TrainerTopology, layer_spec: str) -> list[Parameter]:
        """Megatron's parameters under the layer spec "local" or "te"."""

    @abstractmethod
    def sglang(self, sizes: Sizes, topology: GeneratorTopology, device: str) -> list[Parameter]:
        """SGLang's parameters on "cpu" or "cuda"."""

    def problems(
        self, sizes: Sizes, trainer: TrainerTopology, generator: GeneratorTopology
    ) -> Iterable[str]:
        """Problems with topologies that the layouts allow."""
        return ()

    @abstractmethod
    def megatron_settings(self, sizes: Sizes) -> dict[str, Any]:
        """Arguments of Megatron's TransformerConfig."""

    @abstractmethod
    def flops(self, sizes: Sizes, layers: int, length: float) -> float:
        """Forward FLOPs per token beside linear layers, in `layers` layers with the block, for
        sequences of `length` tokens.
        """

    @abstractmethod
    def activation_elements(self, sizes: Sizes, tp: int) -> float:
        """Elements per token and layer that a trainer rank keeps for the backward pass."""

    def gathered_elements(self, sizes: Sizes, tp: int) -> int:
        """Elements per token and layer that the trainer's tensor ranks gather from each other inside
        the block.
        """
        return 0


@dataclass(frozen=True)
class LinearAttention(TokenMixer):
    """A block whose state has the same size for a sequence of any length."""

    layers: tuple[int, ...]  # those that have it instead of attention

    def cut(self, layers: int) -> Self:
        """The block of a decoder with only the first `layers` layers."""
        return replace(self, layers=tuple(layer for layer in self.layers if layer < layers))

    @abstractmethod
    def state_bytes(self, item: int) -> float:
        """Bytes that an engine keeps per request and layer.

        `item`: bytes of an element in the model's dtype.
        """
