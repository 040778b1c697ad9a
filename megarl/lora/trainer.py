"""A trainer that trains adapters of a frozen model (LoRA): y = W x + alpha / rank * B A x.

An adapter is a submodule of the layer. A hook on the layer's forward pass adds the adapter's output
for the layer's input, so it works with any schedule and recomputation. It relies on Megatron's
linear layers taking the input as first argument and returning (output, bias). Layers of Transformer
Engine that norm their input first are also asked for the normed input.

lora/layout.py says how the factors are cut. With x [s, b, in], on tensor ranks that share a layer:

    rows cut     h = A x is the same on all ranks, and its gradient is the sum of theirs. With
                 sequence parallelism each rank has its part of x: A's small output is gathered
                 instead of x, and finalize_model_grads sums the gradient of A.
    columns cut  h = A x is the sum over the ranks. With sequence parallelism each rank gets its
                 part of the sum, and finalize_model_grads sums the gradient of B.
    experts      Megatron sums outputs and gradients of inputs over the ranks outside the layers. So
                 each rank uses its own h, and the gradient of the whole factor is summed here.

A factor that all experts of a layer share counts as a part of the dense model. Each rank has the
part of its gradient from its own tokens or rows. All ranks of the stage sum these parts, as for a
norm with sequence parallelism.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from megarl.base.geometry import TrainerTopology
from megarl.lora.files import SETTINGS_FILE, TENSORS_FILE, adapter_settings, shown
from megarl.lora.layout import A, Adapter, Lora, target, trainer_adapters
from megarl.lora.settings import LoraConfig
from megarl.models.parameters import EXPERT_FIELD, LAYER_FIELD, Parameter
from megarl.models.spec import ModelSpec
from megarl.trainer import fully_sharded, hf_io
from megarl.trainer.cpu_support import layer_spec
from megarl.trainer.model import MegatronModel, parameters_by_name
from megarl.trainer.parallel import expert_tensor_group, tensor_group
from megarl.trainer.step import MegatronTrainer, StepResult


class Switch:
    """The current mode of all adapters of a trainer."""

    def __init__(self, dropout: float):
        self.dropout = dropout
        self.on = True
        self.training = False

    @contextlib.contextmanager
    def set(self, **values: bool) -> Iterator[None]:
        previous = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(previous)


class LayerAdapter(torch.nn.Module):
    """The adapters of one linear layer, or of all experts in a grouped linear layer."""

    def __init__(
        self,
        adapter: Adapter,
        weights: dict[str, torch.nn.Parameter],
        scale: float,
        switch: Switch,
        shared: dict[str, Any],
    ):
        """`weights`: ending of the name ("" or the expert's number on this rank) -> weight of the
        layer. `shared`: letter, a or b -> the factor that the layer's experts share.
        """
        super().__init__()
        self.adapter = adapter
        self.scale = scale
        self.switch = switch
        self.experts = adapter.weight.of_expert
        self.dim = adapter.weight.dim
        self.group = expert_tensor_group() if self.experts else tensor_group()
        # whether the layer's input or output is split over tensor ranks
        self.sequence_parallel = False
        self._factors: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []
        for ending, weight in weights.items():
            new_factors = {}
            for letter in "ab":
                if letter not in shared:
                    new_factors[letter] = new_factor(self, letter + ending, adapter, letter, weight)
            factors = shared | new_factors
            self._factors.append((factors["a"], factors["b"]))

    def mark(self, sequence_parallel: bool) -> None:
        """Sets the attributes with which Megatron reduces gradients and computes their norm."""
        self.sequence_parallel = sequence_parallel and not self.experts and self.group.size() > 1
        for name, parameter in self.named_parameters():
            cut = (self.adapter.a if name[0] == "a" else self.adapter.b).dim is not None
            parameter.allreduce = not self.experts  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = cut or self.experts  # type: ignore[attr-defined]
            parameter.sequence_parallel = self.sequence_parallel and not cut  # type: ignore[attr-defined]
            # Each tensor rank of an expert has the whole factor, which must count once in the norm.
            parameter.shared = self.experts and not cut and self.group.rank() > 0  # type: ignore[attr-defined]

    def add(self, layer: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        """The hook: returns `output` of `layer` plus the adapters' output."""
        out, bias = output
        x = arguments[0]
        if isinstance(out, tuple):  # from a layer that also returns its normed input
            out, x = out
        if self.switch.on:
            tokens = list(map(int, arguments[1])) if len(arguments) > 1 else [len(x)]
            parts = []
            for part, pair in zip(x.split(tokens), self._factors, strict=True):
                parts.append(self._added(part, *pair))
            out = out + (parts[0] if len(parts) == 1 else torch.cat(parts))
        return out, bias

    def _added(self, x: torch.Tensor, a: torch.nn.Parameter, b: torch.nn.Parameter) -> torch.Tensor:
        a = self._summed(a, "a")
        b = self._summed(b, "b")
        h = F.linear(self._dropped(x), a) * self.scale
        if not self.experts and self.dim == 0:
            if self.sequence_parallel:
                h = gather_from_sequence_parallel_region(
                    h, tensor_parallel_output_grad=True, group=self.group
                )
            else:
                h = _SummedGradient.apply(h, self.group)
        elif not self.experts and self.dim == 1 and self.group.size() > 1:
            if self.sequence_parallel:
                reduce = reduce_scatter_to_sequence_parallel_region
            else:
                reduce = reduce_from_tensor_model_parallel_region
            h = reduce(h, group=self.group)
        return product(self.adapter, h, b)

    def _summed(self, factor: torch.nn.Parameter, letter: str) -> Any:
        parameter = self.adapter.a if letter == "a" else self.adapter.b
        if self.experts and parameter.of_expert and parameter.dim is None:
            return _SummedGradient.apply(factor, self.group)
        return factor

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        if not (self.switch.dropout and self.switch.training):
            return x
        # If all tensor ranks have the same x, they must all drop the same elements.
        same_on_all = not self.experts and not self.sequence_parallel and self.dim != 1
        name = get_expert_parallel_rng_tracker_name() if self.experts else "model-parallel-rng"
        tracker = get_cuda_rng_tracker()
        assert tracker is not None
        with contextlib.nullcontext() if same_on_all else tracker.fork(name):
            return F.dropout(x, self.switch.dropout)

    def factors(self, number: int) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        """A and B of the layer's weight number `number`."""
        return self._factors[number]

    def delta(self, number: int) -> torch.Tensor:
        """[rows, columns] float32: what the adapter adds to this rank's part of the layer's weight
        number `number`.
        """
        a, b = (factor.detach().float() for factor in self._factors[number])
        return product(self.adapter, a.t() * self.scale, b).t()


class _SummedGradient(torch.autograd.Function):
    """The identity in the forward pass; sums the gradient over the ranks of `group`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        if ctx.group.size() > 1:
            grad = grad.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(grad, group=ctx.group)
        return grad, None


def product(adapter: Adapter, h: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[…, rows]: the B of each part times its part of h [… , parts * rank], in the layer's order of
    rows. 0 for parts without adapter.
    """
    if adapter.has_adapter == (True,):
        return F.linear(h, b)
    adapted_rows = []
    for rows, is_adapted in zip(adapter.rows, adapter.has_adapter):
        if is_adapted:
            adapted_rows.append(rows)
    groups = len(b) // sum(adapted_rows)
    pairs = zip(
        h.chunk(len(adapted_rows), dim=-1), b.view(groups, -1, b.size(1)).split(adapted_rows, dim=1)
    )
    outs = []
    for rows, is_adapted in zip(adapter.rows, adapter.has_adapter):
        shape = (*h.shape[:-1], groups, rows)
        if not is_adapted:
            outs.append(h.new_zeros(shape))
            continue
        part, factor = next(pairs)
        outs.append(F.linear(part, factor.reshape(-1, b.size(1))).view(shape))
    return torch.cat(outs, dim=-1).flatten(-2)


def attach(
    chunks: Sequence[GPTModel],
    adapters: Sequence[Adapter],
    scale: float,
    switch: Switch,
    sequence_parallel: bool,
) -> dict[torch.nn.Parameter, tuple[LayerAdapter, int]]:
    """Freezes the model, and adds adapters with unset values to its layers.

    Returns a mapping from each weight with an adapter to (adapters of its layer, number of the
    weight in the layer).
    """
    adapters_of_weights: dict[torch.nn.Parameter, tuple[LayerAdapter, int]] = {}
    for chunk in chunks:
        chunk.requires_grad_(False)
        # full recomputation computes gradients only for a layer whose input needs one
        if hasattr(chunk, "embedding"):
            chunk.embedding.register_forward_hook(_with_gradient)
        for layer in chunk.decoder.layers:
            number = _number(layer)
            shared: dict[str, torch.nn.Parameter] = {}  # letter -> factor
            for adapter in adapters:
                layers = adapter.weight.layers
                has_weight = layers is None or number in layers
                for module, weights in _layers(layer, adapter.weight) if has_weight else ():
                    for letter, factor in (("a", adapter.a), ("b", adapter.b)):
                        if adapter.shares(factor) and letter not in shared:
                            shared[letter] = _shared(
                                layer,
                                factor,
                                adapter,
                                letter,
                                next(iter(weights.values())),
                                sequence_parallel,
                            )
                    given_factors = {}
                    for letter, f in (("a", adapter.a), ("b", adapter.b)):
                        if adapter.shares(f):
                            given_factors[letter] = shared[letter]
                    layer_adapter = LayerAdapter(adapter, weights, scale, switch, given_factors)
                    module.adapter = layer_adapter
                    layer_adapter.mark(sequence_parallel)
                    if hasattr(module, "layer_norm_weight"):
                        module.return_layernorm_output = True
                    module.register_forward_hook(layer_adapter.add)
                    for place, weight in enumerate(weights.values()):
                        adapters_of_weights[weight] = (layer_adapter, place)
    return adapters_of_weights


def _number(layer: Any) -> int:
    """The number of the layer in the whole model, from 0."""
    return layer.layer_number - 1


def _with_gradient(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled():
        return output.requires_grad_()
    return output


def _layers(
    layer: torch.nn.Module, weight: Parameter
) -> Iterator[tuple[Any, dict[str, torch.nn.Parameter]]]:
    """The modules of the decoder layer `layer` with `weight`, and for each: ending of the name ->
    its parameter.
    """
    path, _, ending = weight.name.removeprefix(f"decoder.layers.{LAYER_FIELD}.").rpartition(
        ".weight"
    )
    outer, expert, inner = path.partition(f"{EXPERT_FIELD}.")
    if expert:
        modules: Any = []
        for child in layer.get_submodule(outer[:-1]).children():
            modules.append(child.get_submodule(inner))
    else:
        modules = [layer.get_submodule(path)]
    for module in modules:
        names = [f"{number}" for number in range(module.num_gemms)] if ending else [""]
        yield module, {name: getattr(module, f"weight{name}") for name in names}


def _shared(
    layer: Any,
    factor: Parameter,
    adapter: Adapter,
    letter: str,
    weight: torch.nn.Parameter,
    sequence_parallel: bool,
) -> torch.nn.Parameter:
    """The factor of the adapter that all experts of `layer` share."""
    path = factor.name.removeprefix(f"decoder.layers.{LAYER_FIELD}.").split(".")[:-1]
    owner = layer.get_submodule(".".join(path[:-1]))
    if not hasattr(owner, path[-1]):
        owner.add_module(path[-1], torch.nn.Module())
    parameter = new_factor(getattr(owner, path[-1]), letter, adapter, letter, weight)
    parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
    return parameter


def new_factor(
    owner: torch.nn.Module, name: str, adapter: Adapter, letter: str, weight: torch.nn.Parameter
) -> torch.nn.Parameter:
    """Adds to `owner` the factor `letter` for this rank's part `weight` of a layer, filled with
    zeros.
    """
    parts = sum(adapter.has_adapter)
    rank = adapter.rank
    adapted_rows = sum(
        rows for rows, is_adapted in zip(adapter.rows, adapter.has_adapter) if is_adapted
    )
    rows, columns = weight.shape
    if letter == "a":
        shape = (parts * rank, columns)
    else:
        shape = (rows // sum(adapter.rows) * adapted_rows, rank)
    parameter = torch.nn.Parameter(weight.new_zeros(shape))
    owner.register_parameter(name, parameter)
    return parameter


class LoraTrainer(MegatronTrainer):
    """A trainer that trains adapters of a frozen model.

    Only the adapters have gradients and an optimizer, and only they are saved. `saved_layout` is
    the layout of the adapters, `layout` that of the model. The reference model is the model without
    adapters, so it takes no memory. Engines and exports get the model with merged adapters.
    """

    TRAINED = False

    def __init__(
        self,
        spec: ModelSpec,
        topology: TrainerTopology,
        *arguments: Any,
        lora: LoraConfig,
        sent_alone: bool = False,
        **settings: Any,
    ):
        """Like MegatronTrainer.

        `sent_alone`: whether updates carry only the adapters, without merging.
        """
        adapters_of_run = Lora.of(lora)
        assert adapters_of_run is not None
        self._lora = adapters_of_run
        self._settings = lora
        self._switch = Switch(lora.dropout)
        self._sent_alone = sent_alone
        self._merged: dict[str, torch.Tensor] = {}
        self._scaled: dict[str, torch.Tensor] = {}
        super().__init__(spec, topology, *arguments, **settings)
        self.frozen = True
        self.saved_layout = adapters_of_run.trainer_layout(
            spec, topology, str(self.dtype).removeprefix("torch."), layer_spec()
        )

    def _build_chunks(self) -> list[GPTModel]:
        chunks = super()._build_chunks()
        group = tensor_group()
        adapters = [
            adapter.on_rank(group.rank(), group.size())
            for adapter in trainer_adapters(self.spec, self.topology, layer_spec(), self._lora)
        ]
        of_weights = attach(
            chunks, adapters, self._lora.scale, self._switch, self.sequence_parallel
        )
        # by the weight's name, since fully_shard replaces parameters
        self._adapters: dict[str, tuple[LayerAdapter, int]] = {}
        for name, parameter in parameters_by_name(chunks).items():
            if parameter in of_weights:
                self._adapters[name] = of_weights[parameter]  # type: ignore[index]
        return chunks

    def _adapter_parameters(self) -> set[torch.nn.Parameter]:
        return {p for p in self._parameters() if p.requires_grad}

    def train_step(self, *arguments: Any, **settings: Any) -> StepResult:
        with self._switch.set(training=True):
            return super().train_step(*arguments, **settings)

    def hold_reference(self, model: MegatronModel | None = None) -> None:
        """Does nothing, since the model without adapters is always there."""
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
        """Sets the adapters' initial values: from `lora.init`, or as in PEFT, by name and seed: A
        uniform (He et al. 2015 with a = √5), B zero.
        """
        parameters = self.local_parameters()
        initial_file = None
        if self._settings.init:
            from safetensors import safe_open  # as in hf_io.load_hf

            initial_file = safe_open(Path(self._settings.init) / TENSORS_FILE, framework="pt")
        shapes = self.saved_shapes()
        for tensor in self.saved_layout.tensors(dist.get_rank()):
            parameter = hf_io.local_parameter(parameters, tensor)
            for piece in tensor.pieces:
                local = parameter[piece.local.slices()]
                if initial_file is not None:
                    name, shape = shown(piece.logical_name, shapes[piece.logical_name])
                    local.copy_(
                        initial_file.get_slice(name)[
                            (0,) * (len(shape) - 2) + piece.logical.slices()
                        ]
                    )
                elif piece.logical_name.endswith(A):
                    bound = math.sqrt(1 / shapes[piece.logical_name][1])
                    local.copy_(
                        hf_io.drawn_rows(
                            piece, shapes[piece.logical_name][1], seed, partial(_uniform, bound)
                        )
                    )
                else:
                    local.zero_()
        self.reload_masters()

    def saved_shapes(self) -> dict[str, tuple[int, ...]]:
        result: dict[str, tuple[int, ...]] = {}
        for tensor in self._lora.hf_layout(self.spec, "float32").tensors(0):
            result[tensor.name] = tensor.shape
        return result

    def sent_parameters(self) -> dict[str, torch.Tensor]:
        if self._sent_alone:
            return self.served_parameters()
        return self.merged_parameters()

    def merged_parameters(self) -> dict[str, torch.Tensor]:
        """This rank's part of each weight W + alpha / rank * B A, computed in float32 and rounded
        once. Every call returns the same tensors, with new values.
        """
        parameters = {}
        for name, parameter in parameters_by_name(self.chunks).items():
            # a factor of an adapter
            if isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad:
                continue
            parameters[name] = weight = self.live_weights(parameter)
            if name in self._adapters:
                adapter, number = self._adapters[name]
                parameters[name] = self._merged.setdefault(name, torch.empty_like(weight))
                delta = fully_sharded.local_rows(adapter.delta(number), parameter)
                parameters[name].copy_(delta.add_(weight))
        return parameters

    def served_parameters(self) -> dict[str, torch.Tensor]:
        """The weights and the adapters for engines that serve adapters.

        SGLang multiplies an adapter's output by alpha / rank, except for experts, where B must
        include this factor. Every call returns the same tensors, as in `merged_parameters`.
        """
        of_experts = set()
        for adapter, number in self._adapters.values():
            if adapter.experts:
                of_experts.add(adapter.factors(number)[1])
        parameters = self.local_parameters()
        for name, parameter in parameters_by_name(self.chunks).items():
            if parameter in of_experts:
                parameters[name] = self._scaled.setdefault(name, torch.empty_like(parameter.data))
                torch.mul(parameter.data, self._lora.scale, out=parameters[name])
        return parameters

    def export_adapter(self, path: str) -> None:
        """Writes the adapters as a PEFT folder, which SGLang can also serve."""
        dtype = self.saved_layout.kinds[0].shards[0].dtype
        tensors = self._lora.hf_layout(self.spec, dtype).tensors(0)
        plan = hf_io.file_plan(
            tensors,
            math.inf,
            Path(TENSORS_FILE).stem,
            lambda tensor: shown(tensor.name, tensor.shape),
        )
        names = sorted({target(tensor.name.rpartition(".lora_")[0]) for tensor in tensors})
        text = json.dumps(
            adapter_settings(self._lora, names, self.base, self._settings.dropout), indent=2
        )

        def complete(folder: Path) -> None:
            (folder / SETTINGS_FILE).write_text(text, encoding="utf-8")

        hf_io.write_tensors(
            plan, self.saved_layout, self.local_parameters(), path, complete, beside=False
        ).finish()


def _uniform(bound: float, row: torch.Tensor, generator: torch.Generator) -> None:
    row.uniform_(-bound, bound, generator=generator)
