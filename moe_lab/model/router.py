"""The router: scores every expert for every token and picks K. Lesson: 01_moe_layer.

Scores, top-k and weights are computed in fp32 whatever the model's type (report, section 10; Olmo-core 3.0.0 router v2).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_lab.config import MoEConfig
from moe_lab.model.dispatch import Routing

SIGMOID_EPSILON = 1e-20  # keeps a token whose K scores all underflow from dividing by zero


class Router(nn.Module):
    """Linear scores, gating, top-k, weights. ``weight [E, D]``; ``selection_bias [E]``, a buffer, if configured."""

    selection_bias: Tensor

    def __init__(self, config: MoEConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_experts, d_model))
        self.routed, _ = config.merge_coefficients()
        if config.selection_bias:
            self.register_buffer("selection_bias", torch.zeros(config.n_experts))

    def forward(self, x_TD: Tensor) -> Routing:
        """Route T tokens ``[T, D]``."""
        config = self.config
        precise = torch.promote_types(x_TD.dtype, torch.float32)
        with torch.autocast(x_TD.device.type, enabled=False):
            logits = nn.functional.linear(x_TD.to(precise), self.weight.to(precise))
            if config.gating == "sigmoid":
                scores = torch.sigmoid(logits)
            else:
                scores = torch.softmax(logits, -1)
            # Scores keep the order of the logits, but far apart they saturate and tie; only a bias on scores needs them.
            biased_scores = config.selection_bias and config.gating != "topk_softmax"
            chosen = self._choose(scores if biased_scores else logits)
            if config.gating == "topk_softmax":
                weights = torch.softmax(logits.gather(1, chosen), -1)
            else:
                weights = scores.gather(1, chosen)
                if config.normalize_weights:
                    epsilon = SIGMOID_EPSILON if config.gating == "sigmoid" else 0.0
                    weights = weights / (weights.sum(-1, keepdim=True) + epsilon)
            weights = weights * self.routed
        requested = torch.zeros(config.n_experts, dtype=torch.int32, device=x_TD.device)
        flat = chosen.reshape(-1)
        requested.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        return Routing(chosen.int(), weights, logits, scores, requested, requested)

    @torch.no_grad()
    def _choose(self, preference_TE: Tensor) -> Tensor:
        """``[T, K]`` int64 experts: the K highest preferences, or a benchmark's random or uniform choice."""
        tokens, n_experts = preference_TE.shape
        top_k = self.config.top_k
        if self.config.assignment == "uniform":
            slots = torch.arange(tokens * top_k, device=preference_TE.device) % n_experts
            return slots.view(tokens, top_k)
        if self.config.assignment == "random":
            preference_TE = torch.rand_like(preference_TE)
        elif self.config.selection_bias:
            preference_TE = preference_TE + self.selection_bias
        return torch.topk(preference_TE, top_k, dim=-1).indices
