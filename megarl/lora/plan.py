"""The adapters in the plan of a run, and checks of the section `lora`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.keys import yaml_text
from megarl.config.schema import RunConfig
from megarl.generator.cpu_support import cuda_available
from megarl.lora.files import check_adapter, empty_adapter
from megarl.lora.layout import ALL, Lora, lora_tensors, targets, unserved
from megarl.models import ModelSpec
from megarl.models.parameters import LAYER_FIELD
from megarl.models.registry import fused_tensors
from megarl.plan.weights import WeightsSource, find_weights

if TYPE_CHECKING:
    from megarl.generator.server import ServedAdapter

# Settings that make Megatron's layers get other inputs than adapters expect.
_REFUSED = (
    "tp_comm_overlap",
    "moe_shared_expert_overlap",
    "delay_wgrad_compute",
    "overlap_moe_expert_parallel_comm",
)


@dataclass(frozen=True)
class AdapterPlan:
    """The adapters that a run trains in the place of its policy's weights, which are frozen."""

    config: RunConfig
    spec: ModelSpec
    lora: Lora

    @classmethod
    def of(cls, config: RunConfig, spec: ModelSpec) -> AdapterPlan | None:
        """None if all weights are trained."""
        lora = Lora.of(config.lora)
        if lora is None:
            return None
        return cls(config, spec, lora)

    def are_sent_alone(self, device: str | None = None) -> bool:
        """Whether updates carry only the adapters.

        Otherwise they carry all weights, with the adapters merged. `device`: see `why_merged`.
        """
        return sends_adapters(self.config, self.spec, device)

    @property
    def parameters(self) -> int:
        return self.lora.parameter_count(self.spec)

    def lines(self) -> list[str]:
        """The lines about adapters that a new run prints."""
        lora = self.config.lora
        if lora.init:
            begins = f"lora.init={lora.init}"
        else:
            begins = f"A random by seed {self.config.seed}, B zero"
        target_text = f"of {', '.join(lora.targets)} linear layers"
        return [
            f"Adapters: rank {lora.rank}, alpha {lora.alpha:g}, {target_text}, {begins}; the "
            "weights are frozen",
            self._sync_line(),
        ]

    def resumed_lines(self, weights: WeightsSource) -> list[str]:
        """The lines about adapters that a resumed run prints.

        `weights`: the weights that it began with.
        """
        return [
            f"Adapters: rank {self.lora.rank}, of what the run began with, {weights}",
            self._sync_line(),
        ]

    def _sync_line(self) -> str:
        if self.are_sent_alone():
            return "Adapters: sent alone, into the memory from which SGLang serves them"
        if self.config.lora.sync == "merge":
            reason = "lora.sync=merge"
        else:
            reason = "; ".join(why_merged(self.config, self.spec))
        return (
            "Adapters: each update merges them on the trainer's ranks and sends all weights: "
            f"{reason}"
        )

    def served(self, folder: Path, device: str | None) -> ServedAdapter | None:
        """The adapter that engines on `device` start with, in `folder`; None if they get all
        weights.
        """
        if not self.are_sent_alone(device):
            return None
        # which needs ZeroMQ; a trainer alone runs without it
        from megarl.generator.server import ServedAdapter

        return ServedAdapter(
            str(folder), self.lora.rank, self.lora.names(self.spec), self.lora.shared
        )

    def write(self, folder: Path) -> None:
        """Writes the settings of that adapter, if engines serve one.

        Its weights come with the first update.
        """
        adapter = self.served(folder, None)
        if adapter:
            empty_adapter(folder, self.lora, adapter.targets)

    def check_init(self) -> None:
        """Raises ConfigError with all reasons why the adapters cannot begin with the folder
        `lora.init`, if that is set.
        """
        if self.config.lora.init:
            check_adapter(self.spec, self.config.lora)


def check_lora_groups(config: RunConfig) -> Iterable[str]:
    """Problems with adapters that concern several groups of engines."""
    if config.lora.rank and config.lora.sync == "adapter" and config.generator.has_groups:
        yield (
            "lora.sync=adapter: must be merge or auto with generator.groups: sending adapters "
            "to unlike engines has not been tried"
        )


def check_lora(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    lora = Lora.of(config.lora)
    target_names = targets(spec)
    if lora is None:
        return
    if config.lora.sync == "adapter" and (reasons := why_merged(config, spec)):
        yield f"lora.sync=adapter: must be merge or auto: {'; '.join(reasons)}"
    fused = []
    for parameter in fused_tensors(spec):
        if len(parameter.parts) > 1 or parameter.of_expert:
            fused.append(parameter.name.replace(LAYER_FIELD, "*"))
    if fused:
        yield (
            f"lora.rank={lora.rank}: must be null: PEFT has one adapter each for "
            f"{' and '.join(fused)} of a {spec.family} checkpoint"
        )
    projections = [name for name in ("q_proj", "k_proj", "v_proj") if lora.wants(f"{name}.weight")]
    if config.trainer.tp > spec.num_kv_heads and len(projections) in (1, 2):
        yield (
            f"lora.targets={yaml_text(config.lora.targets)}: must have all or none of q_proj, k_proj and "
            f"v_proj with trainer.tp={config.trainer.tp} above the model's {spec.num_kv_heads} "
            "key-value heads, as ranks then hold unlike parts of them"
        )
    if spec.linear_attention and spec.linear_layers:
        yield (
            f"lora.rank={lora.rank}: must be null: no adapter is stated for the "
            f"{spec.linear_attention.NAME} of a {spec.family} model"
        )
    if not target_names:
        yield (
            f"lora.rank={lora.rank}: must be null: {spec.family} states no layer of Megatron's "
            "whose name is linear_…"
        )
    unknown = [name for name in lora.targets if name not in (*target_names, ALL)]
    if unknown:
        explanation = f"no linear layer of a {spec.family} model"
        yield (
            f"lora.targets={yaml_text(config.lora.targets)}: {', '.join(unknown)} is "
            f"{explanation}; it has {', '.join(target_names)}, or all"
        )
    if lora.shared and not any(tensor.experts for tensor in lora_tensors(spec, lora)):
        yield "lora.experts=shared: must be own: no target is of an expert"
    if spec.mtp_layers:
        yield (
            f"trainer.mtp={config.trainer.mtp}: must be ignore with lora.rank={lora.rank}: "
            "adapters leave the layer as it is"
        )
    for name in _REFUSED:
        if config.trainer.megatron.get(name):
            yield (
                f"trainer.megatron.{name}={yaml_text(config.trainer.megatron[name])}: must be "
                f"left out with lora.rank={lora.rank}"
            )


def sends_adapters(config: RunConfig, spec: ModelSpec, device: str | None = None) -> bool:
    """Whether an update carries only the adapters.

    Otherwise it carries the weights, with any adapters merged. `device`: see `why_merged`.
    """
    return (
        bool(config.lora.rank)
        and config.lora.sync != "merge"
        and not why_merged(config, spec, device)
    )


def why_merged(config: RunConfig, spec: ModelSpec, device: str | None = None) -> list[str]:
    """The reasons why updates cannot carry only adapters.

    `device`: of the engines, cuda or cpu; None: that of this machine.
    """
    lora = Lora.of(config.lora)
    assert lora is not None
    if config.weights.delta != "off":
        return ["weights.delta=auto looks for changes in all weights"]
    if config.generator.has_groups:
        return ["sending adapters to unlike engines (generator.groups) has not been tried"]
    return unserved(
        spec,
        config.generator.topology,
        device or ("cuda" if cuda_available() else "cpu"),
        lora,
    )


def check_first_adapters(config: RunConfig, command: str | None) -> Iterable[str]:
    """Problems with `lora.init` and random weights: an adapter belongs to the weights it was
    trained on, and random ones cannot be adapted.
    """
    if (
        command == "sft"
        and config.lora.rank
        and config.model.random_init
        and not find_weights(config, command).are_there
    ):
        yield (
            "model.random_init=true: adapters cannot make a model of random weights; set "
            "sft.adapters=false to train all of them"
        )
    if not config.lora.rank or config.lora.init is None:
        return
    if command == "sft":
        yield (
            f"lora.init={config.lora.init}: must be null for megarl sft, since the run would "
            "begin with it once more"
        )
    elif command in ("train", "dry-run") and (weights := find_weights(config, command)).warm_start:
        yield (
            f"lora.init={config.lora.init}: belongs to model.path={config.model.path}, and the "
            f"run begins with {weights}"
        )
