"""Every transport against one process: outputs and every gradient, for even, skewed, one-sided and empty loads."""

from __future__ import annotations

import pytest
import transport_targets

from moe_lab import launch
from moe_lab.errors import ConfigError
from moe_lab.parallel.expert import AllToAllTransport
from moe_lab.parallel.mesh import Group


def cases(experts: int, ranks: int) -> list[dict]:
    even = [0.0] * experts
    skewed = [0.3 - 0.05 * e for e in range(experts)]
    one_takes_all = [9.0] + [0.0] * (experts - 1)
    last_two = [0.0] * (experts - 2) + [9.0, 9.0]
    full, uneven, empty = [7] * ranks, [3 + 2 * r for r in range(ranks)], [5] * (ranks - 1) + [0]
    return [
        {"bias": b, "tokens": t}
        for b, t in [(even, full), (skewed, uneven), (one_takes_all, full), (last_two, uneven), (even, empty)]
    ]


@pytest.mark.parametrize(
    ("ranks", "experts", "top_k"),
    [(2, 6, 2), (4, 8, 3), (2, 40, 2), pytest.param(8, 8, 2, marks=pytest.mark.slow)],
)
def test_all_to_all_equals_one_process(ranks: int, experts: int, top_k: int) -> None:
    arguments = {"experts": experts, "top_k": top_k, "cases": cases(experts, ranks)}
    results = launch.run(
        transport_targets.compare_with_local, ranks=ranks, timeout_s=120, show=False, **arguments
    )
    for rank, result in enumerate(results):
        assert max(result["worst"]) < 1e-12, (rank, result["worst"])


def test_experts_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="degree 4 does not divide 6 experts"):
        AllToAllTransport(Group(None, 4, 0), 6)
