"""Named configurations: every reference row of Olmo-core 3.0.0, and ours for a laptop.

``get("tiny-64e")`` returns a :class:`~moe_lab.config.TrainConfig`. The reference rows are the operating points of the
Olmo-core 3.0.0 example scripts (technical report, section 14 and appendix B); their exact parameter counts are checked
against the modules built on the meta device. ``laptop`` is the one that lessons train.

Common to the reference rows: vocabulary 100,352 (dolma2), sequence length 8,192, head dimension 128, QK-norm per head,
RoPE theta 500,000, embeddings scaled by sqrt(d_model) and normed, AdamW (0.9, 0.95), weight decay 0.1, clipping at 1.

Lesson: 00_start_here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from moe_lab.config import (
    AttentionConfig,
    DataConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from moe_lab.errors import ConfigError
from moe_lab.fields import override, suggestion

KI, MI = 2**10, 2**20
SEQUENCE = 8192
REFERENCE_DATA = (
    "OLMo_mix_0925"  # token files of the reference runs; prepare your own and pass data.source=FOLDER
)
WARMUP_TOKENS = 30 * 10**9
RUN_TOKENS = 200 * 10**9


def laptop() -> TrainConfig:
    """About 2.1M parameters, bytes as tokens, the King James Bible: minutes on two cores, alone or over 4 ranks.

    What is logged as ``train/CE loss`` is the cross-entropy alone, in nats a byte; auxiliary terms are apart. The
    balance loss has weight 0.01 over a microbatch of 4 sequences (512 tokens).
    """
    return TrainConfig(
        name="laptop",
        model=ModelConfig(
            vocab_size=256,
            d_model=128,
            n_layers=4,
            attention=AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=32, rope_theta=10_000.0),
            moe=MoEConfig(
                n_experts=8,
                top_k=2,
                expert_hidden=128,
                shared_hidden=128,
                balance_loss=0.01,
                router_z_loss=1e-4,
            ),
            init_std=0.02,
        ),
        data=DataConfig(source="data/kjv.txt", tokenizer="byte", val_fraction=0.05),
        optim=OptimConfig(lr=3e-3, schedule="cosine", warmup_steps=50),
        sequence_length=128,
        sequences_per_step=16,
        microbatch_sequences=4,
        steps=400,
        eval_every=100,
        eval_sequences=128,
        log_every=25,
    )


def _reference(
    name: str,
    *,
    d: int,
    layers: int,
    dense: int,
    heads: tuple[int, int],
    experts: int,
    top_k: int = 4,
    widths: tuple[int, int, int],
    placement: Literal["peri", "post"],
    tokens: int,
    microbatch: int,
    lr: float,
    lb: float,
    router_z: float,
    gpus: int,
    ep: int = 1,
    pp: int = 1,
    transport: Literal["local", "rowwise", "deepep"] | None = None,
    assignment: Literal["learned", "random"] = "learned",
    **train: Any,
) -> TrainConfig:
    """One reference row. ``widths``: routed, shared and dense hidden sizes; ``tokens``: global batch; ``microbatch``: sequences."""
    expert_hidden, shared_hidden, dense_hidden = widths
    moe = MoEConfig(
        n_experts=experts, top_k=top_k, expert_hidden=expert_hidden, shared_hidden=shared_hidden,
        balance_loss=lb, router_z_loss=router_z, assignment=assignment,
    )  # fmt: skip
    optim = train.pop("optim", None) or OptimConfig(
        lr=lr,
        schedule="constant",
        warmup_steps=WARMUP_TOKENS // tokens,
        no_decay=("embedding", "norm"),
        skip_sigma=12.0,
    )
    capacity = train.pop("capacity", 1.1875)
    parallel = ParallelConfig(
        ep=ep, pp=pp, virtual_stages=2 if pp > 1 else 1, transport=transport or ("rowwise" if ep > 1 else "local"),
        capacity_factor=capacity, recompute=train.pop("recompute", "none"),
    )  # fmt: skip
    return TrainConfig(
        name=name,
        model=ModelConfig(
            vocab_size=100_352, d_model=d, n_layers=layers,
            attention=AttentionConfig(n_heads=heads[0], n_kv_heads=heads[1], head_dim=128),
            moe=moe if dense < layers else None, dense_layers=tuple(range(dense)), dense_hidden=dense_hidden,
            norm_placement=placement,
        ),
        data=DataConfig(source=REFERENCE_DATA, tokenizer="bpe"),
        optim=optim,
        parallel=parallel,
        precision=train.pop("precision", "bf16"),
        sequence_length=SEQUENCE,
        sequences_per_step=tokens // SEQUENCE,
        microbatch_sequences=microbatch,
        steps=train.pop("steps", RUN_TOKENS // tokens),
        gpus=gpus,
        **train,
    )  # fmt: skip


def _production(name: str, size: str, tokens: int, microbatch: int, gpus: int, **changes: Any) -> TrainConfig:
    """A production row: peri-norm, a tenth of weight decay everywhere but on gains and embeddings, constant rate after warm-up.

    The peak rate grows with the batch: base x (tokens / 8 Mi)^0.53, base 1.8e-4, or 1.2e-4 for Large and Ultra.
    """
    shapes: dict[str, dict[str, Any]] = {
        "tiny": {"d": 2048, "layers": 16, "dense": 1, "heads": (16, 4), "widths": (2048, 2048, 10240)},
        "small": {"d": 2560, "layers": 32, "dense": 1, "heads": (24, 6), "widths": (2560, 2560, 12800)},
        "medium": {"d": 3072, "layers": 39, "dense": 2, "heads": (32, 8), "widths": (3072, 3072, 15360)},
        "large": {"d": 4096, "layers": 47, "dense": 2, "heads": (40, 10), "widths": (4096, 4096, 20480)},
        "ultra": {"d": 6144, "layers": 63, "dense": 2, "heads": (64, 32), "widths": (8192, 8192, 40960)},
    }
    base = 1.2e-4 if size in ("large", "ultra") else 1.8e-4
    arguments = {
        "experts": 64, "placement": "peri", "lr": base * (tokens / (8 * MI)) ** 0.53,
        "lb": 0.01 if size == "tiny" else 0.005, "router_z": 2e-4, **shapes[size], **changes,
    }  # fmt: skip
    return _reference(name, tokens=tokens, microbatch=microbatch, gpus=gpus, **arguments)


def _benchmark(name: str, **changes: Any) -> TrainConfig:
    """A benchmark row: norms after each branch, cosine schedule, weight decay on everything but the embeddings."""
    lr, warmup, steps = changes.pop("lr", 3e-4), changes.pop("warmup", 10), changes.pop("steps", 100)
    optim = OptimConfig(
        lr=lr, schedule="cosine", warmup_steps=warmup, no_decay=("embedding",), skip_sigma=12.0
    )
    arguments = {"dense": 1, "placement": "post", "router_z": 1e-4, "capacity": 1.25, **changes}
    return _reference(name, lr=lr, optim=optim, steps=steps, **arguments)


def _ultra(name: str, **changes: Any) -> TrainConfig:
    return _production(
        name,
        "ultra",
        64 * MI,
        gpus=512,
        pp=8,
        recompute="block",
        precision="mxfp8",
        mxfp8=("mlp", "attn_qkv", "attn_out"),
        **changes,
    )


_EIGHT = {"d": 4096, "layers": 8, "heads": (32, 8), "tokens": 4 * MI, "microbatch": 2, "gpus": 8}
_GERRYMANDER: dict[str, Any] = {
    "d": 2048, "heads": (16, 4), "experts": 64, "widths": (2048, 0, 8192), "tokens": 2 * MI, "microbatch": 4,
    "gpus": 8, "lr": 4e-4, "warmup": 1000, "steps": 100 * 10**9 // (2 * MI),
}  # fmt: skip

PRESETS: dict[str, Callable[[], TrainConfig]] = {
    "laptop": laptop,
    "tiny-64e": lambda: _production("tiny-64e", "tiny", 8 * MI, 8, 16),
    "tiny-64e-ep8": lambda: _production("tiny-64e-ep8", "tiny", 8 * MI, 8, 16, ep=8),
    "small-64e": lambda: _production("small-64e", "small", 24 * MI, 3, 128, ep=8),
    "small-64e-16mi": lambda: _production("small-64e-16mi", "small", 16 * MI, 2, 128, ep=8, assignment="random"),
    "medium-64e": lambda: _production("medium-64e", "medium", 16 * MI, 2, 128, ep=8, pp=2, assignment="random"),
    "medium-96e": lambda: _production("medium-96e", "medium", 24 * MI, 2, 128, ep=8, pp=2, experts=96, assignment="random"),
    "medium-128e": lambda: _production("medium-128e", "medium", 24 * MI, 2, 128, ep=8, pp=4, experts=128, assignment="random"),
    "large-128e": lambda: _production("large-128e", "large", 32 * MI, 1, 512, ep=8, pp=4, experts=128, assignment="random"),
    "large-128e-pp8": lambda: _production("large-128e-pp8", "large", 24 * MI, 1, 512, ep=8, pp=8, experts=128, assignment="random"),
    "ultra-128e": lambda: _ultra("ultra-128e", microbatch=1, ep=8, experts=128, assignment="random"),
    "ultra-256e": lambda: _ultra("ultra-256e", microbatch=2, ep=32, experts=256, transport="deepep", assignment="random"),
    "bench-8l": lambda: _benchmark("bench-8l", **_EIGHT, experts=64, widths=(4096, 4096, 20480), lb=0.015, ep=8, assignment="random"),
    "dense-8l": lambda: _benchmark("dense-8l", **{**_EIGHT, "dense": 8}, experts=1, top_k=1, widths=(1, 0, 20480), lb=0.0),
    "profile-8l": lambda: _benchmark(
        "profile-8l", d=2560, layers=8, heads=(20, 5), experts=128, top_k=8, widths=(1280, 1280, 11520),
        tokens=512 * KI, microbatch=2, gpus=8, lb=0.015, ep=8, steps=20, assignment="random",
    ),
    "mxfp8-6l": lambda: _benchmark(
        "mxfp8-6l", d=4096, layers=6, heads=(32, 8), experts=128, top_k=8, widths=(2048, 0, 16384), tokens=512 * KI,
        microbatch=2, gpus=8, lb=0.015, ep=8, steps=20, assignment="random", precision="mxfp8",
        mxfp8=("mlp", "dispatch", "fp8_only_params"),
    ),
    "gerrymander-8l": lambda: _benchmark("gerrymander-8l", **_GERRYMANDER, layers=8, lb=0.02),
    "gerrymander-10l": lambda: _benchmark("gerrymander-10l", **_GERRYMANDER, layers=10, lb=0.05, log_every=10),
}  # fmt: skip

_SHORT = {"experts": "model.moe.n_experts", "layers": "model.n_layers", "seed": "model.init_seed"}


def names() -> list[str]:
    """All preset names, ``laptop`` first."""
    return list(PRESETS)


def get(name: str, **changes: Any) -> TrainConfig:
    """The preset ``name``, with fields changed: ``get("bench-8l", experts=8)``, ``get("laptop", steps=100, lr=1e-3)``.

    A keyword is the last part of a field's dotted path (or the path with ``__`` for the dots), or one of the short
    names ``experts``, ``layers`` and ``seed``. Raises :class:`~moe_lab.errors.ConfigError` for an unknown preset or
    field and for a value that does not fit.
    """
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}{suggestion(name, PRESETS)}")
    texts = []
    for key, value in changes.items():
        text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        texts.append(f"{_SHORT.get(key, key.replace('__', '.'))}={text}")
    return override(PRESETS[name](), texts)
