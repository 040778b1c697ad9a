"""The layer for multi-token prediction on the last pipeline stage, and its training in addition to
the policy's (models/multi_token.py).

It learns the tokens of the loss by their log-probs, each from the hidden states two tokens before.
Its gradient ends at this layer, does not reach hidden states, embedding and output layer, and is
clipped separately. So the policy's steps are the same with and without it. A factor for its loss
would have no effect, since Adam's steps do not depend on it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
    get_mtp_layer_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.models.spec import ModelSpec
from megarl.trainer import layers
from megarl.trainer.cpu_support import layer_spec
from megarl.trainer.fully_sharded import gathered
from megarl.trainer.layers import RMSNorm, packed_sequences
from megarl.trainer.microbatch import MicroBatch
from megarl.trainer.parallel import context_group, pipeline_group

OWN_NORM = "mtp"  # Megatron clips gradients of such parameters by their own norm (optimizer.py:152)


def build_layer(
    config: TransformerConfig, decoder_layer: ModuleSpec, stage: int | None, trained: bool
) -> MultiTokenPredictionLayer:
    """The layer, without weights, around a decoder layer with the spec `decoder_layer`."""
    layer_config = copy.copy(config)
    layer_config.mtp_num_layers = 1  # without it the layer has no decoder layer
    if layer_spec() == "te":
        specified = get_mtp_layer_spec(decoder_layer, use_transformer_engine=True)
    else:
        norm: Any = RMSNorm  # a class, as in model.py
        parts = MultiTokenPredictionLayerSubmodules(
            norm, norm, norm, eh_proj=ColumnParallelLinear, mtp_model_layer=decoder_layer
        )
        specified = ModuleSpec(MultiTokenPredictionLayer, submodules=parts)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer: Any = build_module(
        specified, config=layer_config, layer_number=1, vp_stage=stage, pg_collection=groups
    )
    for parameter in layer.parameters():
        parameter.requires_grad_(trained)
        parameter.grad_norm_group = OWN_NORM
    return layer


class MultiToken:
    """The layer of the chunk that ends the model."""

    def __init__(
        self, spec: ModelSpec, config: TransformerConfig, chunk: GPTModel, vocab_rows: int
    ):
        self.spec = spec
        self.config = config
        self.chunk = chunk
        # (Megatron's schedules would look into `mtp`, a block of its own)
        layer: Any = chunk.mtp_layer
        self.layer: MultiTokenPredictionLayer = layer
        if chunk.pre_process:
            self.embedding: Any = chunk.embedding
        else:
            self.embedding = _frozen_embedding(config, vocab_rows)

    def hidden(self, microbatch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's hidden states.

        They have the shape of the model's, `hidden`: [1, t / cp, h], or [1, t / cp / tp, h] under
        sequence parallelism.
        """
        packed = packed_sequences(microbatch, self.config.context_parallel_size)
        following = layers.cut(microbatch.targets, microbatch.plan.boundaries, context_group())[
            None
        ]
        output = self.layer.forward_single_position(
            hidden_states=hidden.detach().transpose(0, 1).contiguous(),
            next_token_ids=following,
            position_ids=None,  # type: ignore[arg-type]  # only for learned positions
            embedding=self._embed,
            rotary_pos_emb=self._rotary(packed.max_seqlen_q),
            packed_seq_params=packed,
        )
        return output.transpose(0, 1)

    @torch.no_grad()
    def _embed(self, **ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(**ids)

    def _rotary(self, length: Any) -> torch.Tensor | None:
        """Like GPTModel's. Latent attention makes its own."""
        if self.spec.attention.OWN_ROPE:
            return None
        rotary: Any = self.chunk.rotary_pos_emb
        embedding = rotary(length, packed_seq=True)
        if isinstance(embedding, tuple):
            return embedding[0]
        return embedding


def _frozen_embedding(config: TransformerConfig, rows: int) -> LanguageModelEmbedding:
    embedding = LanguageModelEmbedding(
        config, rows, max_sequence_length=0, position_embedding_type="rope"
    )
    return embedding.requires_grad_(False).to(
        "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    )


def bring_embedding(first: GPTModel, head: MultiToken | None) -> None:
    """Gives the embedding of the `first` chunk to the last pipeline stage, which has `head`.

    All stages call it.
    """
    group = pipeline_group()
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return
    if group.rank() == 0:
        with gathered(first):
            dist.send(first.embedding.word_embeddings.weight.data, ranks[-1], group=group)
    elif group.rank() == group.size() - 1:
        assert head is not None
        dist.recv(head.embedding.word_embeddings.weight.data, ranks[0], group=group)
