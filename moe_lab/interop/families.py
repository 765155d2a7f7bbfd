"""The five Hugging Face families: what each computes, as one row of options, and what its tensors are called.

``options.py`` reads and writes ``config.json`` by these rows, ``tensors.py`` names the tensors. Lesson: 08_full_stack.

=============  ====================  =======  ======  ===============  =================================================
``model_type`` norms of a block      QK-norm  router  weights          besides
=============  ====================  =======  ======  ===============  =================================================
``olmoe``      before                full     softmax normalised or p  head_dim is hidden_size / heads
``mixtral``    before                none     softmax normalised       sliding window
``qwen3_moe``  before                head     softmax normalised or p  sliding window, dense layers by index
``flex_olmo``  after                 full     softmax normalised or p
``afmoe``      before and after      head     sigmoid normalised, x s  bias for the choice, gate on attention, window with
                                                                       full layers that have no RoPE, leading dense
                                                                       layers, shared experts, scaled embeddings
=============  ====================  =======  ======  ===============  =================================================

Shared experts are one MLP of their joint width on disk too, so that two of them are one wider shared expert here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_lab.config import Gating, Placement, QKNorm
from moe_lab.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Family:
    """One ``model_type``: its options as data.

    ``defaults``: values of keys that a ``config.json`` may lack, as the class has them. ``fixed``: keys that must have
    one of these values, since nothing here computes the others. ``keys``: our name of an option -> its key.
    ``norms``: our norm -> its tensor in a layer. ``moe`` ``router`` ``expert``: module names inside a layer, the last as
    (gate, up, down). ``window``: "none", "all" layers, or "by_layer".
    """

    name: str
    architecture: str
    placement: Placement
    qk_norm: QKNorm
    norms: dict[str, str]
    gating: Gating = "softmax"
    normalize_key: str = ""  # empty: always normalised
    own_head_dim: bool = True
    window: str = "none"
    dense: str = "none"  # "by_index", "leading"
    shared: bool = False
    gate: bool = False
    embed_scale_key: str = ""
    experts_key: str = "num_experts"
    width_key: str = "moe_intermediate_size"
    moe: str = "mlp"
    router: str = "gate.weight"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    defaults: dict[str, Any]
    fixed: dict[str, tuple[Any, ...]]


NO_WINDOW = 2**30  # AFMoE layers with RoPE always have a window; no sequence is as long as this one
PRE = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
SILU = ("silu", "swish")
UNUSED = {"attention_bias": (False, None), "attention_dropout": (0, 0.0, None), "hidden_act": SILU}
COMMON = {
    "rope_theta": 10_000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}

FAMILIES = {
    family.name: family
    for family in (
        Family(
            name="olmoe", architecture="OlmoeForCausalLM", placement="pre", qk_norm="full", norms=PRE,
            normalize_key="norm_topk_prob", own_head_dim=False, width_key="intermediate_size",
            defaults={**COMMON, "rms_norm_eps": 1e-5, "norm_topk_prob": False, "router_aux_loss_coef": 0.01},
            fixed={**UNUSED, "clip_qkv": (None,)},
        ),
        Family(
            name="mixtral", architecture="MixtralForCausalLM", placement="pre", qk_norm="none", norms=PRE, window="all",
            experts_key="num_local_experts", width_key="intermediate_size",
            moe="block_sparse_moe", expert=("w1", "w3", "w2"),
            defaults={**COMMON, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "router_aux_loss_coef": 0.001,
                      "sliding_window": None, "num_key_value_heads": 8},
            fixed={**UNUSED, "router_jitter_noise": (0, 0.0, None)},
        ),
        Family(
            name="qwen3_moe", architecture="Qwen3MoeForCausalLM", placement="pre", qk_norm="head", norms=PRE, window="all",
            normalize_key="norm_topk_prob", dense="by_index",
            defaults={**COMMON, "rms_norm_eps": 1e-6, "norm_topk_prob": False, "router_aux_loss_coef": 0.001,
                      "use_sliding_window": False, "sliding_window": 4096, "mlp_only_layers": None,
                      "decoder_sparse_step": 1, "num_key_value_heads": 4},
            fixed=UNUSED,
        ),
        Family(
            name="flex_olmo", architecture="FlexOlmoForCausalLM", placement="post", qk_norm="full",
            norms={"attention_out_norm": "post_attention_layernorm", "ffn_out_norm": "post_feedforward_layernorm"},
            normalize_key="norm_topk_prob", width_key="intermediate_size",
            defaults={**COMMON, "rope_theta": 500_000.0, "rms_norm_eps": 1e-6, "norm_topk_prob": False,
                      "router_aux_loss_coef": 0.01},
            fixed=UNUSED,
        ),
        Family(
            name="afmoe", architecture="AfmoeForCausalLM", placement="peri", qk_norm="head",
            norms={"attention_norm": "input_layernorm", "attention_out_norm": "post_attention_layernorm",
                   "ffn_norm": "pre_mlp_layernorm", "ffn_out_norm": "post_mlp_layernorm"},
            gating="sigmoid", window="by_layer", dense="leading", shared=True, gate=True, embed_scale_key="mup_enabled",
            router="router.gate.weight",
            defaults={**COMMON, "rms_norm_eps": 1e-5, "mup_enabled": False, "route_scale": 1.0, "num_dense_layers": 1,
                      "num_shared_experts": 2, "global_attn_every_n_layers": 4, "sliding_window": 1024, "head_dim": 128,
                      "layer_types": None},
            # The last six are options of the code that came with the published checkpoints; the class has none of them.
            fixed={**UNUSED, "score_func": ("sigmoid", None), "route_norm": (True, None), "n_group": (1, None),
                   "topk_group": (1, None), "num_expert_groups": (1, None), "num_limited_groups": (1, None)},
        ),
    )
}  # fmt: skip


def family_of(values: dict[str, Any]) -> Family:
    """The family that a ``config.json`` names; :class:`ConfigError` for any other."""
    name = values.get("model_type")
    if name in FAMILIES:
        return FAMILIES[name]
    for family in FAMILIES.values():
        if name is None and family.architecture in (values.get("architectures") or ()):
            return family
    what = f"model_type {name!r}" if name is not None else f"architectures {values.get('architectures')!r}"
    raise ConfigError(
        f"config.json has {what}, which cannot be read here: known architectures are {', '.join(FAMILIES)}"
    )
