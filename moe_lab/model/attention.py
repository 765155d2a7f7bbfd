"""Causal grouped-query attention with QK-norm, rotary positions, optional window and gate. Lesson: 01_moe_layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_lab.config import AttentionConfig
from moe_lab.model.layers import Linear, RMSNorm, rope_tables, rotate


@dataclass
class Context:
    """What all blocks of one forward pass share.

    ``rope``: cos and sin tables. ``documents_BS``: document number of each position (negative: padding), or None when
    each sequence is one document. ``aux_weight``: what the
    auxiliary losses of this microbatch are multiplied by, its share of the step's tokens. ``masks``: attention masks by
    window size, made once.
    """

    rope: tuple[Tensor, Tensor]
    documents_BS: Tensor | None
    aux_weight: float
    masks: dict[int, Tensor | None]

    @classmethod
    def make(
        cls, x_BSD: Tensor, config: AttentionConfig, documents_BS: Tensor | None, aux_weight: float
    ) -> Context:
        """The context for hidden states ``[B, S, D]``."""
        rope = rope_tables(x_BSD.shape[1], config.head_dim, config.rope_theta, x_BSD.device, x_BSD.dtype)
        return cls(rope, documents_BS, aux_weight, {})

    def mask(self, window: int, length: int, device: torch.device) -> Tensor | None:
        """Boolean mask, true where a query may look: ``[S, S]`` or ``[B, 1, S, S]``; None for plain causal attention."""
        if window not in self.masks:
            self.masks[window] = self._make_mask(window, length, device)
        return self.masks[window]

    def _make_mask(self, window: int, length: int, device: torch.device) -> Tensor | None:
        if self.documents_BS is None and (window == 0 or window >= length):
            return None
        position = torch.arange(length, device=device)
        distance = position[:, None] - position[None, :]
        allowed = distance >= 0
        if window:
            allowed = allowed & (distance < window)
        if self.documents_BS is None:
            return allowed
        same = self.documents_BS[:, :, None] == self.documents_BS[:, None, :]
        return (allowed & same)[:, None]


class Attention(nn.Module):
    """Self-attention of one block.

    ``qkv [(H + 2 H_kv) C, D]`` holds the query, key and value maps one after the other, ``out [D, H C]``; with
    ``gate``, ``gate [H C, D]``. QK-norm gains: ``[C]`` for "head", ``[H C]`` and ``[H_kv C]`` for "full".
    """

    def __init__(self, config: AttentionConfig, d_model: int, eps: float, layer: int) -> None:
        super().__init__()
        self.config = config
        full = layer in config.full_layers
        self.window = 0 if full else config.window
        self.use_rope = config.rope_in_full_layers or not full
        self.widths = (
            config.n_heads * config.head_dim,
            config.n_kv_heads * config.head_dim,
            config.n_kv_heads * config.head_dim,
        )
        self.qkv = Linear(d_model, sum(self.widths))
        self.out = Linear(self.widths[0], d_model)
        if config.gate:
            self.gate = Linear(d_model, self.widths[0])
        if config.qk_norm != "none":
            per_head = config.qk_norm == "head"
            self.q_norm = RMSNorm(config.head_dim if per_head else self.widths[0], eps)
            self.k_norm = RMSNorm(config.head_dim if per_head else self.widths[1], eps)

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        """``[B, S, D] -> [B, S, D]``."""
        batch, length, _ = x_BSD.shape
        config = self.config
        q, k, v = self.qkv(x_BSD).split(self.widths, dim=-1)
        if config.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.view(batch, length, -1, config.head_dim).transpose(1, 2) for t in (q, k, v))
        if config.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.use_rope:
            q, k = rotate(q, context.rope), rotate(k, context.rope)
        mask = context.mask(self.window, length, x_BSD.device)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=config.n_heads != config.n_kv_heads
        )
        y = y.transpose(1, 2).reshape(batch, length, -1)
        if config.gate:
            y = y * torch.sigmoid(self.gate(x_BSD))
        return self.out(y)
