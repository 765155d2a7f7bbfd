"""Simulated ranks: the collectives' results, the ring's bytes, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lab import sim
from moe_lab.errors import ConfigError

RANKS = st.integers(1, 9)
SEEDS = st.integers(0, 2**16)


def held(ranks: int, rows: int, seed: int) -> list[torch.Tensor]:
    """Whole numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-9, 9, (rows, 3), generator=generator).double() for _ in range(ranks)]


@settings(max_examples=40, deadline=None)
@given(ranks=RANKS, each=st.integers(1, 4), seed=SEEDS)
def test_collectives_and_rings_agree_and_leave_their_input(ranks: int, each: int, seed: int) -> None:
    tensors = held(ranks, ranks * each, seed)
    before = [t.clone() for t in tensors]
    total = torch.stack(tensors).sum(0)
    wire = sim.Wire(ranks)
    for results in (sim.all_reduce(tensors), sim.ring_all_reduce(tensors, wire)):
        assert all(torch.equal(r, total) for r in results)
        assert len({r.data_ptr() for r in results}) == ranks  # memory of its own
    shards = sim.reduce_scatter(tensors)
    assert torch.equal(torch.cat(shards), total)
    for rank, shard in enumerate(sim.ring_reduce_scatter(tensors, sim.Wire(ranks))):
        assert torch.equal(shard, shards[rank])
    for gathered in (sim.all_gather(shards), sim.ring_all_gather(shards, sim.Wire(ranks))):
        assert all(torch.equal(g, total) for g in gathered)
    assert all(torch.equal(b, tensors[-1]) for b in sim.broadcast(tensors, ranks - 1))
    assert all(torch.equal(a, b) for a, b in zip(before, tensors))

    payload = tensors[0].numel() * 8
    for rank in range(ranks):
        assert wire.sent(rank) == wire.received(rank) == 2 * payload * (ranks - 1) // ranks
    assert all(t.target == (t.source + 1) % ranks for t in wire.transfers)


@settings(max_examples=30, deadline=None)
@given(ranks=RANKS, seed=SEEDS)
def test_all_to_all_twice_is_where_it_began(ranks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (ranks, ranks), generator=generator).tolist()
    parts = [
        [torch.full((n,), float(ranks * s + t)) for t, n in enumerate(row)] for s, row in enumerate(lengths)
    ]
    arrived = sim.all_to_all(parts)
    for target, row in enumerate(arrived):
        for source, part in enumerate(row):
            assert torch.equal(part, parts[source][target])
    back = sim.all_to_all(arrived)
    assert all(torch.equal(a, b) for x, y in zip(back, parts) for a, b in zip(x, y))


def test_ring_states_count_how_many_ranks_are_in_a_chunk() -> None:
    n = 4
    states = list(sim.ring_states([torch.ones(n) for _ in range(n)], sim.Wire(n)))
    counts = [[[int(c) for c in row] for row in state] for state in states]
    assert len(counts) == 1 + 2 * (n - 1)
    assert counts[0] == [[1] * n] * n
    assert [counts[n - 1][r][r] for r in range(n)] == [n] * n  # reduce-scattered: rank r owns chunk r
    assert counts[-1] == [[n] * n] * n
    assert sum(c == n for row in counts[n - 1] for c in row) == n


def test_groups_reduce_apart() -> None:
    tensors = [torch.tensor([float(10**r)]) for r in range(4)]
    results = sim.in_groups(sim.all_reduce, tensors, [[0, 2], [3, 1]])
    assert [r.item() for r in results] == [101, 1010, 101, 1010]
    shards = sim.in_groups(sim.reduce_scatter, [torch.arange(2.0) + r for r in range(4)], [[0, 1], [2, 3]])
    assert [s.tolist() for s in shards] == [[1.0], [3.0], [5.0], [7.0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sim.all_reduce([]), "at least 1 rank"),
        (lambda: sim.all_reduce([torch.zeros(2), torch.zeros(3)]), r"rank 1 holds \(3,\)"),
        (lambda: sim.all_reduce([torch.zeros(2), torch.zeros(2).double()]), "rank 1 holds .*float64"),
        (lambda: sim.reduce_scatter([torch.zeros(3)] * 2), "2 ranks do not divide the 3 rows"),
        (lambda: sim.ring_all_reduce([torch.zeros(3)] * 2, sim.Wire(2)), "2 ranks do not divide the 3 rows"),
        (lambda: sim.broadcast([torch.zeros(1)], 1), "source is rank 1, but the ranks are 0 to 0"),
        (lambda: sim.all_to_all([[torch.zeros(1)]] * 2), "rank 0 has parts for 1 ranks, but there are 2"),
        (
            lambda: sim.in_groups(sim.all_reduce, [torch.zeros(1)] * 3, [[0, 1]]),
            "each of 3 ranks exactly once",
        ),
        (lambda: sim.Wire(2).send(1, 1, torch.zeros(1)), "rank 1 cannot send to rank 1"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(call, message) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
