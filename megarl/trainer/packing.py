"""How a microbatch tells Megatron, and the attention of `layers`, where its sequences begin and end."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megarl.trainer.layer_spec import layer_spec
from megarl.trainer.microbatch import MicroBatch


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's own parameters, and the same on the host: reading `cu_seqlens_q` would wait for a GPU. (Transformer Engine is given the
    fields of the parent alone.)"""

    boundaries: tuple[int, ...] = ()
    runs: tuple[tuple[int, int], ...] = ()  # (how many, of what length): sequences of equal length that stand side by side


def packed_sequences(microbatch: MicroBatch, cp: int) -> PackedSequences:
    lengths = microbatch.plan.lengths
    # Without Transformer Engine only Megatron's rotary embedding reads them, on the host: twice in every layer it would wait for the GPU.
    boundaries = microbatch.boundaries if layer_spec() == "te" else torch.tensor(microbatch.plan.boundaries, dtype=torch.int32)
    # (The greatest length must be exact. Where a table of rotary angles is as long as the whole row, Megatron takes it for one that goes on
    # from sequence to sequence.)
    # Transformer Engine asks for padded boundaries where it cuts sequences. They are the same: padding is part of sequences, and there is
    # none between them. If it were not told so, it would compare them, and wait for the GPU, in every layer.
    padded = boundaries if cp > 1 else None
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=padded,  # type: ignore[arg-type]
        cu_seqlens_kv_padded=padded,  # type: ignore[arg-type]
        pad_between_seqs=False,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        boundaries=microbatch.plan.boundaries,
        runs=tuple((len(list(same)), length) for length, same in groupby(lengths)),
    )
