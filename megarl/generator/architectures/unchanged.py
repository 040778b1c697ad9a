"""SGLang's own classes, for the families that need no change."""

import importlib
import logging
from collections.abc import Iterator

# module of sglang.srt.models -> names of its classes; (): all
SERVED: dict[str, tuple[str, ...]] = {
    "deepseek_v2": (),
    "gemma3_causal": ("Gemma3ForCausalLM",),
    "glm4_moe": ("Glm4MoeForCausalLM",),
    "llama": (),
    "llama_reward": (),
    "mixtral": (),
    "olmo2": (),
    "qwen3_moe": (),
    "qwen3_next": ("Qwen3NextForCausalLM",),
}


def _classes() -> Iterator[type]:
    for name, class_names in SERVED.items():
        try:
            module = importlib.import_module(f"sglang.srt.models.{name}")
        except Exception as error:
            # as in SGLang's registry, so that the other families can be served
            logging.getLogger(__name__).warning(f"Ignore import error when loading {name}: {error}")
            continue
        if class_names:
            yield from (getattr(module, class_name) for class_name in class_names)
        elif isinstance(module.EntryClass, list):
            yield from module.EntryClass
        else:
            yield module.EntryClass


EntryClass = list(_classes())
