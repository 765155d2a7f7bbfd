"""One transformer block: attention and a feed-forward part, with norms before, after or on both sides. Lesson: 01_moe_layer."""

from __future__ import annotations

from torch import Tensor, nn

from moe_lab.config import ModelConfig
from moe_lab.model.attention import Attention, Context
from moe_lab.model.layers import MLP, RMSNorm
from moe_lab.model.moe import MoELayer


class Block(nn.Module):
    """x + after(attention(before(x))), then the same with the feed-forward part.

    "pre" has only the norms before, "post" only those after (both branches normed before the residual is added),
    "peri" both (Kim et al. 2025, arXiv 2502.02732). The feed-forward part is an MLP in the configured dense layers.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        d_model, eps = config.d_model, config.norm_eps
        before, after = config.norm_placement != "post", config.norm_placement != "pre"
        self.attention_norm = RMSNorm(d_model, eps) if before else nn.Identity()
        self.attention = Attention(config.attention, d_model, eps, layer)
        self.attention_out_norm = RMSNorm(d_model, eps) if after else nn.Identity()
        self.ffn_norm = RMSNorm(d_model, eps) if before else nn.Identity()
        self.ffn: MLP | MoELayer
        if layer in config.dense_layers:
            self.ffn = MLP(d_model, config.dense_hidden)
        else:
            assert config.moe is not None
            self.ffn = MoELayer(config.moe, d_model)
        self.ffn_out_norm = RMSNorm(d_model, eps) if after else nn.Identity()

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        """``[B, S, D] -> [B, S, D]``."""
        x_BSD = x_BSD + self.attention_out_norm(self.attention(self.attention_norm(x_BSD), context))
        h_BSD = self.ffn_norm(x_BSD)
        y_BSD = self.ffn(h_BSD, context) if isinstance(self.ffn, MoELayer) else self.ffn(h_BSD)
        return x_BSD + self.ffn_out_norm(y_BSD)
