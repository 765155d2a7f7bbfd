"""Is the work balanced? The formulas, which the training losses call too, and a recorder. Lesson: 02_routing_and_balance."""

from moe_lab.routing.balance import Balance, balance_loss, load_balancing_score, metrics, router_z_loss
from moe_lab.routing.recorder import Recorder, record

__all__ = [
    "Balance",
    "Recorder",
    "balance_loss",
    "load_balancing_score",
    "metrics",
    "record",
    "router_z_loss",
]
