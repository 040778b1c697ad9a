"""Scenarios of the real trainers in test_trainer_lora.py.

A function `scenario_…` runs on every rank, and its result is saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainer_rig import (
    DENOMINATOR,
    TEMPERATURE,
    all_logprobs,
    make,
    one_step,
    plain_adam,
    poison_padding,
    sequences,
    weighted_nll,
)

from megarl.base.geometry import TrainerTopology
from megarl.config.schema import OptimizerConfig
from megarl.lora.layout import Lora, trainer_adapters
from megarl.lora.settings import LoraConfig
from megarl.models.registry import load_spec

# Large enough that Adam does not amplify the rounding of small gradients.
ADAM = OptimizerConfig(lr=1e-2, clip_grad=0.0, weight_decay=0.01, eps=1e-2)


def adapter_parts(trainer: Any) -> dict[str, torch.Tensor]:
    """This rank's parts of the adapters."""
    parameters = trainer.local_parameters()
    return {
        tensor.name: parameters[tensor.name].clone()
        for tensor in trainer.saved_layout.tensors(dist.get_rank())
    }


def steps(trainer: Any, *seeds: int) -> None:
    for seed in seeds:
        trainer.train_step(
            sequences(trainer.spec.vocab_size, seed=seed),
            weighted_nll,
            DENOMINATOR,
            temperature=TEMPERATURE,
        )


def scenario_lora(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """A step that moves nothing, in one and in several microbatches; log-probs with and without
    adapters; exports; three steps of AdamW; the adapters afterwards.
    """
    from megarl.trainer.optimizer import optimizer_shards

    trainer = make(scenario, plain_adam(lr=0.0))
    trainer.load_hf(scenario["model"])
    trainer.hold_reference()
    trainer.export_hf(str(out / (scenario["name"] + ".merged")), scenario["model"])
    trainer.export_adapter(str(out / (scenario["name"] + ".adapter")))
    poison_padding(trainer)
    batch = sequences(trainer.spec.vocab_size)
    results: dict[str, Any] = {
        "all": one_step(trainer, batch),
        "logprobs": all_logprobs(trainer, batch, temperature=TEMPERATURE),
        "reference": all_logprobs(trainer, batch, model="reference", temperature=TEMPERATURE),
    }
    trainer.max_tokens = 48
    results["microbatches"] = one_step(trainer, batch)
    trainer = make(scenario, ADAM)
    trainer.load_hf(scenario["model"])
    before = {name: values.clone() for name, values in trainer.local_parameters().items()}
    steps(trainer, 1, 2, 3)
    after = trainer.local_parameters()
    results["moved"] = [name for name in before if not torch.equal(before[name], after[name])]
    results["adapters"] = adapter_parts(trainer)
    scaled = {
        name
        for name in after
        if (".experts." in name and name.rpartition(".")[2][0] == "b")
        or name.endswith(".shared_adapter.b")
    }
    served = trainer.served_parameters()
    scale = scenario["lora"]["alpha"] / scenario["lora"]["rank"]
    results["served"] = [
        name
        for name in after
        if not torch.equal(served[name], after[name] * (scale if name in scaled else 1))
    ]
    frozen = [
        parameter
        for chunk in trainer.chunks
        for parameter in chunk.parameters()
        if not parameter.requires_grad
    ]
    results["gradients of frozen"] = [
        tuple(p.shape) for p in frozen if p.grad is not None or hasattr(p, "main_grad")
    ]
    results["optimized"] = sum(
        shard.master.numel() for shard in optimizer_shards(trainer.optimizer, trainer.live_weights)
    )
    results["buffers"] = sum(
        buffer.numel
        for chunk in trainer.ddp
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    )
    return results


def scenario_lora_save(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """The adapters at the start; after two steps, where they are saved; and after a third step."""
    from megarl.trainer import checkpoint

    trainer = make(scenario, ADAM)
    trainer.load_hf(scenario["model"])
    results = {"first": adapter_parts(trainer)}
    steps(trainer, 1, 2)
    checkpoint.save(trainer, scenario["checkpoint"], {})
    steps(trainer, 3)
    return results | {"third": adapter_parts(trainer)}


def scenario_lora_load(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """The message when a checkpoint is loaded over other weights; then the third step."""
    from megarl.plan.checkpoints import CheckpointError
    from megarl.trainer import checkpoint

    trainer = make(scenario, ADAM)
    results = {"first": adapter_parts(trainer), "refused": ""}
    trainer.load_hf(scenario["other"])
    try:
        checkpoint.load(trainer, scenario["checkpoint"])
    except CheckpointError as error:
        results["refused"] = str(error)
    trainer.load_hf(scenario["model"])
    results["first"] = adapter_parts(trainer)
    checkpoint.load(trainer, scenario["checkpoint"])
    steps(trainer, 3)
    return results | {"third": adapter_parts(trainer)}


def scenario_lora_dropout(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """A step's gradients by two equal trainers, and the log-probs of the first."""
    results = {}
    for name in ("one", "again"):
        trainer = make(scenario, plain_adam(lr=0.0))
        trainer.load_hf(scenario["model"])
        results[name] = one_step(trainer, sequences(trainer.spec.vocab_size))
        results["logprobs"] = all_logprobs(
            trainer, sequences(trainer.spec.vocab_size), temperature=TEMPERATURE
        )
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    return results


class Normed(torch.nn.Module):
    """Behaves like Transformer Engine's linear layer with a norm."""

    def __init__(self, rows: int, columns: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(rows, columns))
        self.layer_norm_weight = torch.nn.Parameter(torch.rand(columns))
        self.return_layernorm_output = False

    def forward(self, x: torch.Tensor) -> Any:
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight)
        y = normed @ self.weight.t()
        return ((y, normed) if self.return_layernorm_output else y), None


class Grouped(torch.nn.Module):
    """Behaves like its grouped linear layer: one weight for each expert, whose tokens are
    contiguous.
    """

    def __init__(self, count: int, rows: int, columns: int):
        super().__init__()
        self.num_gemms = count
        for number in range(count):
            self.register_parameter(
                f"weight{number}", torch.nn.Parameter(torch.randn(rows, columns))
            )

    def forward(self, x: torch.Tensor, tokens: list[int]) -> Any:
        return torch.cat(
            [part @ getattr(self, f"weight{n}").t() for n, part in enumerate(x.split(tokens))]
        ), None


class Plain(Grouped):
    def __init__(self, rows: int, columns: int):
        super().__init__(0, rows, columns)
        self.weight = torch.nn.Parameter(torch.randn(rows, columns))

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return x @ self.weight.t(), None


def scenario_lora_te(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Adapters on layers with Transformer Engine's names and forward passes.

    Returns each layer's output with adapters and with merged weights; the names and shapes of the
    parameters, and those of the layout.
    """
    from megarl.lora.trainer import Switch, attach
    from megarl.trainer.model import parameters_by_name

    make(scenario, plain_adam(lr=0.0))  # for the process groups
    spec = load_spec(scenario["model"])
    lora = Lora.of(LoraConfig(**scenario["lora"]))
    topology = TrainerTopology()
    assert lora is not None
    torch.manual_seed(0)
    hidden = spec.hidden_size
    rows = spec.experts.intermediate_size
    heads = spec.num_attention_heads * spec.head_dim
    layers = []
    for number in range(spec.num_layers):
        layer: Any = torch.nn.Module()
        layer.layer_number = number + 1
        layer.self_attention = torch.nn.Module()
        layer.mlp = torch.nn.Module()
        layer.self_attention.linear_qkv = Normed(
            heads + 2 * spec.num_kv_heads * spec.head_dim, hidden
        )
        layer.self_attention.linear_proj = Plain(hidden, heads)
        layer.mlp.experts = torch.nn.Module()
        layer.mlp.local_expert_indices = [*range(spec.experts.count)]
        layer.mlp.experts.linear_fc1 = Grouped(spec.experts.count, 2 * rows, hidden)
        layer.mlp.experts.linear_fc2 = Grouped(spec.experts.count, hidden, rows)
        layers.append(layer)
    chunk: Any = torch.nn.Module()
    chunk.decoder = torch.nn.Module()
    chunk.decoder.layers = torch.nn.ModuleList(layers)
    switch = Switch(0.0)
    adapters = attach(
        [chunk], trainer_adapters(spec, topology, "te", lora), lora.scale, switch, False
    )
    named = parameters_by_name([chunk])
    trained = {name: p for name, p in named.items() if p.requires_grad}
    for parameter in trained.values():
        torch.nn.init.normal_(parameter)
    tokens = [2, 0, 3, 1]
    pairs = []
    for module, arguments in (
        (layers[1].self_attention.linear_qkv, (torch.randn(5, 1, hidden),)),
        (layers[1].self_attention.linear_proj, (torch.randn(5, 1, heads),)),
        (layers[1].mlp.experts.linear_fc1, (torch.randn(6, hidden), tokens)),
        (layers[1].mlp.experts.linear_fc2, (torch.randn(6, rows), torch.tensor(tokens).tolist())),
    ):
        got = module(*arguments)
        with switch.set(on=False), torch.no_grad():
            weights = [p for p in module.parameters(recurse=False) if p in adapters]
            plain = module(*arguments)
            for weight in weights:
                adapter, place = adapters[weight]
                weight.add_(adapter.delta(place))
            pairs.append((got, module(*arguments), plain))
    layout = {
        tensor.name: tensor.shape
        for tensor in lora.trainer_layout(spec, topology, "float32", "te").tensors(0)
    }
    return {
        "pairs": pairs,
        "held": {name: tuple(p.shape) for name, p in trained.items()},
        "layout": layout,
    }
