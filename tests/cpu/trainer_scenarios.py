"""Scenarios of the real trainers in test_trainer.py and related files.

A function `scenario_…` runs on every rank, and its result is saved.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from trainer_rig import (
    DENOMINATOR,
    TEMPERATURE,
    all_logprobs,
    drawn_from_sets,
    logits,
    logprob_rows,
    make,
    one_step,
    plain_adam,
    poison_padding,
    sequences,
    weighted_nll,
    with_random_experts,
)

from megarl.base.geometry import TrainerTopology
from megarl.config.errors import ConfigError
from megarl.config.schema import OptimizerConfig, TrainerConfig
from megarl.models.registry import load_spec
from megarl.trainer import hf_io


def scenario_gradients(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Logits, log-probs, gradients and export at an HF checkpoint's weights (learning rate 0)."""
    trainer = make(scenario, plain_adam(lr=0.0))
    trainer.load_hf(scenario["model"])
    trainer.export_hf(str(out / (scenario["name"] + ".hf")), scenario["model"])
    poison_padding(trainer)
    all_sequences = sequences(trainer.spec.vocab_size)
    results = {
        "all": one_step(trainer, all_sequences),
        "dropped": one_step(trainer, [s for s in all_sequences if any(s.advantages)]),
        "none": one_step(trainer, []),
        "logprobs": all_logprobs(trainer, all_sequences, temperature=TEMPERATURE),
        "masked_logprobs": logprob_rows(trainer, all_sequences, temperature=TEMPERATURE),
        "logits": logits(trainer, all_sequences[:1]),
    }
    trainer.max_tokens = 48  # several microbatches of different shapes
    results["microbatches"] = one_step(trainer, all_sequences)
    if trainer.routing:
        replayed = with_random_experts(all_sequences, trainer.routing)
        results["replayed"] = one_step(trainer, replayed)
        results["replayed_logprobs"] = all_logprobs(trainer, replayed, temperature=TEMPERATURE)
        results["afterwards"] = all_logprobs(trainer, all_sequences, temperature=TEMPERATURE)
    return results


def scenario_blocks(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Log-probs of a model that rotates half of each head, and of the same with windows that hide
    nothing; the error for a model with biases that its family does not declare.
    """
    spec = replace(load_spec(scenario["model"]), partial_rotary_factor=0.5)
    windowed = replace(
        spec.attention,
        window=spec.max_position_embeddings,
        windowed_layers=tuple(range(spec.num_layers)),
        windowed_rope_theta=spec.rope_theta,
    )
    biased = replace(spec.attention, output_bias=True)
    results = {}
    for name, attention in (("plain", spec.attention), ("windowed", windowed), ("biased", biased)):
        try:
            trainer = make(scenario, plain_adam(lr=0.0), spec=replace(spec, attention=attention))
        except ConfigError as error:
            results[name] = str(error)
            continue
        trainer.load_hf(scenario["model"])
        results[name] = all_logprobs(trainer, sequences(spec.vocab_size))
    return results


def scenario_exported(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """A step, an export, and the log-probs of longer sequences."""
    trainer = make(scenario, plain_adam(lr=1e-2))
    trainer.load_hf(scenario["model"])
    one_step(trainer, sequences(trainer.spec.vocab_size))
    trainer.export_hf(str(out / (scenario["name"] + ".hf")), scenario["model"])
    return {
        "logprobs": all_logprobs(trainer, sequences(trainer.spec.vocab_size, scenario["lengths"]))
    }


def scenario_lengths(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    from trainer_lengths import any_lengths

    return any_lengths(scenario)


def scenario_save(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, a third step; the reference model keeps the first weights."""
    from megarl.trainer import checkpoint

    trainer = make(scenario, plain_adam(lr=1e-2))
    trainer.load_hf(scenario["model"])
    vocab = trainer.spec.vocab_size
    probe = sequences(vocab)
    start = all_logprobs(trainer, probe)
    trainer.hold_reference()
    for seed in (1, 2):
        one_step(trainer, sequences(vocab, seed=seed))
    checkpoint.save(trainer, scenario["checkpoint"], {"prompts": 17})
    after = all_logprobs(trainer, probe)
    results = {
        "start": start,
        "reference": all_logprobs(trainer, probe, model="reference"),
        "after": after,
    }
    results["still"] = all_logprobs(trainer, probe)
    results |= continue_from(trainer, scenario, out)
    return results


def scenario_load(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    from megarl.trainer import checkpoint

    trainer = make(scenario, plain_adam(lr=1e-2))
    state = checkpoint.load(trainer, scenario["checkpoint"])
    return {"state": state, **continue_from(trainer, scenario, out)}


def scenario_other_settings(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Continues a checkpoint with another optimizer configuration."""
    from megarl.trainer import checkpoint

    trainer = make(scenario, OptimizerConfig(**scenario["optimizer"]))
    checkpoint.load(trainer, scenario["checkpoint"])
    one_step(trainer, sequences(trainer.spec.vocab_size))
    return {
        "groups": [
            {k: v for k, v in group.items() if k != "params"}
            for group in trainer.optimizer.param_groups
        ]
    }


def continue_from(trainer: Any, scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """The third step, then one without sequences (only momentum).

    Returns the weights after each.
    """
    result = trainer.train_step(
        sequences(trainer.spec.vocab_size, seed=3),
        weighted_nll,
        DENOMINATOR,
        temperature=TEMPERATURE,
    )
    trainer.export_hf(str(out / (scenario["name"] + ".3.hf")), scenario["model"])
    idle = trainer.train_step([], weighted_nll, DENOMINATOR)
    trainer.export_hf(str(out / (scenario["name"] + ".4.hf")), scenario["model"])
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "idle": (idle.loss, idle.grad_norm, idle.sums),
        "position": trainer.learning_rate.position,
        "random": torch.get_rng_state(),
    }


def scenario_init(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    trainer = make(scenario, plain_adam(lr=0.0))
    trainer.init_random(scenario["seed"])
    folder = str(out / (scenario["name"] + ".hf"))
    hf_io.export_hf(
        trainer.spec,
        trainer.layout,
        trainer.local_parameters(),
        folder,
        scenario["model"],
        max_file_bytes=20_000,
    ).finish()
    return {}


def scenario_train(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Four steps with warm-up, cosine schedule, clipping and weight decay."""
    trainer = make(scenario, OptimizerConfig(**scenario["optimizer"]), total_steps=4)
    trainer.load_hf(scenario["model"])
    results = [
        trainer.train_step(sequences(trainer.spec.vocab_size, seed=seed), weighted_nll, DENOMINATOR)
        for seed in range(4)
    ]
    trainer.export_hf(str(out / (scenario["name"] + ".hf")), scenario["model"])
    return {
        "rates": [r.learning_rate for r in results],
        "grad_norms": [r.grad_norm for r in results],
    }


def scenario_logprobs(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """linear_logprobs and its gradient.

    The hidden states are the logits, because this rank's output layer is its slice of the unit
    matrix.
    """
    from megarl.kernels import linear_logprobs

    results = {}
    for name, (inputs, targets, vocab_size, temperature) in torch.load(scenario["inputs"]).items():
        hidden = inputs.clone().requires_grad_()
        weight = torch.eye(inputs.size(1), dtype=inputs.dtype).chunk(dist.get_world_size())[
            dist.get_rank()
        ]
        logprobs, _ = linear_logprobs(
            hidden, weight, targets, dist.group.WORLD, vocab_size, temperature, chunk_tokens=4
        )
        (logprobs * torch.arange(1.0, targets.numel() + 1)).sum().backward()
        results[name] = (logprobs.detach(), hidden.grad)
    return results


def scenario_drawn(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """A step of several microbatches, with tokens drawn from sets, and their log-probs."""
    trainer = make(scenario, plain_adam(lr=0.0))
    trainer.load_hf(scenario["model"])
    poison_padding(trainer)
    trainer.hold_reference()
    trainer.max_tokens = 48
    drawn = drawn_from_sets(sequences(trainer.spec.vocab_size), trainer.spec.vocab_size)
    logprobs = {
        model: logprob_rows(trainer, drawn, model=model, temperature=TEMPERATURE)
        for model in ("policy", "reference")
    }
    return {"step": one_step(trainer, drawn), "logprobs": logprobs}


def scenario_ratios(scenario: dict[str, Any], out: Path) -> list[list[list[float]]]:
    """Log-probs of an engine's samples, over the sets from which they were drawn and over the whole
    vocabulary.
    """
    trainer = make(scenario, plain_adam(lr=0.0))
    drawn = pickle.loads(Path(scenario["sequences"]).read_bytes())
    trainer.load_hf(scenario["model"])
    trainer.max_tokens = 200
    without_sets = [msgspec.structs.replace(sequence, kept=None) for sequence in drawn]
    return [
        logprob_rows(trainer, batch, temperature=scenario["temperature"])
        for batch in (drawn, without_sets)
    ]


def scenario_parts(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Log-probs of an engine's samples: with the trainer's experts, with the engine's experts, and
    with the engine's expert weights too. Also the share of replaced choices, and the mean
    difference of the weights that both sides gave the same experts.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    trainer = make(scenario, plain_adam(lr=0.0))
    sampled = pickle.loads(Path(scenario["sequences"]).read_bytes())
    trainer.load_hf(scenario["model"])
    now: dict[str, Any] = {}
    differences: list[torch.Tensor] = []

    def weights(
        router: Any, _: Any, output: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not now:
            return None
        probs, routing_map = output
        layer = router.layer_number - 1
        ids, engine_weights = (
            torch.from_numpy(now[name][: len(probs), layer]) for name in ("ids", "weights")
        )
        assert (routing_map.gather(1, ids)).all()
        differences.append((probs.gather(1, ids) - engine_weights).abs().flatten())
        replayed = torch.zeros_like(probs).scatter(1, ids, engine_weights.to(probs.dtype))
        return (replayed if now["replayed"] else probs), routing_map

    for module in trainer.chunks[0].modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(weights)
    sequences = [sequence for sequence, _ in sampled]
    own_logprobs = logprob_rows(
        trainer, [msgspec.structs.replace(sequence, routing=b"") for sequence in sequences]
    )
    trainer.replay.reset()
    results: dict[str, Any] = {"own": own_logprobs, "ids": [], "ids and weights": []}
    for name, replayed in (("ids", False), ("ids and weights", True)):
        for sequence, of_engine in sampled:
            now |= {
                "ids": trainer.routing.unpack(sequence.routing).astype("int64"),
                "weights": of_engine,
                "replayed": replayed,
            }
            results[name] += logprob_rows(trainer, [sequence])
        if not replayed:
            positions = sum(len(sequence) - 1 for sequence in sequences)
            results |= {
                "replaced": trainer.replay.metrics(positions, trainer.device)[
                    "router/replaced_fraction"
                ]
            }
            results |= {"weights": torch.cat(differences).mean().item()}
    return results


def scenario_settings_on_gpus(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Megatron's configuration with CUDA, in a process of its own that pretends to have it."""
    from megarl.trainer.model import transformer_config

    torch.cuda.is_available = lambda: True
    spec = load_spec(scenario["model"])
    topologies = {vpp: TrainerTopology(pp=2, vpp=vpp) for vpp in (1, 2)}
    return {
        vpp: vars(transformer_config(spec, topology, torch.bfloat16, TrainerConfig(recompute=True)))
        for vpp, topology in topologies.items()
    }


def scenario_megatron_settings(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """The values of `trainer.megatron`, `trainer.ddp` and `trainer.optimizer.megatron` in
    Megatron's own objects.
    """
    from megarl.trainer.model import transformer_config

    optimizer = OptimizerConfig(megatron=scenario["optimizer"])
    trainer = make(
        {**scenario, "trainer": {**scenario["trainer"], "optimizer": optimizer}}, optimizer
    )
    trainer.load_hf(scenario["model"])
    one_step(trainer, sequences(trainer.spec.vocab_size))
    flash = transformer_config(
        trainer.spec,
        trainer.topology,
        trainer.dtype,
        TrainerConfig(megatron={"attention_backend": "flash"}),
    )
    objects = (
        trainer.ddp[0].config,
        trainer.ddp[0].ddp_config,
        trainer.optimizer.chained_optimizers[0].config,
    )
    settings = (scenario["trainer"]["megatron"], scenario["trainer"]["ddp"], scenario["optimizer"])
    values = [
        {name: getattr(holder, name) for name in names}
        for holder, names in zip(objects, settings, strict=True)
    ]
    return {"held": values, "backend": flash.attention_backend.name}
