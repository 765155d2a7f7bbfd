"""Functions that the transport tests run on ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moe_lab.config import MoEConfig, ParallelConfig
from moe_lab.model import MoELayer
from moe_lab.model.experts import Experts
from moe_lab.model.init import initialize
from moe_lab.parallel import Mesh, world
from moe_lab.parallel.expert import AllToAllTransport

D = 12


def whole_layer(config: MoEConfig, bias: list[float]) -> MoELayer:
    """The layer with all its experts, as on one process."""
    layer = MoELayer(config, D).double()
    initialize(layer, 0.3, seed=5)
    layer.router.selection_bias.copy_(torch.tensor(bias))
    return layer


def tokens_of(rank: int, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's input rows ``[1, T, D]`` and the gradient of its output."""
    generator = torch.Generator().manual_seed(rank)
    shape = (1, tokens[rank], D)
    return torch.randn(shape, dtype=torch.float64, generator=generator), torch.randn(
        shape, dtype=torch.float64, generator=generator
    )


def compare_with_local(experts: int, top_k: int, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """For each case the largest difference, over outputs and all gradients, between this transport and one process.

    A case: ``tokens`` by rank and the router's selection ``bias``. Expert gradients are summed over all ranks' tokens.
    """
    rank, ranks = world()
    config = MoEConfig(
        n_experts=experts,
        top_k=top_k,
        expert_hidden=10,
        shared_hidden=6,
        selection_bias=True,
        balance_loss=0.1,
    )
    mesh = Mesh(ParallelConfig(ep=ranks, transport="all_to_all"))
    local = experts // ranks
    mine = slice(rank * local, (rank + 1) * local)
    worst = []
    for case in cases:
        reference = whole_layer(config, case["bias"])
        outputs, inputs = [], []
        for other in range(ranks):
            x, upstream = tokens_of(other, case["tokens"])
            x.requires_grad_()
            y = reference(x) if x.numel() else x * 1.0
            (y * upstream).sum().backward()
            outputs.append(y.detach())
            inputs.append(x.grad)
        layer = whole_layer(config, case["bias"])
        layer.experts = Experts(local, D, config.expert_hidden, first=rank * local).double()
        initialize(layer, 0.3, seed=5)
        layer.router.selection_bias.copy_(torch.tensor(case["bias"]))
        layer.transport = AllToAllTransport(mesh.ep, experts)
        x, upstream = tokens_of(rank, case["tokens"])
        x.requires_grad_()
        y = layer(x)
        (y * upstream).sum().backward()
        router = layer.router.weight.grad.clone()
        dist.all_reduce(router)
        pairs = [
            (y, outputs[rank]), (x.grad, inputs[rank]), (router, reference.router.weight.grad),
            (layer.experts.gate_up.grad, reference.experts.gate_up.grad[mine]),
            (layer.experts.down.grad, reference.experts.down.grad[mine]),
        ]  # fmt: skip
        worst.append(max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in pairs))
    return {"worst": worst}
