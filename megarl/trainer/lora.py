"""A trainer whose model is frozen, and whose adapters are trained (LoRA).

What has gradients and an optimizer, and what is saved, are the adapters alone: `saved_layout` says where they lie, `layout` where the model
does. The reference model is the model without them, and so takes no memory. Engines and exports get the model with the adapters merged.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from megarl.config.lora import LoraConfig
from megarl.models.adapters import A, Lora, target, trainer_adapters
from megarl.models.spec import ModelSpec
from megarl.reshard.layout import hf_layout, trainer_layout
from megarl.topology import TrainerTopology
from megarl.trainer import hf_io
from megarl.trainer.adapters import Switch, attach
from megarl.trainer.layer_spec import layer_spec
from megarl.trainer.megatron_model import MegatronModel
from megarl.trainer.model import parameters_by_name
from megarl.trainer.peft_files import SETTINGS_FILE, TENSORS_FILE, adapter_settings, shown
from megarl.trainer.step import MegatronTrainer, StepResult


class LoraTrainer(MegatronTrainer):
    """`base` is the checkpoint that the frozen weights come from, or None if they are random."""

    def __init__(self, spec: ModelSpec, topology: TrainerTopology, *arguments: Any, lora: LoraConfig, **settings: Any):
        """As MegatronTrainer."""
        found = Lora.of(lora)
        assert found is not None
        self._lora, self._settings, self._switch = found, lora, Switch(lora.dropout)
        self._merged: dict[str, torch.Tensor] = {}
        self._scaled: dict[str, torch.Tensor] = {}
        super().__init__(spec, topology, *arguments, **settings)
        self.lora = found
        self.saved_layout = trainer_layout(spec, topology, str(self.dtype).removeprefix("torch."), layer_spec(), found)

    def _build_chunks(self) -> list[GPTModel]:
        chunks = super()._build_chunks()
        adapters = trainer_adapters(self.spec, self.topology, layer_spec(), self._lora)
        self._adapters = attach(chunks, adapters, self._lora.scale, self._switch, self.sequence_parallel)
        return chunks

    def train_step(self, *arguments: Any, **settings: Any) -> StepResult:
        with self._switch.set(training=True):
            return super().train_step(*arguments, **settings)

    def hold_reference(self, model: MegatronModel | None = None) -> None:
        """The model without adapters is held anyway."""
        self._reference = model

    @contextlib.contextmanager
    def _reference_weights(self) -> Iterator[None]:
        with self._switch.set(on=False):
            yield

    def init_random(self, seed: int) -> None:
        super().init_random(seed)
        self._begin(seed)

    def load_hf(self, path: str, new_head: hf_io.NewHead | None = None) -> None:
        super().load_hf(path, new_head)
        self.base = str(Path(path).resolve()) if Path(path).is_dir() else path
        self._begin(self.seed)

    def _begin(self, seed: int) -> None:
        """Sets the adapters' first values: those of `lora.init`, or as PEFT does, by name and seed: A uniform (He et al. 2015 with a = √5),
        B zero."""
        parameters = self.local_parameters()
        there = None
        if self._settings.init:
            from safetensors import safe_open  # as in hf_io.load_hf

            there = safe_open(Path(self._settings.init) / TENSORS_FILE, framework="pt")
        shapes = {tensor.name: tensor.shape for tensor in hf_layout(self.spec, "float32", self._lora).tensors(0)}
        for tensor in self.saved_layout.tensors(dist.get_rank()):
            parameter = hf_io.local_parameter(parameters, tensor)
            for piece in tensor.pieces:
                local = parameter[piece.local.slices()]
                if there is not None:
                    name, shape = shown(piece.logical_name, shapes[piece.logical_name])
                    local.copy_(there.get_slice(name)[(0,) * (len(shape) - 2) + piece.logical.slices()])
                elif piece.logical_name.endswith(A):
                    bound = math.sqrt(1 / shapes[piece.logical_name][1])
                    local.copy_(hf_io.drawn_rows(piece, shapes[piece.logical_name][1], seed, partial(_uniform, bound)))
                else:
                    local.zero_()
        self.optimizer.reload_model_params()

    def merged_parameters(self) -> dict[str, torch.Tensor]:
        """W + alpha / rank * B A in float32, rounded once, of this rank's part of each weight. The tensors are the same at every call, with
        the values of the last."""
        found = {}
        for name, parameter in parameters_by_name(self.chunks).items():
            if isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad:  # an adapter
                continue
            found[name] = weight = parameter.data
            if parameter in self._adapters:
                adapter, number = self._adapters[parameter]  # type: ignore[index]
                found[name] = self._merged.setdefault(name, torch.empty_like(weight))
                found[name].copy_(adapter.delta(number).add_(weight))
        return found

    def served_parameters(self) -> dict[str, torch.Tensor]:
        """The weights and the adapters, as engines get them that serve adapters. SGLang multiplies what an adapter adds by alpha / rank,
        except for experts: there B has to hold it. The tensors are the same at every call, as of `merged_parameters`."""
        of_experts = {adapter.factors(number)[1] for adapter, number in self._adapters.values() if adapter.experts}
        found = self.local_parameters()
        for name, parameter in parameters_by_name(self.chunks).items():
            if parameter in of_experts:
                found[name] = self._scaled.setdefault(name, torch.empty_like(parameter.data))
                torch.mul(parameter.data, self._lora.scale, out=found[name])
        return found

    def export_adapter(self, path: str) -> None:
        """Writes the adapters as a PEFT folder, which SGLang serves too."""
        dtype = self.saved_layout.kinds[0].shards[0].dtype
        tensors = hf_layout(self.spec, dtype, self._lora).tensors(0)
        plan = hf_io.file_plan(tensors, math.inf, Path(TENSORS_FILE).stem, lambda tensor: shown(tensor.name, tensor.shape))
        names = sorted({target(tensor.name.rpartition(".lora_")[0]) for tensor in tensors})
        text = json.dumps(adapter_settings(self._lora, names, self.base, self._settings.dropout), indent=2)

        def complete(folder: Path) -> None:
            (folder / SETTINGS_FILE).write_text(text)

        hf_io.write_tensors(plan, self.saved_layout, self.local_parameters(), path, complete, beside=False).finish()


def _uniform(bound: float, row: torch.Tensor, generator: torch.Generator) -> None:
    row.uniform_(-bound, bound, generator=generator)
