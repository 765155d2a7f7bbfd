"""Where it is computed: how ranks share the work. Lesson: 04_data_parallel."""

from moe_lab.parallel.data_parallel import sum_gradients, sum_over_ranks, world

__all__ = ["sum_gradients", "sum_over_ranks", "world"]
