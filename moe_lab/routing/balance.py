"""Balance of routed work: losses that push towards it and numbers that describe it.

Notation (technical report, section 10): T tokens, N experts, K choices a token, counts C_i (their sum is K T), hard
share f_i = C_i / (K T), soft share P_i = mean_t p_{t,i} of the scores normalised over experts.
Lesson: 02_routing_and_balance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_lab.errors import RoutingError


def normalized_scores(scores: Tensor) -> Tensor:
    """Scores that sum to 1 over the last dimension; a softmax already does, sigmoid scores are divided by their sum."""
    return scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)


def balance_loss(scores_BSE: Tensor, counts_BE: Tensor, top_k: int, scope: str = "microbatch") -> Tensor:
    """N sum_i f_i P_i, the load-balancing loss; 1 when balanced, though not bounded by 1 from below.

    ``scores_BSE [B, S, E]``: scores over all experts; ``counts_BE [B, E]``: routed slots by sequence, which carry no
    gradient, so only P learns. ``scope`` "microbatch": f and P over all B S tokens (the "local batch" of Olmo-core);
    "sequence": for each sequence, then averaged over sequences. Report eq. 30; Switch Transformer, arXiv 2101.03961.
    Hugging Face's OLMoE and Mixtral leave f undivided by K, so theirs is K times this and K at balance.
    """
    n_experts = scores_BSE.shape[-1]
    soft_BE = normalized_scores(scores_BSE).mean(1)
    hard_BE = counts_BE.detach().to(soft_BE.dtype) / (top_k * scores_BSE.shape[1])
    if scope == "microbatch":
        return n_experts * (hard_BE.mean(0) * soft_BE.mean(0)).sum()
    return n_experts * (hard_BE * soft_BE).sum(-1).mean()


def router_z_loss(logits_TE: Tensor) -> Tensor:
    """mean_t logsumexp(logits_t)^2: keeps router logits small (ST-MoE, arXiv 2202.08906)."""
    return logits_TE.logsumexp(-1).square().mean()


def load_balancing_score(probs: Tensor, indices: Tensor) -> float:
    """N sum_i f_i P_i over the tokens given: ``probs [T, N]`` scores, ``indices [T, K]`` chosen experts. 1 when balanced."""
    if probs.dim() != 2 or indices.dim() != 2 or probs.shape[0] != indices.shape[0]:
        raise RoutingError(
            f"scores {tuple(probs.shape)} and indices {tuple(indices.shape)} must be [T, N] and [T, K] of the same T"
        )
    n_experts = probs.shape[1]
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < n_experts:
        raise RoutingError(
            f"an expert index lies outside 0 to {n_experts - 1}: from {int(indices.min())} to {int(indices.max())}"
        )
    counts = torch.bincount(indices.reshape(-1).long(), minlength=n_experts)
    return float(balance_loss(probs.unsqueeze(0), counts.unsqueeze(0), indices.shape[1]))


@dataclass(frozen=True)
class Balance:
    """Numbers that describe how evenly counts are spread, from :func:`metrics`; each docstring line gives its balanced value.

    ``max_over_mean`` (1): largest load over the mean, Olmo-core's "load imbalance". ``maxvio`` (0): max/mean - 1.
    ``avgvio`` (0): mean |load/mean - 1|. ``cv`` (0): population standard deviation over mean. ``gini`` (0 to (N-1)/N).
    ``entropy`` (1): -sum f ln f / ln N. ``effective_experts`` (N): exp(-sum f ln f). ``dead``: experts with no load.
    ``straggler`` (1): sum over the leading dimensions of the largest rank load, over the sum of the mean rank load: the
    factor by which the slowest rank stretches the experts' time at this EP degree.
    """

    max_over_mean: float
    maxvio: float
    avgvio: float
    cv: float
    gini: float
    entropy: float
    effective_experts: float
    dead: int
    straggler: float


def metrics(counts: Tensor, ep: int = 1) -> Balance:
    """Balance of ``counts [..., N]`` summed over the leading dimensions; ``straggler`` keeps them (microbatches) apart.

    ``ep``: expert-parallel degree, ranks holding neighbouring experts. Raises :class:`RoutingError` for negative counts,
    no routed slot at all, or an ``ep`` that does not divide N.
    """
    counts = torch.as_tensor(counts).double()
    n_experts = counts.shape[-1]
    if n_experts % ep:
        raise RoutingError(f"{n_experts} experts cannot be spread over {ep} ranks evenly")
    if not torch.isfinite(counts).all() or bool((counts < 0).any()) or counts.sum() <= 0:
        raise RoutingError(
            f"counts must be finite, not negative and not all zero, but range from {counts.min():g} to {counts.max():g}"
        )
    load = counts.reshape(-1, n_experts).sum(0)
    relative = load / load.mean()
    share = load / load.sum()
    entropy = -(torch.special.xlogy(share, share)).sum()
    ordered = load.sort().values
    rank = torch.arange(1, n_experts + 1, dtype=torch.double)
    gini = 2 * (rank * ordered).sum() / (n_experts * load.sum()) - (n_experts + 1) / n_experts
    ranks = counts.reshape(-1, ep, n_experts // ep).sum(-1)
    return Balance(
        max_over_mean=float(relative.max()),
        maxvio=float(relative.max() - 1),
        avgvio=float((relative - 1).abs().mean()),
        cv=float(load.std(correction=0) / load.mean()),
        gini=float(gini),
        entropy=float(entropy / torch.log(torch.tensor(float(n_experts)))) if n_experts > 1 else 1.0,
        effective_experts=float(entropy.exp()),
        dead=int((load == 0).sum()),
        straggler=float(ranks.amax(-1).sum() / ranks.mean(-1).sum()),
    )
