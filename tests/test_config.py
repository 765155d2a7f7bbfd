"""Configuration, overrides and presets: values that fit, and one clear sentence for those that do not."""

from __future__ import annotations

import json

import pytest

from moe_lab import presets
from moe_lab.config import AttentionConfig, MoEConfig, OptimConfig, ParallelConfig, TrainConfig
from moe_lab.errors import ConfigError
from moe_lab.fields import from_dict, override, to_dict


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_survives_json(name: str) -> None:
    config = presets.get(name)
    assert config.name == name
    assert from_dict(TrainConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_overrides_take_paths_last_parts_and_short_names() -> None:
    config = presets.get("bench-8l", experts=8, lr=1e-3)
    assert (config.model.moe.n_experts, config.optim.lr) == (8, 1e-3)
    config = override(
        config, ["model.moe.top_k=2", "dense_layers=0,1", "mask_documents=true", "no_decay=norm"]
    )
    assert (config.model.moe.top_k, config.model.dense_layers, config.data.mask_documents) == (
        2,
        (0, 1),
        True,
    )
    assert config.optim.no_decay == ("norm",)
    assert presets.get("laptop", steps=60, warmup_steps=60).steps == 60


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 9}, ["top_k is 9", "8 experts"]),
        ({"experts": "many"}, ["n_experts", "'many'", "whole number"]),
        ({"gating": "relu"}, ["gating", "'relu'", "softmax, sigmoid, topk_softmax"]),
        ({"n_heads": 3}, ["n_heads is 3", "2 key/value heads"]),
        ({"lr": 0}, ["lr is 0", "above 0"]),
        ({"lr": "nan"}, ["lr is nan", "finite"]),
        ({"head_dim": 31}, ["head_dim is 31", "even"]),
        ({"sequences_per_step": 15}, ["15", "microbatches of 4"]),
        ({"dense_layers": (4,), "dense_hidden": 8}, ["dense_layers is [4]", "0 to 3"]),
        ({"dense_layers": (0,)}, ["dense_hidden is 0", "at least 1"]),
        ({"warmup_steps": 5000}, ["5000 warm-up", "400"]),
        ({"ep": 3, "transport": "all_to_all"}, ["ep is 3", "8 experts"]),
        ({"pp": 8}, ["pp 8", "4 layers"]),
        ({"stepz": 5}, ["'stepz'", "did you mean 'steps'"]),
        ({"seed": 1.5}, ["init_seed", "1.5"]),
    ],
)
def test_a_wrong_value_is_one_sentence_with_the_numbers(changes: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        presets.get("laptop", **changes)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_unknown_preset_and_ambiguous_or_malformed_overrides() -> None:
    with pytest.raises(ConfigError, match="did you mean 'laptop'"):
        presets.get("lptop")
    with pytest.raises(ConfigError, match="not of the form name=value"):
        override(presets.get("laptop"), ["steps"])
    with pytest.raises(ConfigError, match="did you mean 'seed'"):
        override(presets.get("laptop"), ["sed=1"])


def test_types_are_checked_without_an_override_too() -> None:
    with pytest.raises(ConfigError, match=r"n_heads is 4\.0, but must be a whole number"):
        AttentionConfig(n_heads=4.0, n_kv_heads=2, head_dim=32)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="normalize_weights is 1, but must be true or false"):
        MoEConfig(n_experts=4, top_k=1, expert_hidden=8, normalize_weights=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="betas"):
        OptimConfig(lr=1.0, betas=(0.9,))


def test_layouts_that_do_not_fit_the_ranks() -> None:
    assert ParallelConfig().resolve(4).dp == 4
    with pytest.raises(ConfigError, match="pp is 3, which does not divide 4 ranks"):
        ParallelConfig(pp=3).resolve(4)
    with pytest.raises(ConfigError, match=r"pp 1 x dp 2 = 2 ranks, but 4"):
        ParallelConfig(dp=2).resolve(4)
    with pytest.raises(ConfigError, match=r"4 microbatches .* 3 data-parallel ranks"):
        presets.get("laptop").microbatches_per_rank(3)


def test_merge_rules_of_section_21() -> None:
    def coefficients(rule: str) -> tuple[float, float]:
        return MoEConfig(
            n_experts=8, top_k=4, expert_hidden=2560, shared_hidden=1280, merge=rule
        ).merge_coefficients()  # type: ignore[arg-type]

    assert coefficients("olmo") == (4.0, 1.0)
    assert coefficients("unit_sum") == (1.0, 1.0)
    assert coefficients("equal_mass") == (0.5, 0.5)
    routed, shared = coefficients("width_proportional")
    assert routed == pytest.approx(10240 / 11520)
    assert shared == pytest.approx(1280 / 11520)
