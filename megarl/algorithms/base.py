"""The interface of algorithms: advantages from rewards, and a loss from log-probs.

They are pure functions on tensors.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from megarl.algorithms.advantages import Baseline, GroupLoss
from megarl.critic.losses import Gae
from megarl.teachers.loss import TeacherTokens


class LossOutput(NamedTuple):
    """A loss as a sum, which adds up over microbatches and ranks.

    The caller divides it by the mini-batch's denominator.
    """

    loss: Tensor  # scalar to minimise: a sum over the unmasked tokens or over the sequences
    # detached scalars, each a sum over the unmasked tokens; "tokens" counts them
    sums: dict[str, Tensor]


class LossInputs(Protocol):
    """The tensors that a loss reads besides the log-probs: n sequences end to end, t tokens in all.

    Values where `loss_mask` is False are arbitrary.
    """

    @property
    def boundaries(self) -> Tensor: ...  # [n + 1] int32: where sequences begin and end

    @property
    def loss_mask(self) -> Tensor: ...  # [t] bool

    @property
    def mu_logprobs(self) -> Tensor: ...  # [t] log-probs under the behaviour policy, as sampled

    @property
    def advantages(self) -> Tensor: ...  # [t]

    @property
    # [t] log-probs under the frozen reference, if needed
    def reference_logprobs(self) -> Tensor | None: ...

    @property
    # [t] nats, of each token's distribution, differentiable
    def entropy(self) -> Tensor | None: ...

    @property
    def old_values(self) -> Tensor | None: ...  # [t] for a critic: its values when the batch began

    @property
    def returns(self) -> Tensor | None: ...  # [t] for a critic: the targets of its values

    @property
    # [t] under the weights that the batch began with; None: the current ones
    def proximal_logprobs(self) -> Tensor | None: ...

    @property
    # the numbers of each teacher; none without distillation
    def teachers(self) -> tuple[TeacherTokens, ...]: ...


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
        """Turns advantages into weights of responses before each optimizer step; None: advantages
        are used as they are.
        """
        ...

    @property
    def gae(self) -> Gae | None:
        """Turns a critic's values into advantages of tokens; None: there is no critic."""
        ...

    def penalties(self, policy: Tensor, reference: Tensor) -> Tensor:
        """[t] the share of each token in `penalty`. Arguments as there."""
        ...

    @property
    def penalizes_rewards(self) -> bool:
        """Whether `penalty` is subtracted from each response's reward before advantages are
        computed. It needs reference log-probs.
        """
        ...

    def penalty(self, policy: Tensor, reference: Tensor) -> float:
        """The KL penalty of a response, from the log-probs [t] of its tokens under the policy that
        the batch began with and the reference.
        """
        ...

    @property
    def skip_zero(self) -> bool:
        """Whether samples of zero advantage have zero gradient, so that training may leave them
        out.
        """
        ...

    @property
    def baseline(self) -> Baseline:
        """The rule for advantages."""
        ...

    def loss(self, logprobs: Tensor, microbatch: LossInputs) -> LossOutput:
        """Loss of one microbatch from the trainer's log-probs [t] of its tokens."""
        ...

    def denominator(self, tokens: int, samples: int) -> float:
        """The divisor of a mini-batch's summed loss.

        `tokens`: sampled by the policy; `samples`: without branches.
        """
        ...

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """A step's metrics, from `LossOutput.sums` added up over the global batch and all its
        optimizer steps.
        """
        ...
