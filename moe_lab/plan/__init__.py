"""Will it fit, and how fast? Parameters and FLOPs from the configuration alone. Lesson: 09_capacity_planner."""

from moe_lab.plan.parameters import Counts, count_parameters

__all__ = ["Counts", "count_parameters"]
