"""Parameters and FLOPs a token, in closed form from a configuration; equal to the real modules', to the unit.

Lesson: 09_capacity_planner.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_lab.config import AttentionConfig, ModelConfig


@dataclass(frozen=True)
class Counts:
    """Parameters of a model by kind. ``active``: those one token uses, K experts a layer instead of all (report eq. 2).

    ``embedding`` (input table, its norm), ``head`` (output matrix, final norm), ``attention`` (projections, QK-norm,
    gate), ``norms`` (of the blocks), ``dense`` (MLPs of dense layers), ``router``, ``routed``, ``shared``.
    """

    embedding: int
    head: int
    attention: int
    norms: int
    dense: int
    router: int
    routed: int
    shared: int
    routed_active: int
    config: ModelConfig

    @property
    def always(self) -> int:
        """Parameters that every token uses."""
        return (
            self.embedding + self.head + self.attention + self.norms + self.dense + self.router + self.shared
        )

    @property
    def total(self) -> int:
        """All parameters."""
        return self.always + self.routed

    @property
    def active(self) -> int:
        """Parameters one token uses; embedding, head and whole routers included."""
        return self.always + self.routed_active

    def flops_per_token(self, sequence_length: int) -> int:
        """Useful training FLOPs a token, forward and backward: 6 a weight of each matrix product, and causal attention.

        Attention counts the exact causal pairs, 12 H C pairs / S with pairs = S (S + 1) / 2 (fewer inside a window). The embedding look-up, norms, recompute, padding and dropped rows count nothing, which is the published
        convention of Olmo-core 3.
        """
        config = self.config
        attention, moe = config.attention, config.moe
        d = config.d_model
        matrices = self.dense + self.router + self.routed_active + self.shared + config.vocab_size * d
        matrices += config.n_layers * _projections(attention, d)
        scores = 0
        for layer in range(config.n_layers):
            window = 0 if layer in attention.full_layers else attention.window
            scores += (
                12
                * attention.n_heads
                * attention.head_dim
                * (_causal_pairs(sequence_length, window) // sequence_length)
            )
        assert (
            moe is None
            or self.routed_active == len(config.moe_layers) * 3 * d * moe.expert_hidden * moe.top_k
        )
        return 6 * matrices + scores


def _causal_pairs(length: int, window: int) -> int:
    if window == 0 or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def _projections(attention: AttentionConfig, d: int) -> int:
    query, key_value = attention.n_heads * attention.head_dim, attention.n_kv_heads * attention.head_dim
    return d * query * (3 if attention.gate else 2) + 2 * d * key_value


def count_parameters(config: ModelConfig) -> Counts:
    """Parameters of ``config`` by kind; no module is built."""
    d, attention, moe = config.d_model, config.attention, config.moe
    gains = {
        "none": 0,
        "head": 2 * attention.head_dim,
        "full": (attention.n_heads + attention.n_kv_heads) * attention.head_dim,
    }[attention.qk_norm]
    layers, moe_layers = config.n_layers, len(config.moe_layers)
    expert = 3 * d * moe.expert_hidden if moe else 0
    table = config.vocab_size * d
    return Counts(
        embedding=table + (d if config.embed_norm else 0),
        head=d + (0 if config.tie_embeddings else table),
        attention=layers * (_projections(attention, d) + gains),
        norms=layers * d * (4 if config.norm_placement == "peri" else 2),
        dense=len(config.dense_layers) * 3 * d * config.dense_hidden,
        router=moe_layers * d * moe.n_experts if moe else 0,
        routed=moe_layers * expert * moe.n_experts if moe else 0,
        shared=moe_layers * 3 * d * moe.shared_hidden if moe else 0,
        routed_active=moe_layers * expert * moe.top_k if moe else 0,
        config=config,
    )
