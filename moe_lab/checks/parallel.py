"""The exercises of lesson 04_data_parallel, checked against the simulated ring, the real buckets and the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from moe_lab import presets
from moe_lab.checks.compare import explain
from moe_lab.checks.exercise import Case, run_exercise
from moe_lab.config import ModelConfig
from moe_lab.parallel.buckets import build_buckets
from moe_lab.parallel.mesh import Group
from moe_lab.plan import count_parameters, holdings
from moe_lab.sim import Wire, all_reduce


def check_ring_all_reduce(function: Callable[[list[Tensor], Wire], Sequence[Tensor]]) -> bool:
    """``function(tensors, wire) -> sums``: what every rank holds after an all-reduce, sent through ``wire`` around a ring.

    ``tensors``: one a rank, alike, their first dimension a multiple of the ranks. Only ``wire.send(source, target, part)``
    crosses ranks, only to the right neighbour, and each rank sends 2 (n - 1) / n of its tensor.
    """

    def compare(ranks: int, rows: int) -> str | None:
        rng = torch.Generator().manual_seed(ranks)
        tensors = [torch.randint(-99, 99, (rows,), generator=rng).float() for _ in range(ranks)]
        wanted, wire = all_reduce(tensors), Wire(ranks)
        results = function([t.clone() for t in tensors], wire)
        if not isinstance(results, (list, tuple)) or len(results) != ranks:
            return f"the function must return a list of {ranks} tensors, one a rank"
        for rank, result in enumerate(results):
            if problem := explain(f"what rank {rank} holds", result, wanted[rank], 0.0):
                return problem
        for t in wire.transfers:
            if t.target != (t.source + 1) % ranks:
                return f"rank {t.source} sent to rank {t.target}, but its right neighbour is rank {(t.source + 1) % ranks}"
        expected = 2 * (ranks - 1) * rows * 4 // ranks
        for rank in range(ranks):
            if wire.sent(rank) != expected:
                return f"rank {rank} sent {wire.sent(rank):,} bytes, but a ring sends {expected:,}"
        return None

    def cases() -> Iterator[Case]:
        for ranks, rows in ((2, 4), (3, 12), (4, 4), (8, 40)):
            yield f"ranks {ranks}, rows {rows}", partial(compare, ranks, rows)

    return run_exercise("ring_all_reduce", cases())


def check_shard_bounds(function: Callable[[list[int], int, int], tuple[int, int]]) -> bool:
    """``function(sizes, ranks, rank) -> (start, stop)``: the shard of ``rank`` in a flat bucket of parameters of those sizes.

    Compared with the bucket that the reducer makes of such parameters.
    """

    def compare(sizes: list[int], ranks: int) -> str | None:
        for rank in range(ranks):
            group = Group(None, ranks, rank)
            named = [(f"p{i}", nn.Parameter(torch.zeros(size))) for i, size in enumerate(sizes)]
            (bucket,) = build_buckets(named, lambda _, g=group: ("dense", g), lambda _: True, 2**40, True)  # type: ignore[misc]
            wanted = (bucket.shard.start, bucket.shard.stop)
            mine = function(list(sizes), ranks, rank)
            if not isinstance(mine, tuple) or len(mine) != 2:
                return "the function must return the pair (start, stop)"
            if tuple(mine) != wanted:
                return (
                    f"rank {rank} owns {mine[0]}:{mine[1]}, but must own {wanted[0]}:{wanted[1]} "
                    f"of the {bucket.size:,} elements of the padded bucket"
                )
        return None

    def cases() -> Iterator[Case]:
        for sizes, ranks in (
            ([256], 4),
            ([100, 7], 2),
            ([1], 1),
            ([64, 65, 4096], 7),
            ([1000, 1000, 1000], 13),
        ):
            yield f"parameters of {sizes}, ranks {ranks}", partial(compare, sizes, ranks)

    return run_exercise("shard_bounds", cases())


def check_bytes_per_parameter(function: Callable[[int, int], tuple[float, float]]) -> bool:
    """``function(dp, ep) -> (dense, expert)``: bytes of training state on one rank, for each parameter of the whole model.

    bf16 weights, fp32 gradients, fp32 master and two moments, these three sharded over the parameter's own replicas;
    experts are spread over ``ep`` ranks. Compared with the planner's account of a dense and of an MoE model.
    """

    def compare(dp: int, ep: int) -> str | None:
        dense, expert = function(dp, ep)
        models: list[tuple[str, ModelConfig, int]] = [
            ("dense-8l", presets.get("dense-8l").model, 1),
            ("bench-8l", presets.get("bench-8l").model, ep),
        ]
        for name, model, degree in models:
            counts = count_parameters(model)
            wanted = holdings(model, dp, ep=degree)[0].state
            mine = dense * (counts.total - counts.routed) + expert * counts.routed
            if abs(mine - wanted) > 1e-6 * wanted:
                kind = "dense" if counts.routed == 0 else "expert"
                return (
                    f"with {dense:g} and {expert:g} bytes a parameter, {name} needs {mine / 2**30:.2f} GiB a rank, but it needs "
                    f"{wanted / 2**30:.2f}: look at the {kind} parameters"
                )
        return None

    def cases() -> Iterator[Case]:
        for dp, ep in ((1, 1), (8, 1), (8, 8), (128, 8), (64, 4)):
            yield f"dp {dp}, ep {ep}", partial(compare, dp, ep)

    return run_exercise("bytes_per_parameter", cases())
