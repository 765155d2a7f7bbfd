"""config.json in and out: defaults, forms that published checkpoints have, and options that cannot be expressed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from interop_models import (
    BASE,
    FAMILIES,
    VARIANT_IDS,
    VARIANTS,
    VOCAB,
    DoubleStaysDouble,
    cast,
    ours,
    relative,
    theirs,
)
from transformers import AutoConfig, AutoModelForCausalLM

from moe_lab import presets
from moe_lab.config import AttentionConfig, ModelConfig, MoEConfig, TrainConfig
from moe_lab.errors import ConfigError
from moe_lab.fields import from_dict, to_dict
from moe_lab.interop import import_checkpoint, model_config, save_pretrained
from moe_lab.interop.families import FAMILIES as TABLE
from moe_lab.interop.options import choose, hf_config, problems
from moe_lab.model import Transformer, build, cross_entropy
from moe_lab.plan import count_parameters
from moe_lab.train.store import FREE, load_weights, save_model, with_initial_model

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")

NEEDED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_experts_per_tok",
    "intermediate_size",
)


def values_of(family: str, **changes: Any) -> dict[str, Any]:
    return {**BASE, **FAMILIES[family], "model_type": family, **changes}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_the_classes_own_sizes(family: str) -> None:
    """The configuration that each class has by default, billions of parameters, counted on the meta device."""
    config = AutoConfig.for_model(family)
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(config)
    biases = sum(p.numel() for n, p in reference.named_parameters() if n.endswith("expert_bias"))
    total = sum(p.numel() for p in reference.parameters()) - biases
    read = model_config(config.to_dict())
    assert total > 5e9
    assert count_parameters(read).total == total
    assert sum(p.numel() for p in build(read, "meta").parameters()) == total


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_the_class(family: str) -> None:
    """A config.json with only what has no default here means what the class of transformers makes of it."""
    short = {"model_type": family} | {n: BASE[n] for n in NEEDED} | FAMILIES[family]
    # With no head_dim AFMoE means 128 and the others hidden_size / heads; Qwen3-MoE means 4 and Mixtral 8 key/value heads.
    short["num_attention_heads"] = 8
    if family == "afmoe":
        del short["head_dim"]
    whole = AutoConfig.for_model(**short).to_dict()
    assert model_config(short) == model_config(whole)
    assert model_config(whole).init_std == whole["initializer_range"]


def test_either_form_of_rope_and_either_name_of_the_number_of_experts() -> None:
    old = model_config(values_of("qwen3_moe", rope_theta=123.0, rope_scaling=None))
    new = model_config(values_of("qwen3_moe", rope_parameters={"rope_theta": 123.0, "rope_type": "default"}))
    assert old == new
    assert old.attention.rope_theta == 123.0
    named = values_of("qwen3_moe", num_local_experts=6)
    del named["num_experts"]
    moe = model_config(named).moe
    assert moe is not None
    assert moe.n_experts == 6
    unnamed = values_of("olmoe", architectures=["OlmoeForCausalLM"])
    del unnamed["model_type"]
    assert model_config(unnamed) == model_config(values_of("olmoe"))


def test_a_published_afmoe_config() -> None:
    """The shape of the published AFMoE files, whose own code has more options than the class."""
    config = model_config(
        values_of("afmoe", num_hidden_layers=8, global_attn_every_n_layers=4, sliding_window=2048, num_dense_layers=2,
                  mup_enabled=True, route_scale=2.826, num_shared_experts=1, route_norm=True, score_func="sigmoid", n_group=1,
                  topk_group=1, num_expert_groups=1, num_limited_groups=1, rope_scaling=None, rope_theta=10000,
                  load_balance_coeff=5e-4, use_grouped_mm=True)
    )  # fmt: skip
    assert config.attention.full_layers == (3, 7)
    assert not config.attention.rope_in_full_layers
    assert (config.attention.window, config.dense_layers, config.embed_scale) == (2048, (0, 1), True)
    assert config.moe is not None
    assert config.moe.merge_coefficients() == (2.826, 1.0)
    assert (config.moe.gating, config.moe.selection_bias, config.moe.balance_loss) == ("sigmoid", True, 0.0)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("olmoe", {"attention_bias": True}, "attention_bias = True, which moe_lab cannot compute"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
    ("olmoe", {"hidden_act": "gelu"}, "hidden_act = 'gelu'.*'silu'"),
    ("olmoe", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
    ("olmoe", {"head_dim": 16}, "4 heads of head_dim 16 for hidden_size 32"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
    ("mixtral", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "RoPE of type 'yarn'"),
    ("mixtral", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE of type 'linear'"),
    ("mixtral", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ("mixtral", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one RoPE for all layers only"),
    ("mixtral", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("mixtral", {"sliding_window": -1}, "sliding_window = -1, but it must be a whole number of at least 1"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts = 0"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "MoEConfig.top_k is 9, but there are only 8 experts"),
    ("qwen3_moe", {"hidden_size": None}, "lacks hidden_size, which a qwen3_moe model needs"),
    ("qwen3_moe", {"rope_theta": "big"}, "rope_theta = 'big', but it must be a number"),
    ("afmoe", {"n_group": 4}, "n_group = 4"),
    ("afmoe", {"topk_group": 2}, "topk_group = 2"),
    ("afmoe", {"score_func": "softmax"}, "score_func = 'softmax'"),
    ("afmoe", {"route_norm": False}, "route_norm = False"),
    ("afmoe", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types .*'linear_attention'"),
    ("afmoe", {"layer_types": ["full_attention"]}, "layer_types 1 for 2 layers"),
    ("afmoe", {"sliding_window": None}, "lacks sliding_window"),
    ("olmoe", {"model_type": "llama4"}, "model_type 'llama4', which cannot be read here: known architectures are olmoe, mixtral"),
    ("olmoe", {"model_type": None, "architectures": ["GPT2LMHeadModel"]}, "architectures .'GPT2LMHeadModel'."),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED, ids=[m for _, _, m in REFUSED])
def test_options_that_are_refused(family: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    values = values_of(family, **changes)
    with pytest.raises(ConfigError, match=message):
        model_config(values)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message) as caught:
        import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("family", "name", "options"), VARIANTS, ids=VARIANT_IDS)
def test_a_family_expresses_what_it_was_read_from(family: str, name: str, options: dict[str, Any]) -> None:
    config = model_config(values_of(family, **options))
    assert model_config(hf_config(TABLE[family], config, 4096)) == config
    assert choose(config, None).name == family
    assert all(problems(TABLE[other], config) for other in TABLE if other != family)


# Models of ours that no checkpoint was the origin of.

PLAIN = ModelConfig(
    vocab_size=VOCAB, d_model=32, n_layers=2, norm_placement="pre", embed_scale=False, embed_norm=False, norm_eps=1e-5,
    attention=AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=8, qk_norm="none", rope_theta=1e4),
    moe=MoEConfig(n_experts=8, top_k=2, expert_hidden=24, gating="topk_softmax", merge="unit_sum"),
)  # fmt: skip


def changed(config: ModelConfig = PLAIN, **changes: Any) -> ModelConfig:
    """``config`` with fields of the model, of ``attention`` and of ``moe`` replaced, each where it belongs."""
    values = to_dict(config)
    for name, value in changes.items():
        owners = [v for v in (values, values["attention"], values["moe"] or {}) if name in v]
        assert len(owners) == 1, name
        owners[0][name] = value
    return from_dict(ModelConfig, values)


AFMOE = changed(
    norm_placement="peri", qk_norm="head", gate=True, gating="sigmoid", shared_hidden=48, embed_scale=True, routed_scale=1.5,
)  # fmt: skip
OURS: list[tuple[str, str, ModelConfig]] = [
    ("mixtral", "softmax over the selected", PLAIN),
    ("mixtral", "K = 1 makes olmo and unit_sum one rule", changed(top_k=1, merge="olmo")),
    ("mixtral", "a shared part of width 0 has no coefficient", changed(merge="equal_mass", routed_scale=2.0)),
    ("mixtral", "a window", changed(window=4)),
    ("mixtral", "layers without window, and no window", changed(full_layers=[1])),
    ("olmoe", "full QK-norm", changed(qk_norm="full", tie_embeddings=True)),
    ("flex_olmo", "norms behind", changed(qk_norm="full", norm_placement="post", head_dim=10)),
    ("qwen3_moe", "plain softmax, dense layer", changed(qk_norm="head", gating="softmax", normalize_weights=False, dense_layers=[1], dense_hidden=40)),
    ("qwen3_moe", "no experts at all", changed(qk_norm="head", moe=None, dense_layers=[0, 1], dense_hidden=40)),
    ("afmoe", "no bias, no window", AFMOE),
    ("afmoe", "olmo merge, which is a scale", changed(AFMOE, merge="olmo", selection_bias=True)),
    ("afmoe", "window, full layers without RoPE", changed(AFMOE, window=4, full_layers=[0], rope_in_full_layers=False)),
    ("afmoe", "full layers without RoPE, no window", changed(AFMOE, full_layers=[1], rope_in_full_layers=False, shared_hidden=0)),
]  # fmt: skip


def random_model(config: ModelConfig) -> Transformer:
    model = build(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else 0.2 * noise)
    return model.eval()


@pytest.mark.parametrize(("family", "name", "config"), OURS, ids=[f"{f}: {n}" for f, n, _ in OURS])
def test_models_of_ours_in_transformers(family: str, name: str, config: ModelConfig, tmp_path: Path) -> None:
    model = random_model(config)
    save_pretrained(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == family
    reference, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float64, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )  # fmt: skip
    assert not any(info.values()), info
    tokens = torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(4))
    with DoubleStaysDouble(), torch.no_grad():
        wanted = cast(reference.eval(), torch.float64)(tokens).logits
    assert relative(model(tokens), wanted) < 1e-12


INEXPRESSIBLE: list[tuple[str, ModelConfig, str]] = [
    ("olmoe", PLAIN, "AttentionConfig.qk_norm = 'none' .there 'full'."),
    ("olmoe", changed(qk_norm="full", window=4), "AttentionConfig.window = 4 .there 0."),
    ("olmoe", changed(qk_norm="full", head_dim=12), "head_dim"),
    ("mixtral", changed(merge="olmo"), "MoEConfig.merge = 'olmo, routed outputs times 2 and the shared one times 1'"),
    ("mixtral", changed(routed_scale=2.0), "MoEConfig.merge = 'unit_sum, routed outputs times 2"),
    ("mixtral", changed(gating="softmax", normalize_weights=False), "MoEConfig.normalize_weights = False .there True."),
    ("mixtral", changed(gating="sigmoid"), "MoEConfig.gating = 'sigmoid'"),
    ("mixtral", changed(gating="softmax", selection_bias=True), "MoEConfig.selection_bias = True"),
    ("mixtral", changed(gating="softmax", assignment="random"), "MoEConfig.assignment = 'random'"),
    ("mixtral", changed(shared_hidden=24), "MoEConfig.shared_hidden = 24 .there 0."),
    ("mixtral", changed(norm_placement="peri"), "ModelConfig.norm_placement = 'peri' .there 'pre'."),
    ("mixtral", changed(embed_norm=True), "ModelConfig.embed_norm = True .there False."),
    ("mixtral", changed(embed_scale=True), "ModelConfig.embed_scale = True .there False."),
    ("mixtral", changed(gate=True), "AttentionConfig.gate = True .there False."),
    ("mixtral", changed(window=4, full_layers=[1]), r"AttentionConfig.full_layers = \[1\]"),
    ("mixtral", changed(full_layers=[1], rope_in_full_layers=False), "AttentionConfig.rope_in_full_layers = False"),
    ("mixtral", changed(dense_layers=[0], dense_hidden=40), r"ModelConfig.dense_layers = \[0\] .there \[\]."),
    ("afmoe", changed(AFMOE, dense_layers=[1], dense_hidden=40), r"ModelConfig.dense_layers = \[1\] .there \[0\]."),
    ("afmoe", changed(AFMOE, shared_hidden=30), "MoEConfig.shared_hidden = 30 .there 24."),
    ("afmoe", changed(AFMOE, merge="equal_mass"), "MoEConfig.merge = 'equal_mass"),
    ("afmoe", changed(AFMOE, window=4, full_layers=[1]), "AttentionConfig.rope_in_full_layers = True .there False."),
    ("afmoe", changed(AFMOE, gate=False), "AttentionConfig.gate = False .there True."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "config", "message"), INEXPRESSIBLE, ids=[f"{f}: {m}" for f, _, m in INEXPRESSIBLE]
)
def test_what_a_family_cannot_express(family: str, config: ModelConfig, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{family} cannot express .*{message}"):
        save_pretrained(build(config), tmp_path / "out", family)
    assert not any(tmp_path.iterdir())


def test_what_none_can_express(tmp_path: Path) -> None:
    model = build(presets.get("laptop").model)
    with pytest.raises(
        ConfigError,
        match=r"none of olmoe, .* can express this model; the nearest, .* cannot express .*embed_norm = True",
    ):
        save_pretrained(model, tmp_path / "out")
    with pytest.raises(
        ConfigError, match=r"architecture is 'mixtrall', but must be one of .*did you mean 'mixtral'"
    ):
        save_pretrained(model, tmp_path / "out", "mixtrall")


# Training goes on.


def test_training_goes_on_from_an_imported_model(tmp_path: Path) -> None:
    theirs("qwen3_moe").to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    folder = import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    config = with_initial_model(presets.get("laptop"), folder)
    assert (config.initial_model, config.model.d_model) == (str(folder), 32)
    assert from_dict(TrainConfig, to_dict(config)) == config
    model = build(config.model)
    load_weights(model, folder)
    reference = ours(theirs("qwen3_moe").to(torch.bfloat16), tmp_path / "again")
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, reference.state_dict()[name].float())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, VOCAB, (4, 17), generator=torch.Generator().manual_seed(6))
    losses = []
    for _ in range(6):
        part = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        loss = part.cross_entropy / part.labels
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.3
    save_model(model, tmp_path / "trained")
    save_pretrained(model, tmp_path / "out", "qwen3_moe")


def test_the_model_that_training_goes_on_from_must_be_the_one_configured(tmp_path: Path) -> None:
    save_model(build(PLAIN), tmp_path)
    assert PLAIN.moe is not None
    free = changed(balance_loss=0.5, balance_scope="sequence", router_z_loss=0.1, init_std=0.5, init_seed=1)
    differing = {n for n in FREE if n != "moe.assignment"}
    assert len(differing) == 5
    load_weights(build(free), tmp_path)
    wider = dataclasses.replace(PLAIN, moe=dataclasses.replace(PLAIN.moe, expert_hidden=32))
    with pytest.raises(
        ConfigError, match=r"ModelConfig.moe.expert_hidden is 32, but 24 in the initial model"
    ):
        load_weights(build(wider), tmp_path)
    with pytest.raises(ConfigError, match=r"ModelConfig.norm_eps is 0.1, but 1e-05"):
        load_weights(build(changed(norm_eps=0.1)), tmp_path)
