"""Checks for lessons: is a hand-written version the same as the package's, and does the reader's solution work?

``same`` compares two results and stops the notebook where they part. Each ``check_x(my_function)`` runs the reader's
solution of an exercise against the package over several configurations, prints each configuration before its result,
says what differs, and never stops the notebook. An exercise that still raises a bare ``NotImplementedError`` counts as
not attempted. Lesson by lesson: 00_start_here has ``check_active_parameters`` and ``check_learning_rate``, 01_moe_layer has ``check_top_k_route``, ``check_permute_rows``,
``check_merge_weights`` and ``check_balance_loss``, 04_data_parallel has ``check_ring_all_reduce``,
``check_shard_bounds`` and ``check_bytes_per_parameter``.
"""

from moe_lab.checks.compare import difference, explain, same
from moe_lab.checks.exercise import run_exercise
from moe_lab.checks.moe_layer import (
    check_balance_loss,
    check_merge_weights,
    check_permute_rows,
    check_top_k_route,
)
from moe_lab.checks.parallel import (
    check_bytes_per_parameter,
    check_ring_all_reduce,
    check_shard_bounds,
)
from moe_lab.checks.training import check_active_parameters, check_learning_rate

__all__ = [
    "check_active_parameters",
    "check_balance_loss",
    "check_bytes_per_parameter",
    "check_learning_rate",
    "check_merge_weights",
    "check_permute_rows",
    "check_ring_all_reduce",
    "check_shard_bounds",
    "check_top_k_route",
    "difference",
    "explain",
    "run_exercise",
    "same",
]
