"""The gated delta rule in chunks, against the rule token by token and against Hugging Face's;
packed sequences against single ones.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F

from megarl.kernels.gated_delta_rule import causal_conv, gated_delta_rule, gated_delta_step, l2norm

LENGTHS = (3, 70, 1, 128, 64)
BOUNDARIES = (0, *accumulate(LENGTHS))
HEADS = 3
KEY = 8
VALUE = 5


@pytest.fixture
def values() -> list[torch.Tensor]:
    """Random q, k, v, g, beta, and the states before each sequence."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    t = BOUNDARIES[-1]
    q, k = (l2norm(random(t, HEADS, KEY)) for _ in "qk")
    tensors = [
        q,
        k,
        random(t, HEADS, VALUE),
        -random(t, HEADS).exp(),
        random(t, HEADS).sigmoid(),
        random(len(LENGTHS), HEADS, KEY, VALUE),
    ]
    return [tensor.requires_grad_() for tensor in tensors]


def test_chunks_of_packed_sequences_are_the_rule_token_by_token(values: list[torch.Tensor]) -> None:
    """Compares outputs, states and gradients in float64."""
    outs = []
    ends = []
    for number, (start, end) in enumerate(pairwise(BOUNDARIES)):
        state = values[-1][number : number + 1]
        for token in range(start, end):
            out, state = gated_delta_step(
                *(tensor[token : token + 1] for tensor in values[:-1]), state
            )
            outs.append(out)
        ends.append(state)
    expected = (torch.cat(outs), torch.cat(ends))
    result = gated_delta_rule(*values[:-1], BOUNDARIES, values[-1])
    for actual, reference in zip(result, expected):
        torch.testing.assert_close(actual, reference, rtol=0, atol=1e-13)
    generator = torch.Generator().manual_seed(1)
    weights = [
        torch.randn(tensor.shape, generator=generator, dtype=torch.float64) for tensor in expected
    ]
    gradients = [
        torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, tensor)), values)
        for tensor in (result, expected)
    ]
    for actual, reference in zip(*gradients):
        torch.testing.assert_close(actual, reference, rtol=0, atol=1e-12)


def test_it_is_hugging_faces_rule(values: list[torch.Tensor]) -> None:
    """Hugging Face computes in float32."""
    from megarl.generator import cpu_support

    cpu_support.install()
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    q, k, v, g, beta, states = (tensor.detach() for tensor in values)
    result, _ = gated_delta_rule(q, k, v, g, beta, BOUNDARIES, states)
    for number, (start, end) in enumerate(pairwise(BOUNDARIES)):
        sequence_inputs = (tensor[None, start:end] for tensor in (q, k, v))
        reference, _ = torch_chunk_gated_delta_rule(
            *sequence_inputs,
            g=g[None, start:end],
            beta=beta[None, start:end],
            initial_state=states[number : number + 1],
        )
        torch.testing.assert_close(result[start:end], reference[0], rtol=0, atol=5e-6)


def test_the_convolution_of_packed_sequences_is_that_of_each() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BOUNDARIES[-1], 6, generator=generator)
    weight = torch.randn(6, 4, generator=generator)
    sequences = [
        F.conv1d(part.T[None], weight[:, None], padding=3, groups=6)[0, :, : len(part)].T
        for part in x.split(LENGTHS)
    ]
    torch.testing.assert_close(
        causal_conv(x, weight, BOUNDARIES), torch.cat(sequences), rtol=0, atol=1e-5
    )
