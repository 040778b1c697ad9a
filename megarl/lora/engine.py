"""The policy's adapter in SGLang's pool: one slot of memory, which belongs to the adapter as long
as the engine lives.

SGLang copies an adapter from host memory into a slot when the first request needs it, and again if
it has lost its slot. Either copy would undo an update. So the adapter gets its slot as soon as the
pool exists. Its name is pinned, so that the pool gives the slot to no other adapter. Other runs may
have adapters with other names in the same pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megarl.generator.completions import POLICY

if TYPE_CHECKING:
    import torch

_STACKED = {"w13": "gate_up_proj_moe", "w2": "down_proj_moe"}


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.maybe_init_lora_manager",
        _adapted,
        HookType.AFTER,
    )
    HookRegistry.register(
        "sglang.srt.lora.lora.LoRAAdapter.initialize_weights", _empty, HookType.AROUND
    )


def _adapted(result: Any, runner: Any) -> None:
    """Runs after SGLang has made the pool of adapters, which exists only if the engine serves
    some.
    """
    from megarl.weight_sync.engine import loader  # only workers need it

    if runner.lora_manager is not None and not runner.is_draft_worker:
        loader.pool_added(runner.model, AdapterPool(runner.lora_manager))


def _empty(original: Any, adapter: Any) -> None:
    """Reads no weights of an adapter, because the first update writes them.

    SGLang would read them in the way it read the model, but fp8 engines read no model.
    """
    adapter.initialize_weights_from_tensors({})


class AdapterPool:
    """`manager` is a worker's LoRAManager."""

    def __init__(self, manager: Any):
        (self._uid,) = (
            uid for uid, adapter in manager.lora_refs.items() if adapter.lora_name == POLICY
        )
        manager.fetch_new_loras({self._uid})
        self._pool = manager.memory_pool
        self.slot: int = self._pool.get_buffer_id(self._uid)
        # tensor name -> memory of all slots
        self.buffers: Mapping[str, torch.Tensor] = dict(_buffers(manager))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The adapter's memory, by name. Raises RuntimeError if it has lost its slot."""
        if self._pool.uid_to_buffer_id.get(self._uid) != self.slot:
            raise RuntimeError(
                f"SGLang's pool has given the slot {self.slot} of the policy's adapter to another"
            )
        return {name: buffer.data[self.slot] for name, buffer in self.buffers.items()}


def _buffers(manager: Any) -> Iterator[tuple[str, torch.Tensor]]:
    from sglang.srt.lora.utils import get_target_module_name

    from megarl.lora.layout import EXPERTS, POOL_A, POOL_B

    a = manager.memory_pool.A_buffer
    b = manager.memory_pool.B_buffer
    for layer, modules in enumerate(manager.lora_modules):
        for name in modules:
            if name.endswith(".experts"):
                places = {f"{name}.{stacked}": _STACKED[stacked] for stacked in EXPERTS}
            else:
                places = {name: get_target_module_name(name, manager.memory_pool.target_modules)}
            for tensor, key in places.items():
                yield f"{tensor}.{POOL_A}", a[key][layer]
                yield f"{tensor}.{POOL_B}", b[key][layer]
