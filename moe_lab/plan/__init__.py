"""Will it fit, and how fast? Parameters, FLOPs and placement from the configuration alone. Lesson: 09_capacity_planner."""

from moe_lab.plan.layout import Degrees, Holding, degrees, holdings, split_layers, with_experts
from moe_lab.plan.parameters import Counts, count_parameters

__all__ = [
    "Counts",
    "Degrees",
    "Holding",
    "count_parameters",
    "degrees",
    "holdings",
    "split_layers",
    "with_experts",
]
