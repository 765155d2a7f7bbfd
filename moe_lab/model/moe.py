"""The mixture-of-experts layer: router, transport, experts, shared expert, merge, auxiliary losses. Lesson: 01_moe_layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_lab.config import MoEConfig
from moe_lab.model.attention import Context
from moe_lab.model.dispatch import ExpertTransport, LocalTransport, Routing
from moe_lab.model.experts import Experts
from moe_lab.model.layers import MLP
from moe_lab.model.router import Router
from moe_lab.routing.balance import balance_loss, router_z_loss


class _InjectLoss(torch.autograd.Function):
    """Identity on x; in backward the loss gets gradient 1, as if it had been added to the training loss.

    So an auxiliary loss needs no way out of the model: it works the same under accumulation, recompute and pipelines.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = (loss.shape, loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.like
        return grad, torch.ones(shape, dtype=dtype, device=device)


def inject_loss(x: Tensor, loss: Tensor) -> Tensor:
    """``x`` unchanged, with ``loss`` (a scalar) added to whatever is differentiated through it."""
    return _InjectLoss.apply(x, loss)


class RoutingStats:
    """Sums over the microbatches since the last :meth:`clear`, on the device: what metrics are made of.

    ``counts [E]`` int64 requested slots; ``balance`` and ``z``: unweighted auxiliary losses; ``microbatches``.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start again from nothing."""
        self.counts: Tensor | None = None
        self.balance: Tensor | None = None
        self.z: Tensor | None = None
        self.microbatches = 0

    def add(self, requested: Tensor, balance: Tensor, z: Tensor) -> None:
        """Add one microbatch."""
        counts, balance, z = requested.long(), balance.detach(), z.detach()
        self.counts = counts if self.counts is None else self.counts + counts
        self.balance = balance if self.balance is None else self.balance + balance
        self.z = z if self.z is None else self.z + z
        self.microbatches += 1


class MoELayer(nn.Module):
    """y_t = sum_k r_{t,k} f_{e(t,k)}(x_t) + s g(x_t): K of E routed experts f and an optional shared expert g.

    Parameters: ``router.weight [E, D]``, ``experts.gate_up [E, 2F, D]``, ``experts.down [E, D, F]``,
    ``shared.gate_up.weight [2F_s, D]``, ``shared.down.weight [D, F_s]``. ``stats`` adds up
    over a step's microbatches (training only); a forward hook on ``router`` sees every :class:`Routing`.
    """

    def __init__(self, config: MoEConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config, d_model)
        self.experts = Experts(config.n_experts, d_model, config.expert_hidden)
        self.shared = MLP(d_model, config.shared_hidden) if config.shared_hidden else None
        _, self.shared_scale = config.merge_coefficients()
        self.transport: ExpertTransport = LocalTransport()
        self.stats = RoutingStats()

    def forward(self, x_BSD: Tensor, context: Context | None = None) -> Tensor:
        """``[B, S, D] -> [B, S, D]``."""
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        routing = self.router(x_TD)
        y_TD = self.transport(x_TD, routing, self.experts)
        if self.shared is not None:
            shared = self.shared(x_TD)
            y_TD = y_TD + (shared if self.shared_scale == 1.0 else shared * self.shared_scale)
        y_BSD = y_TD.view(x_BSD.shape)
        if self.training and torch.is_grad_enabled():
            y_BSD = self._auxiliary(y_BSD, routing, 1.0 if context is None else context.aux_weight)
        return y_BSD

    def _auxiliary(self, y_BSD: Tensor, routing: Routing, weight: float) -> Tensor:
        config = self.config
        batch, length, _ = y_BSD.shape
        if batch * length == 0:  # a rank without tokens takes part all the same
            balance = z = routing.scores.sum()
        else:
            counts_BE = torch.zeros(batch, config.n_experts, dtype=torch.int64, device=y_BSD.device)
            slots = routing.indices.view(batch, -1).long()
            counts_BE.scatter_add_(1, slots, torch.ones_like(slots))
            scores_BSE = routing.scores.view(batch, length, config.n_experts)
            balance = balance_loss(scores_BSE, counts_BE, config.top_k, config.balance_scope)
            z = router_z_loss(routing.logits)
        self.stats.add(routing.requested, balance, z)
        if config.balance_loss == 0 and config.router_z_loss == 0:
            return y_BSD
        return inject_loss(y_BSD, weight * (config.balance_loss * balance + config.router_z_loss * z))
