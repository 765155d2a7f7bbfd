"""The language model: embedding, blocks, head. Lesson: 01_moe_layer."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moe_lab.config import ModelConfig
from moe_lab.model.attention import Context
from moe_lab.model.block import Block
from moe_lab.model.experts import Experts
from moe_lab.model.init import initialize
from moe_lab.model.layers import Embedding, Linear, RMSNorm
from moe_lab.model.moe import MoELayer
from moe_lab.ops.linear import linear


class Transformer(nn.Module):
    """Decoder-only language model after ``config``.

    ``embedding.weight [V, D]``, ``blocks.<i>...``, ``norm.weight [D]``, ``head.weight [V, D]`` (absent when tied).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.d_model)
        self.embedding_norm = RMSNorm(config.d_model, config.norm_eps) if config.embed_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        if not config.tie_embeddings:
            self.head = Linear(config.d_model, config.vocab_size)
        else:
            self.embedding.weight.gradient_uses = 2  # type: ignore[attr-defined] # backward adds to it at both ends

    def forward(
        self, tokens_BS: Tensor, documents_BS: Tensor | None = None, aux_weight: float = 1.0
    ) -> Tensor:
        """Logits ``[B, S, V]`` for ``tokens_BS [B, S]`` int64.

        ``documents_BS``: document number of each position, to keep attention inside documents. ``aux_weight``: factor
        on the auxiliary losses of this microbatch (its share of the step's tokens); they enter through backward.
        """
        x_BSD = self.embed(tokens_BS)
        context = Context.make(x_BSD, self.config.attention, documents_BS, aux_weight)
        for block in self.blocks:
            x_BSD = block(x_BSD, context)
        return self.logits(x_BSD)

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """Token ids to hidden states, ``[B, S] -> [B, S, D]``."""
        x_BSD = self.embedding(tokens_BS)
        if self.config.embed_scale:
            x_BSD = x_BSD * math.sqrt(self.config.d_model)
        return self.embedding_norm(x_BSD)

    def logits(self, x_BSD: Tensor) -> Tensor:
        """Hidden states to logits, ``[B, S, D] -> [B, S, V]``."""
        weight = self.embedding.weight if self.config.tie_embeddings else self.head.weight
        return linear(self.norm(x_BSD), weight)

    def moe_layers(self) -> Iterator[tuple[int, MoELayer]]:
        """(layer index, MoE layer) of every block that holds experts."""
        for index, block in enumerate(self.blocks):
            if isinstance(block.ffn, MoELayer):
                yield index, block.ffn


def build(
    config: ModelConfig,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    initial: bool = True,
    expert_rank: int = 0,
    expert_ranks: int = 1,
) -> Transformer:
    """The model with its initial weights, made in place on ``device``.

    ``device="meta"`` builds the module tree without memory, for any size. ``initial=False`` leaves weights unset, for
    those who fill them from a file. Of ``expert_ranks`` that share the experts of each layer, ``expert_rank`` holds the
    neighbouring ones from ``expert_rank * E / expert_ranks`` on, with the weights they have on one process.
    """
    with torch.device("meta"):
        model = Transformer(config)
        for _, layer in model.moe_layers():
            local = layer.config.n_experts // expert_ranks
            layer.experts = Experts(
                local, config.d_model, layer.config.expert_hidden, first=expert_rank * local
            )
    for parameter in model.parameters():  # buffers, the selection bias, stay fp32
        parameter.data = parameter.data.to(dtype)
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    if initial:
        initialize(model, config.init_std, config.init_seed)
    return model
