"""The trainer's reference: Hugging Face's model in float64, one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from trainer_rig import DENOMINATOR, TEMPERATURE, drawn_from_sets, sequences, with_random_experts

from megarl.base.geometry import TrainerTopology
from megarl.base.rollout_types import TrainSequence
from megarl.generator import cpu_support
from megarl.models.registry import load_spec
from megarl.models.routing import RoutingFormat
from megarl.models.spec import ModelSpec
from megarl.reshard.layout import hf_layout, trainer_layout

cpu_support.install()  # transformers imports torchvision, which needs it without CUDA
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402
from transformers.models.qwen3_5 import modeling_qwen3_5  # noqa: E402
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe  # noqa: E402
from transformers.models.qwen3_next import modeling_qwen3_next  # noqa: E402


@cache
def reference(folder: Path, weights: torch.dtype = torch.float32) -> dict[str, Any]:
    """Hugging Face's model in float64: log-probs at the temperature, loss, gradients by autograd of
    the written-out sum.

    `weights`: the precision to which the weights are rounded first.
    """
    model = load_float64(folder, weights)
    batch = sequences(model.config.vocab_size)
    loss, logprobs = hf_loss(model, batch, TEMPERATURE)
    loss.backward()
    return {
        "logprobs": logprobs,
        "loss": loss.item(),
        "entropy": hf_entropy(model, batch, TEMPERATURE),
        "grads": checkpoint_tensors(
            folder, {name: parameter.grad for name, parameter in model.named_parameters()}
        ),
        "logits": model(tokens_of(batch[0])).logits.detach(),
        "weights": sum(sum(s.advantages.tolist()) for s in batch),
        "tokens": sum(sum(s.loss_mask.tolist()) for s in batch),
    }


def tokens_of(sequence: TrainSequence) -> torch.Tensor:
    return torch.from_numpy(sequence.token_ids)[None].long()  # [1, L]


def load_float64(folder: Path, weights: torch.dtype = torch.float32) -> PreTrainedModel:
    for module in (modeling_qwen3_next, modeling_qwen3_5, modeling_qwen3_5_moe):
        module.torch_chunk_gated_delta_rule = delta_rule_in_float64
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=weights, attn_implementation="eager", experts_implementation="eager"
    ).double()


def delta_rule_in_float64(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule token by token, [1, t, heads, …].

    Hugging Face's own code always computes in float32.
    """
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    state = value.new_zeros(1, value.size(2), key.size(-1), value.size(-1))
    outs = []
    for q, k, v, decay, strength in zip(
        *(x.unbind(1) for x in (query, key, value, g.to(value.dtype).exp(), beta))
    ):
        state = state * decay[..., None, None]
        missing = v - (state * k[..., None]).sum(-2)
        state = state + k[..., None] * (strength[..., None] * missing)[..., None, :]
        outs.append((state * q[..., None]).sum(-2) * key.size(-1) ** -0.5)
    return torch.stack(outs, dim=1), state


@cache
def drawn_reference(folder: Path) -> dict[str, Any]:
    """Like `reference`, for the batch whose tokens were drawn from sets."""
    model = load_float64(folder)
    batch = drawn_from_sets(sequences(model.config.vocab_size), model.config.vocab_size)
    loss, logprobs = hf_loss(model, batch, TEMPERATURE)
    loss.backward()
    return {
        "logprobs": [
            [x if m else 0.0 for x, m in zip(row, sequence.loss_mask)]
            for row, sequence in zip(logprobs, batch)
        ],
        "loss": loss.item(),
        "entropy": hf_entropy(model, batch, TEMPERATURE),
        "grads": checkpoint_tensors(
            folder, {name: parameter.grad for name, parameter in model.named_parameters()}
        ),
    }


def log_softmax(
    model: PreTrainedModel, sequence: TrainSequence, temperature: float
) -> torch.Tensor:
    """[L - 1, vocabulary], over the sets if there are any. -1e9 stands for minus infinity, whose
    product with 0 is NaN.
    """
    logits = model(tokens_of(sequence)).logits[0, :-1] / temperature
    if sequence.kept is not None:
        sizes = torch.from_numpy(sequence.kept.counts.astype("int64"))
        inside = (sizes == 0)[:, None].repeat(1, logits.size(1))
        inside[
            torch.arange(len(sizes)).repeat_interleave(sizes),
            torch.from_numpy(sequence.kept.ids()).long(),
        ] = True
        logits = logits.masked_fill(~inside[1:], -1e9)
    return logits.log_softmax(dim=-1)


@cache
def replayed_reference(folder: Path) -> dict[str, Any]:
    """Like `reference`, for the batch with forced experts.

    Also returns the share of forced choices that differ from the model's own.
    """
    model = load_float64(folder)
    routing = RoutingFormat.of(load_spec(folder))
    batch = with_random_experts(sequences(model.config.vocab_size), routing)
    force, replaced = force_experts(model, routing)
    loss, logprobs = hf_loss(model, batch, TEMPERATURE, force)
    loss.backward()
    choices = routing.shape[0] * sum(len(sequence.token_ids) - 1 for sequence in batch)
    return {
        "logprobs": logprobs,
        "loss": loss.item(),
        "grads": checkpoint_tensors(
            folder, {name: parameter.grad for name, parameter in model.named_parameters()}
        ),
        "routing": {
            "router/replayed_fraction": len(replaced) / choices,
            "router/replaced_fraction": sum(replaced) / len(replaced),
        },
    }


def force_experts(
    model: PreTrainedModel, routing: RoutingFormat
) -> tuple[Callable[[TrainSequence], None], list[bool]]:
    """Returns a function to call before each sequence, and for each forced choice whether the
    model's own differed. Scores and weights are computed by this file's own code.
    """
    config = model.config
    current = {}
    replaced = []

    def choose(layer: int, router_choice: torch.Tensor) -> torch.Tensor:
        ids = router_choice.clone()
        replayed = current["ids"][:, layer]
        ids[: len(replayed)] = replayed
        replaced.extend(
            set(a) != set(b)
            for a, b in zip(replayed.tolist(), router_choice[: len(replayed)].tolist())
        )
        return ids

    def softmax_gate(
        layer: int, gate: torch.nn.Module, original: Callable[..., Any], x: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        logits = F.linear(x.reshape(-1, x.size(-1)), gate.weight, getattr(gate, "bias", None))
        ids = choose(layer, original(x)[2])
        weights = logits.softmax(dim=-1).gather(1, ids)
        normalized = getattr(config, "norm_topk_prob", True)  # Mixtral always does
        return logits, weights / weights.sum(dim=-1, keepdim=True) if normalized else weights, ids

    def sigmoid_gate(
        layer: int, original: Callable[..., Any], x: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        logits, _, ids = original(x)
        ids = choose(layer, ids)
        weights = logits.sigmoid().gather(1, ids)
        return (
            logits,
            weights / weights.sum(dim=-1, keepdim=True) * config.routed_scaling_factor,
            ids,
        )

    gates = [
        getattr(layer.mlp, "gate", getattr(layer.mlp, "router", None))
        for layer in model.model.layers
    ]
    for number, gate in enumerate(gate for gate in gates if gate is not None):
        if hasattr(gate, "e_score_correction_bias"):
            gate.forward = partial(sigmoid_gate, number, gate.forward)
        else:
            gate.forward = partial(softmax_gate, number, gate, gate.forward)

    def force(sequence: TrainSequence) -> None:
        current["ids"] = torch.from_numpy(routing.unpack(sequence.routing).astype("int64"))

    return force, replaced


def hf_loss(
    model: PreTrainedModel,
    batch: list[TrainSequence],
    temperature: float,
    before: Callable[[TrainSequence], None] = lambda sequence: None,
) -> tuple[torch.Tensor, list[list[float]]]:
    """(loss by the written-out formula, log-prob of every token), one sequence at a time, without
    padding or microbatches.
    """
    loss = torch.zeros((), dtype=torch.float64)
    logprobs = []
    for sequence in batch:
        before(sequence)
        tokens = tokens_of(sequence)
        token_logprobs = log_softmax(model, sequence, temperature).gather(-1, tokens[0, 1:, None])[
            :, 0
        ]
        weights = torch.tensor(sequence.advantages, dtype=torch.float64) * torch.tensor(
            sequence.loss_mask
        )
        loss = loss - (weights[1:] * token_logprobs).sum() / DENOMINATOR
        logprobs.append([0.0, *token_logprobs.tolist()])
    return loss, logprobs


@torch.no_grad()
def hf_entropy(model: PreTrainedModel, batch: list[TrainSequence], temperature: float) -> float:
    """Mean over the unmasked tokens."""
    entropies = []
    for sequence in batch:
        scores = log_softmax(model, sequence, temperature)
        entropies.append(
            -(scores.exp() * scores).sum(dim=-1)[
                torch.tensor(sequence.loss_mask[1:], dtype=torch.bool)
            ]
        )
    return torch.cat(entropies).mean().item()


FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def checkpoint_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors by logical names.

    Transformers stacks the experts of a layer, [expert, gate and up, hidden], and renames
    Mixtral's. Phi has one tensor for q, k and v, and one for gate and up. gpt-oss transposes its
    experts.
    """
    spec = load_spec(folder)
    names = {t.name for t in hf_layout(spec, "float32").tensors(0) if is_trained(t.name)}
    block = "mlp"
    gate = "gate_proj"
    up = "up_proj"
    down = "down_proj"
    if any("block_sparse_moe" in name for name in names):
        block = "block_sparse_moe"
        gate = "w1"
        up = "w3"
        down = "w2"
    stored = {}
    for name, tensor in tensors.items():
        layer, experts, kind = name.partition(".mlp.experts.")
        module, _, fused = name.removesuffix("_proj.weight").rpartition(".")
        if fused in FUSED:
            kv_rows = spec.num_kv_heads * spec.head_dim
            rows = (
                tensor.split([len(tensor) - 2 * kv_rows, kv_rows, kv_rows])
                if fused == "qkv"
                else tensor.chunk(2)
            )
            stored |= {
                f"{module}.{part}_proj.weight": values
                for part, values in zip(FUSED[fused], rows, strict=True)
            }
            continue
        if not experts:
            stored[name.replace(".mlp.gate.weight", f".{block}.gate.weight")] = tensor
            continue
        for expert, rows in enumerate(tensor):
            if spec.family == "gpt_oss":
                stored[f"{layer}.mlp.experts.{expert}.{kind}"] = (
                    rows.t() if rows.dim() == 2 else rows
                )
                continue
            parts = (
                {gate: rows.chunk(2)[0], up: rows.chunk(2)[1]}
                if kind == "gate_up_proj"
                else {down: rows}
            )
            stored |= {
                f"{layer}.{block}.experts.{expert}.{part}.weight": values
                for part, values in parts.items()
            }
    assert stored.keys() == names
    return stored


def is_trained(name: str) -> bool:
    """False only for the biases of DeepSeek's routers, which have no gradient."""
    return not name.endswith(("e_score_correction_bias", "expert_bias"))


def hf_gradients(
    folder: Path,
    topology: TrainerTopology,
    ranks: list[dict[str, torch.Tensor]],
    spec: ModelSpec | None = None,
) -> dict[str, torch.Tensor]:
    """The ranks' gradients as tensors of the HF model.

    Padding must be exactly 0; copies must agree.
    """
    spec = spec or load_spec(folder)
    trained = [t for t in hf_layout(spec, "float32").tensors(0) if is_trained(t.name)]
    full_gradients = {t.name: torch.full(t.shape, torch.nan, dtype=torch.float64) for t in trained}
    for rank, grads in enumerate(ranks):
        for tensor in (
            t for t in trainer_layout(spec, topology, "float32").tensors(rank) if is_trained(t.name)
        ):
            unread = grads[tensor.name].clone()
            for piece in tensor.pieces:
                local = grads[tensor.name][piece.local.slices()].double()
                target = full_gradients[piece.logical_name][piece.logical.slices()]
                filled = ~local.isnan() & ~target.isnan()
                torch.testing.assert_close(local[filled], target[filled], rtol=1e-5, atol=1e-6)
                target[~local.isnan()] = local[~local.isnan()]
                unread[piece.local.slices()] = 0.0
            assert (unread.isnan() | (unread == 0)).all(), f"{tensor.name}: gradient on padding"
    return full_gradients


def assert_same_gradients(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 5e-6
) -> None:
    scale = max(grad.abs().max().item() for grad in expected.values())
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        error = (actual[name] - grad).abs().max().item()
        assert error <= tolerance * scale, (
            f"{name}: gradient off by {error:.2e}, largest gradient {scale:.2e}"
        )


def logprob_inputs() -> dict[str, tuple[torch.Tensor, torch.Tensor, int, float]]:
    """name -> (logits [15, padded vocabulary], targets, vocabulary size, temperature)."""
    generator = torch.Generator().manual_seed(5)

    def case(
        vocab_size: int,
        padded: int,
        temperature: float = 1.0,
        scale: float = 3.0,
        dtype: torch.dtype = torch.float32,
    ) -> Any:
        logits = torch.randn(15, padded, generator=generator) * scale
        logits[..., vocab_size:] = 1e4
        return (
            logits.to(dtype),
            torch.randint(0, vocab_size, (15,), generator=generator),
            vocab_size,
            temperature,
        )

    return {
        "whole": case(16, 16),
        "hot": case(16, 16, temperature=2.5),
        "cold": case(16, 16, temperature=0.3),
        "padded": case(13, 16),
        "last_rank_all_padding": case(5, 16),
        "extreme": case(16, 16, scale=1e3),
        "bf16": case(13, 16, dtype=torch.bfloat16),
    }


LOGPROBS = logprob_inputs()
