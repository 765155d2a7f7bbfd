"""Which options make two model configurations compute different things. Lesson: 08_full_stack.

Equal functions can be written differently: a softmax over the K selected logits is a softmax over all, normalised; with
K = 1 the merge rule "olmo" is "unit_sum". So options are compared by what they do. Options that only training uses
(``balance_loss``, ``balance_scope``, ``router_z_loss``, initial weights) do nothing to a stored model.
"""

from __future__ import annotations

from typing import Any

from moe_lab.config import ModelConfig

Option = tuple[Any, Any]  # (what it does, how the configuration says it)


def options(config: ModelConfig) -> dict[str, Option]:
    """Every option that changes what the model computes: its name -> (what it does, its value as written)."""
    attention, moe = config.attention, config.moe

    def plain(owner: Any, *names: str) -> dict[str, Option]:
        values = {name: getattr(owner, name) for name in names}
        return {f"{type(owner).__name__}.{name}": (value, value) for name, value in values.items()}

    found = plain(
        config, "vocab_size", "d_model", "n_layers", "norm_placement", "norm_eps", "embed_scale", "embed_norm", "tie_embeddings",
    )  # fmt: skip
    found["ModelConfig.dense_layers"] = (sorted(config.dense_layers), list(config.dense_layers))
    if config.dense_layers:
        found |= plain(config, "dense_hidden")
    found |= plain(attention, "n_heads", "n_kv_heads", "head_dim", "qk_norm", "rope_theta", "gate")
    full = [i in attention.full_layers for i in range(config.n_layers)]
    windows = [0 if f else attention.window for f in full]
    found["AttentionConfig.window"] = (max(windows), attention.window)
    if max(windows):
        found["AttentionConfig.full_layers"] = ([w == 0 for w in windows], list(attention.full_layers))
    rope = [attention.rope_in_full_layers or not f for f in full]
    found["AttentionConfig.rope_in_full_layers"] = (rope, attention.rope_in_full_layers)
    if moe is not None:
        found |= plain(
            moe, "n_experts", "top_k", "expert_hidden", "shared_hidden", "selection_bias", "assignment"
        )
        over_selected = moe.gating == "topk_softmax"
        found["MoEConfig.gating"] = ("softmax" if over_selected else moe.gating, moe.gating)
        found["MoEConfig.normalize_weights"] = (over_selected or moe.normalize_weights, moe.normalize_weights)
        routed, shared = moe.merge_coefficients()
        coefficients = (routed, shared if moe.shared_hidden else 1.0)
        found["MoEConfig.merge"] = (
            coefficients,
            f"{moe.merge}, routed outputs times {routed:g} and the shared one times {shared:g}",
        )
    return found


def differences(config: ModelConfig, other: ModelConfig) -> list[str]:
    """``Class.option = value (there value)`` for each option by which ``other`` computes something else."""
    ours, theirs = options(config), options(other)
    unlike = []
    for name, (does, written) in ours.items():
        there, as_written = theirs.get(name, (does, written))
        # A bias that is not there is one that is zero.
        if does != there and not (name == "MoEConfig.selection_bias" and not does):
            unlike.append(f"{name} = {written!r} (there {as_written!r})")
    return unlike
