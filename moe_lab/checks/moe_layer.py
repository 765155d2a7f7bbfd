"""The exercises of lesson 01_moe_layer, checked against the package's router, transport, merge rules and balance loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_lab.checks.compare import explain
from moe_lab.checks.exercise import Case, run_exercise
from moe_lab.config import Merge, MoEConfig
from moe_lab.model.dispatch import LocalTransport, Routing
from moe_lab.model.router import Router
from moe_lab.routing.balance import balance_loss

TOLERANCE = 1e-5


def _router(n_experts: int, top_k: int) -> Router:
    """A router that takes logits for tokens: its weight is the identity, its weights sum to 1."""
    config = MoEConfig(n_experts=n_experts, top_k=top_k, expert_hidden=1, merge="unit_sum")
    router = Router(config, n_experts)
    with torch.no_grad():
        router.weight.copy_(torch.eye(n_experts))
    return router


def _pair(value: object, names: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"the function must return the pair ({names}), but returned {type(value).__name__}")
    return value


def check_top_k_route(function: Callable[[Tensor, int], tuple[Tensor, Tensor]]) -> bool:
    """``function(logits [T, E], top_k) -> (indices [T, K], weights [T, K])``: top-k of a softmax, weights that sum to 1.

    The K experts of a token may come in any order. Returns True if all configurations agree.
    """

    def compare(tokens: int, n_experts: int, top_k: int, centre: int) -> str | None:
        rng = torch.Generator().manual_seed(tokens)
        logits_TE = centre + torch.randn(tokens, n_experts, generator=rng)
        with torch.no_grad():
            wanted = _router(n_experts, top_k)(logits_TE)
        indices, weights = _pair(function(logits_TE.clone(), top_k), "indices, weights")
        for name, tensor in (("indices", indices), ("weights", weights)):
            if not isinstance(tensor, Tensor) or tensor.shape != (tokens, top_k):
                return explain(name, tensor, wanted.weights, TOLERANCE)
        order, expected_order = indices.argsort(-1), wanted.indices.argsort(-1)
        mine_TK, expected_TK = indices.gather(1, order), wanted.indices.gather(1, expected_order)
        for token, (mine, expected) in enumerate(zip(mine_TK.tolist(), expected_TK.tolist())):
            if mine != expected:
                return f"token {token} goes to experts {mine}, but its {top_k} highest scores are those of {expected}"
        return explain(
            "weights", weights.gather(1, order), wanted.weights.gather(1, expected_order), TOLERANCE
        )

    def cases() -> Iterator[Case]:
        for tokens, n_experts, top_k, centre in ((5, 4, 1, 0), (7, 8, 2, 0), (3, 6, 6, 0), (6, 8, 2, 500)):
            label = f"tokens {tokens}, experts {n_experts}, top-k {top_k}, logits around {centre}"
            yield label, partial(compare, tokens, n_experts, top_k, centre)

    return run_exercise("top_k_route", cases())


def check_permute_rows(function: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]) -> bool:
    """``function(x [T, D], indices [T, K], n_experts) -> (rows [T K, D], offsets [E])``: rows by expert, then by token.

    ``offsets[e]`` is where the run of expert e ends. Returns True if all configurations agree.
    """

    def compare(indices_TK: Tensor, n_experts: int) -> str | None:
        tokens, top_k = indices_TK.shape
        # The first column names the token, so that a wrong row can be named in words.
        x_TD = torch.arange(tokens, dtype=torch.float32).unsqueeze(1) + torch.tensor([0.0, 0.25, 0.5])
        counts = torch.bincount(indices_TK.flatten(), minlength=n_experts)
        blank = torch.ones(tokens, top_k)
        routing = Routing(indices_TK, blank, blank, blank, requested=counts, kept=counts)
        wanted = LocalTransport().dispatch(x_TD, routing)
        rows, offsets = _pair(function(x_TD.clone(), indices_TK.clone(), n_experts), "rows, offsets")
        problem = explain("offsets", offsets, wanted.offsets, 0.0)
        if problem:
            return problem
        if isinstance(rows, Tensor) and rows.shape == wanted.rows.shape:
            for row, (mine, expected) in enumerate(zip(rows[:, 0].tolist(), wanted.rows[:, 0].tolist())):
                if mine != expected:
                    expert = int((offsets <= row).sum())
                    return (
                        f"row {row} is in the run of expert {expert} and must hold token {expected:.0f}, but holds "
                        f"token {mine:g}"
                    )
        return explain("rows", rows, wanted.rows, 0.0)

    def cases() -> Iterator[Case]:
        rng = torch.Generator().manual_seed(3)
        for tokens, n_experts, top_k in ((6, 3, 2), (9, 4, 1), (40, 8, 3)):
            scores = torch.rand(tokens, n_experts, generator=rng)
            indices_TK = scores.topk(top_k).indices
            label = f"tokens {tokens}, experts {n_experts}, top-k {top_k}"
            yield label, partial(compare, indices_TK, n_experts)
        alone = torch.full((5, 1), 2)
        yield "tokens 5, experts 4, top-k 1, all to expert 2", partial(compare, alone, 4)

    return run_exercise("permute_rows", cases())


def check_merge_weights(function: Callable[[Tensor, int, int, str], tuple[Tensor, float]]) -> bool:
    """``function(p [T, K], expert_hidden, shared_hidden, rule) -> (r [T, K], s)`` for the four rules of ``MoEConfig.merge``.

    ``p`` sums to 1 for each token. Returns True if all configurations agree.
    """

    def compare(top_k: int, expert_hidden: int, shared_hidden: int, rule: Merge) -> str | None:
        rng = torch.Generator().manual_seed(top_k)
        p_TK = torch.rand(4, top_k, generator=rng)
        p_TK = p_TK / p_TK.sum(-1, keepdim=True)
        config = MoEConfig(
            n_experts=64, top_k=top_k, expert_hidden=expert_hidden, shared_hidden=shared_hidden, merge=rule
        )
        routed, shared = config.merge_coefficients()
        r, s = _pair(function(p_TK.clone(), expert_hidden, shared_hidden, rule), "r, s")
        problem = explain("r", r, routed * p_TK, TOLERANCE)
        return problem or explain("s", torch.as_tensor(s), torch.tensor(shared), TOLERANCE)

    def cases() -> Iterator[Case]:
        rules: tuple[Merge, ...] = ("olmo", "unit_sum", "equal_mass", "width_proportional")
        for rule in rules:
            for top_k, expert_hidden, shared_hidden in ((2, 128, 128), (4, 2560, 1280)):
                label = f"top-k {top_k}, expert width {expert_hidden}, shared width {shared_hidden}, {rule}"
                yield label, partial(compare, top_k, expert_hidden, shared_hidden, rule)

    return run_exercise("merge_weights", cases())


def check_balance_loss(function: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """``function(scores [T, E], indices [T, K]) -> scalar``: N sum_i f_i P_i over all tokens, gradient through P alone.

    Value and gradient are compared. Returns True if all configurations agree.
    """

    def compare(logits_TE: Tensor, indices_TK: Tensor) -> str | None:
        n_experts, top_k = logits_TE.shape[1], indices_TK.shape[1]
        counts = torch.bincount(indices_TK.flatten(), minlength=n_experts)
        reference_logits = logits_TE.clone().requires_grad_()
        wanted = balance_loss(reference_logits.softmax(-1).unsqueeze(0), counts.unsqueeze(0), top_k)
        (wanted_gradient,) = torch.autograd.grad(wanted, reference_logits)
        logits = logits_TE.clone().requires_grad_()
        loss = function(logits.softmax(-1), indices_TK.clone())
        problem = explain("the loss", loss, wanted, TOLERANCE)
        if problem and isinstance(loss, Tensor) and loss.shape == () and top_k > 1:
            ratio = float(loss.detach() / wanted.detach())
            if abs(ratio - top_k) < 1e-3:
                problem += f": it is K = {top_k} times too large, so f does not sum to 1"
        if problem:
            return problem
        if not loss.requires_grad:
            return "the loss carries no gradient: P must be computed from the scores with autograd on"
        (gradient,) = torch.autograd.grad(loss, logits)
        return explain("the gradient of the logits", gradient, wanted_gradient, TOLERANCE)

    def cases() -> Iterator[Case]:
        rng = torch.Generator().manual_seed(5)
        for tokens, n_experts, top_k, size in (
            (16, 4, 1, 1.0),
            (64, 8, 2, 1.0),
            (64, 8, 2, 6.0),
            (10, 5, 4, 1.0),
        ):
            logits = size * torch.randn(tokens, n_experts, generator=rng)
            label = f"tokens {tokens}, experts {n_experts}, top-k {top_k}, logits of size {size:g}"
            yield label, partial(compare, logits, logits.topk(top_k).indices)
        collapsed = torch.tensor([[0.0, 2.0, 0.0, 0.0]]).repeat(12, 1)
        indices = collapsed.topk(1).indices
        yield "tokens 12, experts 4, top-k 1, all to expert 1", partial(compare, collapsed, indices)

    return run_exercise("balance_loss", cases())
