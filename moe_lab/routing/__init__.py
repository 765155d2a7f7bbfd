"""Is the work balanced? The formulas, which the training losses call too. Lesson: 02_routing_and_balance."""

from moe_lab.routing.balance import Balance, balance_loss, load_balancing_score, metrics, router_z_loss

__all__ = ["Balance", "balance_loss", "load_balancing_score", "metrics", "router_z_loss"]
