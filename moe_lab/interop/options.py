"""A Hugging Face ``config.json`` into our configuration and back. Lesson: 08_full_stack.

``model_config`` reads one; ``hf_config`` writes one, and ``problems`` says what a family cannot express by reading back
what was written.
"""

from __future__ import annotations

from typing import Any

from moe_lab.config import AttentionConfig, ModelConfig, MoEConfig
from moe_lab.errors import ConfigError
from moe_lab.fields import suggestion
from moe_lab.interop.describe import differences
from moe_lab.interop.families import FAMILIES, NO_WINDOW, Family, family_of


class _Values:
    """A ``config.json`` with the family's defaults; each error names the key and its value."""

    def __init__(self, family: Family, values: dict[str, Any]) -> None:
        self.family, self.values = family, values

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        if value is not None or key in self.values:
            return value
        return self.family.defaults.get(key, default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"config.json lacks {key}, which a {self.family.name} model needs")
        return value

    def number(self, key: str) -> float:
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"config.json has {key} = {value!r}, but it must be a number")
        return float(value)

    def count(self, key: str, minimum: int = 1) -> int:
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(
                f"config.json has {key} = {value!r}, but it must be a whole number of at least {minimum}"
            )
        return value


def _check_fixed(family: Family, values: dict[str, Any]) -> None:
    for key, allowed in family.fixed.items():
        if key in values and values[key] not in allowed:
            raise ConfigError(
                f"config.json has {key} = {values[key]!r}, which moe_lab cannot compute: of {family.name} models it reads "
                f"those with {allowed[0]!r}"
            )
    if values.get("quantization_config"):
        raise ConfigError(
            "config.json has a quantization_config, but only unquantised weights can be read: convert them to bf16 first"
        )


def _rope_theta(config: _Values) -> float:
    scaling: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key) or {}
        if not isinstance(value, dict) or any(isinstance(v, dict) for v in value.values()):
            raise ConfigError(
                f"config.json has {key} = {value!r}, but moe_lab has one RoPE for all layers only"
            )
        scaling |= value
    kind = scaling.get("rope_type", scaling.get("type")) or "default"
    if kind != "default":
        raise ConfigError(
            f"config.json asks for RoPE of type {kind!r}, but moe_lab has the plain one only: type 'default'"
        )
    if scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ConfigError(
            f"config.json has partial_rotary_factor = {scaling['partial_rotary_factor']!r}, but moe_lab turns whole heads"
        )
    return _Values(config.family, {**config.values, **scaling}).number("rope_theta")


def model_config(values: dict[str, Any]) -> ModelConfig:
    """Our configuration of the model that a Hugging Face ``config.json`` describes.

    The weight of the balance loss is ``router_aux_loss_coef * K / L`` for L MoE layers, with which our loss, a sum over
    layers of terms that are 1 at balance, has the value and the gradient of theirs, one term over all layers together
    that is K at balance, when all layers load their experts alike. AFMoE has no such loss: 0.

    Raises :class:`ConfigError` naming the key and the value for an unknown architecture and for every option that
    changes the result and is not computed here.
    """
    family = family_of(values)
    _check_fixed(family, values)
    config = _Values(family, values)
    d_model, layers, heads = (
        config.count(k) for k in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    kv_heads = config.get("num_key_value_heads")
    head_dim = config.get("head_dim")
    head_dim = d_model // heads if head_dim is None else head_dim
    if not family.own_head_dim and head_dim * heads != d_model:
        raise ConfigError(
            f"config.json has {heads} heads of head_dim {head_dim} for hidden_size {d_model}, but the QK-norm of {family.name} "
            "spans hidden_size: they must multiply to it"
        )
    window, full_layers = _windows(config, layers)
    dense = _dense_layers(config, layers)
    moe = None
    if len(dense) < layers:
        # Either key is written, depending on the version of transformers.
        other = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}[family.experts_key]
        key = family.experts_key if config.get(family.experts_key) is not None else other
        top_k, expert_hidden = config.count("num_experts_per_tok"), config.count(family.width_key)
        has_loss = "router_aux_loss_coef" in family.defaults
        coefficient = config.number("router_aux_loss_coef") if has_loss else 0.0
        moe = MoEConfig(
            n_experts=config.count(key if key in values else family.experts_key),
            top_k=top_k,
            expert_hidden=expert_hidden,
            shared_hidden=expert_hidden * config.count("num_shared_experts", 0) if family.shared else 0,
            gating=family.gating,
            normalize_weights=bool(config.get(family.normalize_key)) if family.normalize_key else True,
            merge="unit_sum",
            routed_scale=config.number("route_scale") if family.shared else 1.0,
            balance_loss=coefficient * top_k / (layers - len(dense)),
            selection_bias=family.gating == "sigmoid",
        )
    return ModelConfig(
        vocab_size=config.count("vocab_size"),
        d_model=d_model,
        n_layers=layers,
        attention=AttentionConfig(
            n_heads=heads,
            n_kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            qk_norm=family.qk_norm,
            rope_theta=_rope_theta(config),
            window=window,
            full_layers=full_layers,
            rope_in_full_layers=not full_layers,
            gate=family.gate,
        ),
        moe=moe,
        dense_layers=dense,
        dense_hidden=config.count("intermediate_size") if dense else 0,
        norm_placement=family.placement,
        norm_eps=config.need("rms_norm_eps"),
        embed_scale=bool(config.get(family.embed_scale_key)) if family.embed_scale_key else False,
        embed_norm=False,
        tie_embeddings=bool(config.get("tie_word_embeddings")),
        init_std=config.need("initializer_range"),
    )


def _windows(config: _Values, layers: int) -> tuple[int, tuple[int, ...]]:
    """(window, indices of the layers without one) of a ``config.json``."""
    family = config.family
    if family.window == "none":
        return 0, ()
    window = config.get("sliding_window")
    if family.window == "all":
        used = window is not None and bool(config.get("use_sliding_window", True))
        return (config.count("sliding_window") if used else 0), ()
    types = config.get("layer_types")
    if types is None:
        every = config.count("global_attn_every_n_layers")
        types = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]
    unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
    if unknown or len(types) != layers:
        raise ConfigError(
            f"config.json has layer_types {unknown or len(types)} for {layers} layers, but each layer must have "
            "'full_attention' or 'sliding_attention'"
        )
    full = tuple(i for i, kind in enumerate(types) if kind == "full_attention")
    window = config.count("sliding_window") if len(full) < layers else 0
    return (window if window < NO_WINDOW else 0), full


def _dense_layers(config: _Values, layers: int) -> tuple[int, ...]:
    if config.family.dense == "by_index":
        step, only = config.count("decoder_sparse_step"), config.get("mlp_only_layers") or []
        return tuple(i for i in range(layers) if i in only or (i + 1) % step)
    if config.family.dense == "leading":
        return tuple(range(min(config.count("num_dense_layers", 0), layers)))
    return ()


def hf_config(family: Family, config: ModelConfig, max_positions: int) -> dict[str, Any]:
    """The ``config.json`` of ``config`` as a model of ``family``; :class:`ConfigError` names what it cannot express.

    ``max_positions``: the longest sequence that transformers is told of (``max_position_embeddings``). What was written
    is read back and compared, so that nothing is lost that is not named.
    """
    unlike = problems(family, config)
    if unlike:
        raise ConfigError(f"{family.name} cannot express {'; '.join(unlike)}")
    return _write(family, config, max_positions)


def problems(family: Family, config: ModelConfig) -> list[str]:
    """The options of ``config`` that ``family`` cannot express, each as ``Class.option = value (there value)``."""
    try:
        return differences(config, model_config(_write(family, config, 1)))
    except ConfigError as error:
        return [str(error)]


def choose(config: ModelConfig, architecture: str | None) -> Family:
    """The family called ``architecture``, or without one the first that can express ``config``; :class:`ConfigError` if none."""
    if architecture is not None:
        if architecture not in FAMILIES:
            raise ConfigError(
                f"architecture is {architecture!r}, but must be one of {', '.join(FAMILIES)}{suggestion(architecture, FAMILIES)}"
            )
        return FAMILIES[architecture]
    found = {name: problems(family, config) for name, family in FAMILIES.items()}
    nearest = min(found, key=lambda name: len(found[name]))
    if found[nearest]:
        raise ConfigError(
            f"none of {', '.join(FAMILIES)} can express this model; the nearest, {nearest}, cannot express "
            f"{'; '.join(found[nearest])}"
        )
    return FAMILIES[nearest]


def _write(family: Family, config: ModelConfig, max_positions: int) -> dict[str, Any]:
    attention, moe = config.attention, config.moe
    values: dict[str, Any] = {
        "architectures": [family.architecture], "model_type": family.name, "vocab_size": config.vocab_size,
        "hidden_size": config.d_model, "num_hidden_layers": config.n_layers, "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads, "hidden_act": "silu", "max_position_embeddings": max_positions,
        "initializer_range": config.init_std, "rms_norm_eps": config.norm_eps, "use_cache": True,
        "tie_word_embeddings": config.tie_embeddings, "attention_bias": False, "attention_dropout": 0.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": attention.rope_theta},
        # The classes have token ids of their own as defaults; one within the vocabulary would lose its gradient.
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        # A model without experts still has to name a number of them.
        family.experts_key: moe.n_experts if moe else 1, "num_experts_per_tok": moe.top_k if moe else 1,
    }  # fmt: skip
    if family.own_head_dim:
        values["head_dim"] = attention.head_dim
    values["intermediate_size"] = config.dense_hidden or 1
    values[family.width_key] = moe.expert_hidden if moe else 1
    if "router_aux_loss_coef" in family.defaults:
        weight = moe.balance_loss * len(config.moe_layers) / moe.top_k if moe else 0.0
        values["router_aux_loss_coef"] = weight
    if family.normalize_key:
        values[family.normalize_key] = (
            (moe.gating == "topk_softmax" or moe.normalize_weights) if moe else False
        )
    if family.window == "all":
        values["sliding_window"] = attention.window or None
        values["use_sliding_window"] = attention.window > 0
    if family.window == "by_layer":
        full = attention.full_layers if attention.window or not attention.rope_in_full_layers else ()
        values["layer_types"] = [
            "full_attention" if i in full else "sliding_attention" for i in range(config.n_layers)
        ]
        values["sliding_window"] = attention.window or NO_WINDOW
    if family.dense == "by_index":
        values["mlp_only_layers"], values["decoder_sparse_step"] = list(config.dense_layers), 1
    if family.dense == "leading":
        values["num_dense_layers"] = len(config.dense_layers)
    if family.shared:
        values["num_shared_experts"] = moe.shared_hidden // moe.expert_hidden if moe else 0
        values["route_scale"] = moe.merge_coefficients()[0] if moe else 1.0
    if family.embed_scale_key:
        values[family.embed_scale_key] = config.embed_scale
    return values
