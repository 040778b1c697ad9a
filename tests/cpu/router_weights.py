"""An engine that also returns its routers' weights of the experts, beside their ids, for
test_agreement_parts.py.

SGLang returns only ids. These hooks widen its buffers of recorded ids, and append the bits of the
float32 weights. They use private functions of the pinned release of SGLang, which a run should not
depend on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megarl.generator import hooks, server
from megarl.models.routing import RoutingFormat


@dataclass(frozen=True)
class WideFormat(RoutingFormat):
    """[positions, layers, 2, experts per token] int32: ids, and the bits of their weights."""

    @property
    def position_bytes(self) -> int:
        return 8 * self.layers * self.top_k

    def from_engine(self, answered: bytes) -> bytes:
        return answered

    def parts(self, packed: bytes) -> tuple[bytes, np.ndarray]:
        """(ids as RoutingFormat packs them, weights [positions, layers, experts per token]
        float32).
        """
        layers = np.frombuffer(packed, "<i4").reshape(-1, self.layers, 2, self.top_k)
        return self.pack(layers[:, :, 0]), np.ascontiguousarray(layers[:, :, 1]).view(np.float32)


def main() -> None:
    """Like megarl.generator.server:main."""
    registered = hooks.register

    def register() -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        registered()
        HookRegistry.register(
            "sglang.srt.state_capturer.base.BaseTopkCapturer.__init__",
            _twice_as_wide,
            HookType.AROUND,
        )
        HookRegistry.register(
            "sglang.srt.layers.moe.topk._post_process_topk_ids", _with_weights, HookType.AROUND
        )
        HookRegistry.register(
            "sglang.srt.state_capturer.routed_experts.RoutedExpertsCapturer.capture",
            _behind_the_ids,
            HookType.AROUND,
        )

    hooks.register = register
    server.main()


_now: list[torch.Tensor] = []  # weights of the ids that are recorded next


def _twice_as_wide(
    original: Callable[..., None], *arguments: Any, topk_size: int, **settings: Any
) -> None:
    original(*arguments, topk_size=2 * topk_size, **{**settings, "device_topk_size": 2 * topk_size})


def _with_weights(
    original: Callable[..., Any],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *arguments: Any,
    **settings: Any,
) -> Any:
    _now[:] = [topk_weights]
    return original(topk_ids, topk_weights, *arguments, **settings)


def _behind_the_ids(
    original: Callable[..., None], capturer: Any, layer_id: int, topk_indices: torch.Tensor
) -> None:
    bits = _now.pop().float().contiguous().view(torch.int32)
    original(capturer, layer_id, torch.cat([topk_indices.to(torch.int32), bits], dim=1))
