"""The interface of algorithms: advantages from rewards, and a loss from log-probs. They are pure functions on tensors."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from megarl.algorithms.advantages import GroupLoss
from megarl.critic.losses import Gae
from megarl.teachers.loss import Taught


class LossOutput(NamedTuple):
    """A loss as a sum, so that it adds up over microbatches and ranks; the caller divides by the mini-batch's denominator."""

    loss: Tensor  # scalar, sum over the unmasked tokens or over the sequences, to be minimised
    sums: dict[str, Tensor]  # detached scalars, each a sum over the unmasked tokens; "tokens" counts them


class Microbatch(Protocol):
    """The tensors that a loss reads beside the log-probs: t tokens of n sequences, end to end.

    Values where `loss_mask` is False are arbitrary.
    """

    @property
    def boundaries(self) -> Tensor: ...  # [n + 1] int32: where sequences begin and end

    @property
    def loss_mask(self) -> Tensor: ...  # [t] bool

    @property
    def mu_logprobs(self) -> Tensor: ...  # [t] behaviour policy, as sampled

    @property
    def advantages(self) -> Tensor: ...  # [t]

    @property
    def reference_logprobs(self) -> Tensor | None: ...  # [t] frozen reference, if the algorithm needs one

    @property
    def entropy(self) -> Tensor | None: ...  # [t] of the distributions that the tokens were chosen from, in nats, with its gradient

    @property
    def old_values(self) -> Tensor | None: ...  # [t] of a critic: the values that the batch began with

    @property
    def returns(self) -> Tensor | None: ...  # [t] of a critic: what its values are to become

    @property
    def proximal_logprobs(self) -> Tensor | None: ...  # [t] the weights that the batch began with; None: the current ones

    @property
    def teachers(self) -> tuple[Taught, ...]: ...  # the numbers of each teacher; none without distillation


class Algorithm(Protocol):
    """A training objective with its settings."""

    @property
    def needs_reference(self) -> bool:
        """Whether `loss` reads `microbatch.reference_logprobs`."""
        ...

    @property
    def needs_proximal(self) -> bool:
        """Whether `loss` reads `microbatch.proximal_logprobs`."""
        ...

    @property
    def group_loss(self) -> GroupLoss | None:
        """What turns advantages into the weights of responses before each optimizer step; None: advantages are these weights."""
        ...

    @property
    def gae(self) -> Gae | None:
        """How a critic's values become the advantages of tokens; None: there is no critic."""
        ...

    def penalties(self, policy: Tensor, reference: Tensor) -> Tensor:
        """[t] of `penalty`, token by token."""
        ...

    @property
    def penalizes_rewards(self) -> bool:
        """Whether `penalty` is taken off each response's reward before advantages are formed. It needs reference log-probs."""
        ...

    def penalty(self, policy: Tensor, reference: Tensor) -> float:
        """[t], from the log-probs [t] of a response's tokens under the policy that the batch began with, and under the reference."""
        ...

    @property
    def skip_zero(self) -> bool:
        """Whether samples of zero advantage have no gradient, so that they may be left out of training."""
        ...

    def advantages(self, rewards: Tensor) -> Tensor:
        """Advantages [G, n] of n samples for each of G prompts, from their rewards [G, n]."""
        ...

    def loss(self, logprobs: Tensor, microbatch: Microbatch) -> LossOutput:
        """Loss of one microbatch from the trainer's log-probs [t] of its tokens."""
        ...

    def denominator(self, tokens: int, samples: int) -> float:
        """What the sum of a mini-batch's losses is divided by. `tokens`: those by the policy; `samples`: without branches."""
        ...

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """A step's metrics, from the losses' sums over the global batch in all its optimizer steps."""
        ...
