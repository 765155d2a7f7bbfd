"""What our parameters are called on disk. Lesson: 08_full_stack.

Each parameter of ours is the tensors of a list, one after the other in row-major order: ``qkv`` is the query, key and
value maps, ``gate_up`` of an MLP is gate and up, and an expert stack is the experts' gate and up, or down, in turn. So a
parameter is filled, and written, piece by piece, and no piece is ever copied twice.

Checkpoints hold experts under one name each, as the published ones do and as ``save_pretrained`` of transformers 5
writes by default, or fused as its modules hold them (``save_original_format=False``); both are read, the first is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_lab.config import ModelConfig
from moe_lab.interop.families import Family


@dataclass(frozen=True)
class Piece:
    """One tensor on disk."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


Alternatives = tuple[list[Piece], ...]  # ways to store one parameter; the first is the one that is written


def layout(family: Family, config: ModelConfig) -> dict[str, Alternatives]:
    """Our parameter (or buffer) name -> the tensors that hold it, in the order of the model's ``state_dict``."""
    d = config.d_model
    found: dict[str, Alternatives] = {}

    def one(name: str, theirs: str, *shape: int) -> None:
        found[name] = ([Piece(theirs, shape)],)

    def mlp(name: str, theirs: str, hidden: int) -> None:
        gate_up = [Piece(f"{theirs}.{part}_proj.weight", (hidden, d)) for part in ("gate", "up")]
        found[f"{name}.gate_up.weight"] = (gate_up,)
        one(f"{name}.down.weight", f"{theirs}.down_proj.weight", d, hidden)

    one("embedding.weight", "model.embed_tokens.weight", config.vocab_size, d)
    for layer in range(config.n_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        _attention(found, family, config, f"{ours}.attention", f"{theirs}.self_attn")
        for norm, name in family.norms.items():
            one(f"{ours}.{norm}.weight", f"{theirs}.{name}.weight", d)
        if layer in config.dense_layers:
            mlp(f"{ours}.ffn", f"{theirs}.mlp", config.dense_hidden)
        else:
            assert config.moe is not None
            _experts(found, family, config, f"{ours}.ffn", theirs)
            if config.moe.shared_hidden:
                mlp(f"{ours}.ffn.shared", f"{theirs}.mlp.shared_experts", config.moe.shared_hidden)
    one("norm.weight", "model.norm.weight", d)
    if not config.tie_embeddings:
        one("head.weight", "lm_head.weight", config.vocab_size, d)
    return found


def _attention(
    found: dict[str, Alternatives], family: Family, config: ModelConfig, ours: str, theirs: str
) -> None:
    attention, d = config.attention, config.d_model
    query = attention.n_heads * attention.head_dim
    key = attention.n_kv_heads * attention.head_dim
    rows = {"q": query, "k": key, "v": key}
    found[f"{ours}.qkv.weight"] = ([Piece(f"{theirs}.{p}_proj.weight", (n, d)) for p, n in rows.items()],)
    found[f"{ours}.out.weight"] = ([Piece(f"{theirs}.o_proj.weight", (d, query))],)
    if family.gate:
        found[f"{ours}.gate.weight"] = ([Piece(f"{theirs}.gate_proj.weight", (query, d))],)
    if family.qk_norm != "none":
        for part in ("q", "k"):
            width = attention.head_dim if family.qk_norm == "head" else rows[part]
            found[f"{ours}.{part}_norm.weight"] = ([Piece(f"{theirs}.{part}_norm.weight", (width,))],)


def _experts(
    found: dict[str, Alternatives], family: Family, config: ModelConfig, ours: str, layer: str
) -> None:
    moe, d = config.moe, config.d_model
    assert moe is not None
    experts, hidden = range(moe.n_experts), moe.expert_hidden
    classic, fused = f"{layer}.{family.moe}", f"{layer}.mlp"
    router = (moe.n_experts, d)
    found[f"{ours}.router.weight"] = tuple(
        [Piece(f"{module}.{family.router}", router)] for module in dict.fromkeys((classic, fused))
    )
    if moe.selection_bias:
        found[f"{ours}.router.selection_bias"] = ([Piece(f"{layer}.mlp.expert_bias", (moe.n_experts,))],)
    gate, up, down = family.expert

    def apart(e: int, part: str, *shape: int) -> Piece:
        return Piece(f"{classic}.experts.{e}.{part}.weight", shape)

    found[f"{ours}.experts.gate_up"] = (
        [apart(e, part, hidden, d) for e in experts for part in (gate, up)],
        [Piece(f"{fused}.experts.gate_up_proj", (moe.n_experts, 2 * hidden, d))],
    )
    found[f"{ours}.experts.down"] = (
        [apart(e, down, d, hidden) for e in experts],
        [Piece(f"{fused}.experts.down_proj", (moe.n_experts, d, hidden))],
    )


def zeros(family: Family, config: ModelConfig) -> list[Piece]:
    """Tensors that the family's class has and ``config`` does without: a bias of zeros, shared experts of width 0."""
    moe, d = config.moe, config.d_model
    if family.name != "afmoe" or moe is None:
        return []
    shared = [] if moe.shared_hidden else [("gate", (0, d)), ("up", (0, d)), ("down", (d, 0))]
    found = []
    for layer in config.moe_layers:
        module = f"model.layers.{layer}.mlp"
        if not moe.selection_bias:
            found.append(Piece(f"{module}.expert_bias", (moe.n_experts,)))
        found += [Piece(f"{module}.shared_experts.{part}_proj.weight", shape) for part, shape in shared]
    return found
