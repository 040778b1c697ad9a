"""Checks of the section `lora`."""

from __future__ import annotations

from collections.abc import Iterable

from megarl.config.keys import yaml_text
from megarl.config.schema import RunConfig
from megarl.models import ModelSpec
from megarl.models.adapters import ALL, Lora, lora_tensors, targets
from megarl.plan.weights import find_weights

# Of Megatron's: with these its layers do not get their inputs as adapters expect them.
_REFUSED = ("tp_comm_overlap", "moe_shared_expert_overlap", "delay_wgrad_compute", "overlap_moe_expert_parallel_comm")


def check_lora(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    lora, known = Lora.of(config.lora), targets(spec)
    if lora is None:
        return
    if config.lora.sync == "adapter":
        yield "lora.sync=adapter: this version of MegaRL does not send adapters alone; lora.sync=merge sends the weights with them"
    if not known:
        yield f"lora.rank={lora.rank}: must be null: {spec.family} states no layer of Megatron's whose name is linear_…"
    unknown = [name for name in lora.targets if name not in (*known, ALL)]
    if unknown:
        of = f"no linear layer of a {spec.family} model"
        yield f"lora.targets={yaml_text(config.lora.targets)}: {', '.join(unknown)} is {of}; it has {', '.join(known)}, or all"
    if lora.shared and not any(tensor.experts for tensor in lora_tensors(spec, lora)):
        yield "lora.experts=shared: must be own: no target is of an expert"
    for name in _REFUSED:
        if config.trainer.megatron.get(name):
            yield f"trainer.megatron.{name}={yaml_text(config.trainer.megatron[name])}: must be left out with lora.rank={lora.rank}"


def check_first_adapters(config: RunConfig, command: str | None) -> Iterable[str]:
    """An adapter belongs to the weights that it was trained on, and random weights are no model to adapt."""
    if command == "sft" and config.lora.rank and config.model.random_init and not find_weights(config, command).are_there:
        yield "model.random_init=true: adapters cannot make a model of random weights; set sft.adapters=false to train all of them"
    if not config.lora.rank or config.lora.init is None:
        return
    if command == "sft":
        yield f"lora.init={config.lora.init}: must be null for megarl sft, since the run would begin with it once more"
    elif command in ("train", "dry-run") and (weights := find_weights(config, command)).warm_start:
        yield f"lora.init={config.lora.init}: belongs to model.path={config.model.path}, and the run begins with {weights}"
