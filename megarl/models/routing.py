"""The experts that a router chose, packed into bytes that travel with a rollout (for rollout
routing replay).

See Ma et al. 2025, Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
Routers, arXiv 2510.11370.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megarl.models.spec import ModelSpec


@dataclass(frozen=True)
class RoutingFormat:
    """Expert ids [positions, layers with experts, experts per token], one byte each, or two if
    there are more than 256 experts.

    Position i of a sequence is the input of its token i. The last token of a response is never an
    input, so it has no ids.
    """

    layers: int  # layers of the decoder
    dense_layers: int  # number of first layers without experts
    top_k: int
    num_experts: int

    @classmethod
    def of(cls, spec: ModelSpec) -> RoutingFormat:
        assert spec.experts
        return cls(
            layers=spec.num_layers,
            dense_layers=spec.experts.first_layer,
            top_k=spec.experts.per_token,
            num_experts=spec.experts.count,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of one position."""
        return self.layers - self.dense_layers, self.top_k

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8 if self.num_experts <= 256 else "<u2")

    @property
    def position_bytes(self) -> int:
        return self.shape[0] * self.top_k * self.dtype.itemsize

    def positions(self, packed: bytes) -> int:
        return len(packed) // self.position_bytes

    def pack(self, ids: np.ndarray) -> bytes:
        return ids.astype(self.dtype).tobytes()

    def unpack(self, packed: bytes) -> np.ndarray:
        """Raises ValueError if `packed` is not a whole number of positions."""
        return np.frombuffer(packed, self.dtype).reshape(-1, *self.shape)

    def from_engine(self, answered: bytes) -> bytes:
        """Packs SGLang's answer: int32 [positions, layers, experts per token].

        It includes dense layers, whose ids are meaningless.

        Raises ValueError if they are not ids of `top_k` experts in each layer.
        """
        ids = np.frombuffer(answered, "<i4").reshape(-1, self.layers, self.top_k)[
            :, self.dense_layers :
        ]
        if ids.size and not (ids.min() >= 0 and ids.max() < self.num_experts):
            raise ValueError(
                f"expert ids from {ids.min()} to {ids.max()}, of {self.num_experts} experts"
            )
        if self.top_k > 1 and (ids[..., 0] == ids[..., 1]).any():
            layer = int((ids[..., 0] == ids[..., 1]).any(axis=0).argmax()) + self.dense_layers
            raise ValueError(
                f"the same expert twice for a token in layer {layer}: it was not recorded"
            )
        return self.pack(ids)
