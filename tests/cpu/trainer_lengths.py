"""A property test of the trainer over the lengths of sequences.

It runs in the trainer's ranks, against Hugging Face's model in float64, one sequence at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_reference import checkpoint_tensors, hf_loss, is_trained, load_float64
from trainer_rig import TEMPERATURE, all_logprobs, make, one_step, plain_adam, sequences

from megarl.base.rollout_types import TrainSequence


def any_lengths(scenario: dict[str, Any]) -> dict[str, float]:
    """Batches of any lengths with microbatches of any size, or batches of `lengths` only.

    Returns the worst errors, which are the same on all ranks. "gradient" is in units of its bound:
    1e-6 relative, or twice the float32 error of Hugging Face's own model, if that is larger (1.6e-6
    for some batches of DeepSeek-V3).
    """
    trainer = make(scenario, plain_adam(lr=0.0))
    model = load_float64(Path(scenario["model"]))
    rounded = load_float64(Path(scenario["model"])).float()
    trainer.load_hf(scenario["model"])
    worst = {"loss": 0.0, "logprobs": 0.0, "gradient": 0.0}

    def check(lengths: list[int], max_tokens: int, seed: int) -> None:
        batch = sequences(trainer.spec.vocab_size, lengths, seed)
        trainer.max_tokens = max_tokens
        loss, logprobs = backward(model, batch)
        backward(rounded, batch)
        named = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in model.named_parameters()
        }
        expected = checkpoint_tensors(Path(scenario["model"]), named)
        step = one_step(trainer, batch)
        squares = torch.zeros(2, dtype=torch.float64)
        for tensor in (t for t in trainer.layout.tensors(dist.get_rank()) if is_trained(t.name)):
            for piece in tensor.pieces:
                want = expected[piece.logical_name][piece.logical.slices()]
                grad = step["grads"][tensor.name][piece.local.slices()].double()
                owned = ~grad.isnan()  # otherwise another rank has the sum
                squares += torch.stack(
                    [(grad - want)[owned].square().sum(), want[owned].square().sum()]
                )
        dist.all_reduce(squares)
        scored = all_logprobs(trainer, batch, temperature=TEMPERATURE)
        errors = {
            "loss": abs(step["loss"] - loss.item()) / max(1.0, abs(loss.item())),
            "logprobs": max(
                abs(a - b)
                for actual, expected_row in zip(scored, logprobs, strict=True)
                for a, b in zip(actual, expected_row, strict=True)
            ),
            "gradient": (squares[0] / squares[1].clamp(min=1e-12)).sqrt().item()
            / max(1e-6, 2 * difference(rounded, model)),
        }
        for kind, error in errors.items():
            worst[kind] = max(worst[kind], error)
        assert errors["loss"] < 1e-6 and errors["logprobs"] < 1e-5 and errors["gradient"] < 1, (
            errors,
            lengths,
        )

    if "lengths" in scenario:
        check(scenario["lengths"], scenario["max_tokens"], 0)
        return worst
    drawn = given(
        st.lists(st.integers(1, 40), min_size=1, max_size=9),
        st.integers(1, 100),
        st.integers(0, 99),
    )(check)
    # all ranks draw the same
    settings(max_examples=scenario["examples"], deadline=None, derandomize=True, database=None)(
        drawn
    )()
    return worst


def backward(model: Any, batch: list[TrainSequence]) -> tuple[torch.Tensor, list[list[float]]]:
    """Returns loss and log-probs; gradients are left in the parameters."""
    model.zero_grad()
    loss, logprobs = hf_loss(model, batch, TEMPERATURE)
    if any(len(sequence) > 1 for sequence in batch):
        loss.backward()
    return loss, logprobs


def difference(rounded: Any, model: Any) -> float:
    """The difference of two models' gradients, relative to the second's."""
    squares = [0.0, 0.0]
    for (_, actual), (_, exact) in zip(
        rounded.named_parameters(), model.named_parameters(), strict=True
    ):
        if exact.grad is not None and actual.grad is not None:
            squares[0] += (actual.grad.double() - exact.grad).square().sum().item()
            squares[1] += exact.grad.square().sum().item()
    return (squares[0] / max(squares[1], 1e-12)) ** 0.5
