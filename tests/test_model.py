"""The model against plain definitions: the MoE layer by a loop over tokens, attention by explicit scores, initial weights."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from moe_lab import presets
from moe_lab.config import AttentionConfig, ModelConfig, MoEConfig
from moe_lab.model import IGNORE, MoELayer, build, cross_entropy
from moe_lab.model.attention import Attention, Context
from moe_lab.model.init import initialize
from moe_lab.model.moe import inject_loss
from moe_lab.routing import balance_loss, load_balancing_score, router_z_loss

D = 16


def moe_layer(**options: object) -> MoELayer:
    values: dict = {"n_experts": 6, "top_k": 2, "expert_hidden": 10, "shared_hidden": 7, **options}
    layer = MoELayer(MoEConfig(**values), D).double()
    initialize(layer, 0.3, seed=3)
    return layer


def swiglu_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (gate_up @ x).chunk(2)
    return down @ (F.silu(gate) * up)


def by_hand(layer: MoELayer, x_TD: torch.Tensor) -> torch.Tensor:
    """y_t token by token, expert by expert, from the formulas of the configuration."""
    config = layer.config
    routed, shared = config.merge_coefficients()
    rows = []
    for x in x_TD:
        logits = layer.router.weight @ x
        scores = torch.sigmoid(logits) if config.gating == "sigmoid" else torch.softmax(logits, 0)
        preference = scores + (layer.router.selection_bias if config.selection_bias else 0.0)
        chosen = preference.topk(config.top_k).indices
        p = torch.softmax(logits[chosen], 0) if config.gating == "topk_softmax" else scores[chosen]
        if config.normalize_weights and config.gating != "topk_softmax":
            p = p / p.sum()
        y = sum(
            routed * p[i] * swiglu_mlp(x, layer.experts.gate_up[e], layer.experts.down[e])
            for i, e in enumerate(chosen)
        )
        if config.shared_hidden:
            y = y + shared * swiglu_mlp(x, layer.shared.gate_up.weight, layer.shared.down.weight)
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"shared_hidden": 0}, {"top_k": 1}, {"top_k": 6}, {"gating": "sigmoid"}, {"gating": "topk_softmax"},
        {"normalize_weights": False}, {"merge": "unit_sum"}, {"merge": "equal_mass"}, {"merge": "width_proportional"},
        {"routed_scale": 2.5, "gating": "sigmoid"}, {"selection_bias": True}, {"selection_bias": True, "gating": "sigmoid"},
    ],
)  # fmt: skip
def test_moe_layer_equals_the_formulas(options: dict) -> None:
    layer = moe_layer(balance_loss=0.0, **options)
    if layer.config.selection_bias:
        layer.router.selection_bias.copy_(torch.linspace(-0.4, 0.4, 6))
    x = torch.randn(2, 5, D, dtype=torch.float64, requires_grad=True)
    y, expected = layer(x), by_hand(layer, x.reshape(-1, D)).view(2, 5, D)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
    upstream = torch.randn_like(y)
    inputs = [x, *layer.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(y, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        rtol=1e-9,
        atol=1e-11,
    )


def test_an_expert_without_tokens_gets_a_zero_gradient() -> None:
    layer = moe_layer(selection_bias=True)
    layer.router.selection_bias[4] = -9.0
    layer(torch.randn(1, 30, D, dtype=torch.float64)).sum().backward()
    assert not layer.experts.gate_up.grad[4].any()
    assert layer.experts.gate_up.grad[0].any()


def test_benchmark_assignments() -> None:
    uniform = moe_layer(assignment="uniform")
    uniform(torch.randn(1, 12, D, dtype=torch.float64))
    assert uniform.stats.counts.tolist() == [4] * 6
    random = moe_layer(assignment="random")
    random.router.weight.data.zero_()
    random.router.weight.data[0] = 5.0
    random(torch.ones(1, 600, D, dtype=torch.float64))
    assert max(random.stats.counts.tolist()) < 300
    random(torch.ones(1, 4, D, dtype=torch.float64)).sum().backward()
    assert random.router.weight.grad.any()


@pytest.mark.parametrize("scope", ["microbatch", "sequence"])
def test_auxiliary_losses_enter_backward_once(scope: str) -> None:
    layer = moe_layer(balance_loss=0.3, router_z_loss=0.2, balance_scope=scope)
    x = torch.randn(3, 8, D, dtype=torch.float64)
    context = Context((x, x), None, 0.25, {})
    (gradient,) = torch.autograd.grad(layer(x, context).sum() * 0.0, layer.router.weight)
    routing = layer.router(x.view(-1, D))
    scores = routing.scores.view(3, 8, 6)
    chosen = F.one_hot(routing.indices.long(), 6).sum(1).view(3, 8, 6)
    if scope == "sequence":
        per = [6 * (chosen[b].sum(0) / 16 * scores[b].mean(0)).sum() for b in range(3)]
        balance = torch.stack(per).mean()
    else:
        balance = 6 * (chosen.sum((0, 1)) / 48 * scores.mean((0, 1))).sum()
    z = torch.logsumexp(x.view(-1, D) @ layer.router.weight.T, -1).square().mean()
    (expected,) = torch.autograd.grad(0.25 * (0.3 * balance + 0.2 * z), layer.router.weight)
    torch.testing.assert_close(gradient, expected)
    assert layer.stats.balance.item() == pytest.approx(balance.item())
    assert layer.stats.z.item() == pytest.approx(z.item())
    layer.eval()
    layer.stats.clear()
    layer(x)
    assert layer.stats.counts is None


def test_inject_loss_changes_nothing_forward() -> None:
    x = torch.randn(3, requires_grad=True)
    weight = torch.tensor(2.0, requires_grad=True)
    y = inject_loss(x, weight**2)
    assert torch.equal(x, y)
    y.sum().backward()
    assert weight.grad == 4.0


def test_balance_is_one_when_balanced() -> None:
    probs = torch.full((8, 4), 0.25)
    indices = torch.arange(16).view(8, 2) % 4
    assert load_balancing_score(probs, indices) == pytest.approx(1.0)
    # The example of two experts where the score falls below 1 while the load is 4 to 2 (report, section 10.7).
    probs = torch.tensor([[1.0, 0.0]] * 2 + [[0.4, 0.6]] * 4)
    assert load_balancing_score(probs, probs.argmax(1, keepdim=True)) == pytest.approx(14 / 15)
    assert balance_loss(probs[None], torch.tensor([[2, 4]]), 1) == pytest.approx(14 / 15)
    assert router_z_loss(torch.zeros(5, 4)) == pytest.approx(math.log(4) ** 2)


def explicit_attention(
    module: Attention, x: torch.Tensor, documents: torch.Tensor | None, theta: float
) -> torch.Tensor:
    """Scores written out, one head at a time; rotation as complex multiplication."""
    config = module.config
    batch, length, _ = x.shape
    heads = config.n_heads + 2 * config.n_kv_heads
    projected = (x @ module.qkv.weight.T).view(batch, length, heads, config.head_dim)

    def norm(t: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        return t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + eps) * gain

    q, k, v = projected.split([config.n_heads, config.n_kv_heads, config.n_kv_heads], dim=2)
    if config.qk_norm == "full":
        q = norm(q.flatten(2), module.q_norm.weight, module.q_norm.eps).view(q.shape)
        k = norm(k.flatten(2), module.k_norm.weight, module.k_norm.eps).view(k.shape)
    if config.qk_norm == "head":
        q, k = (
            norm(q, module.q_norm.weight, module.q_norm.eps),
            norm(k, module.k_norm.weight, module.k_norm.eps),
        )
    if module.use_rope:
        half = config.head_dim // 2
        frequency = theta ** (-torch.arange(half, dtype=torch.float64) * 2 / config.head_dim)
        turn = torch.polar(
            torch.ones(length, half, dtype=torch.float64),
            torch.outer(torch.arange(length).double(), frequency),
        )

        def rotated(t: torch.Tensor) -> torch.Tensor:
            z = torch.complex(t[..., :half], t[..., half:]) * turn[None, :, None]
            return torch.cat([z.real, z.imag], -1)

        q, k = rotated(q), rotated(k)
    out = torch.zeros(batch, length, config.n_heads, config.head_dim, dtype=x.dtype)
    for b in range(batch):
        for h in range(config.n_heads):
            group = h * config.n_kv_heads // config.n_heads
            scores = q[b, :, h] @ k[b, :, group].T / config.head_dim**0.5
            for i in range(length):
                for j in range(length):
                    hidden = j > i or (module.window and i - j >= module.window)
                    if hidden or (documents is not None and documents[b, i] != documents[b, j]):
                        scores[i, j] = -math.inf
            out[b, :, h] = torch.softmax(scores, -1) @ v[b, :, group]
    y = out.flatten(2)
    if config.gate:
        y = y * torch.sigmoid(x @ module.gate.weight.T)
    return y @ module.out.weight.T


@pytest.mark.parametrize(
    "options",
    [
        {}, {"qk_norm": "none"}, {"qk_norm": "full"}, {"n_kv_heads": 4}, {"n_kv_heads": 1}, {"window": 3}, {"gate": True},
        {"window": 3, "full_layers": (0,), "rope_in_full_layers": False}, {"documents": True}, {"documents": True, "window": 4},
    ],
)  # fmt: skip
def test_attention_equals_explicit_scores(options: dict) -> None:
    options = dict(options)
    use_documents = options.pop("documents", False)
    config = AttentionConfig(**{"n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "rope_theta": 100.0, **options})
    module = Attention(config, D, 1e-5, layer=0).double()
    initialize(module, 0.4, seed=5)
    for name, parameter in module.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    x = torch.randn(2, 9, D, dtype=torch.float64)
    documents = torch.tensor([[0] * 4 + [1] * 5, [0] * 9]) if use_documents else None
    context = Context.make(x, config, documents, 1.0)
    # RoPE angles are fp32 in the module, hence 1e-6 and not 1e-12.
    torch.testing.assert_close(
        module(x, context), explicit_attention(module, x, documents, 100.0), rtol=1e-6, atol=1e-6
    )


def small(**changes: object) -> ModelConfig:
    return presets.get(
        "laptop",
        n_layers=2,
        d_model=32,
        n_heads=2,
        n_kv_heads=1,
        head_dim=16,
        expert_hidden=16,
        shared_hidden=8,
        **changes,
    ).model


def test_documents_see_nothing_of_each_other() -> None:
    model = build(small(), dtype=torch.float64).eval()
    tokens = torch.randint(0, 256, (1, 12))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    apart = model(tokens[:, :5]), model(tokens[:, 5:])
    together = model(tokens, documents)
    torch.testing.assert_close(together[:, :5], apart[0], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(together[:, 5:], apart[1], rtol=1e-5, atol=1e-7)
    assert not torch.allclose(model(tokens)[:, 5:], together[:, 5:], atol=1e-4)


@pytest.mark.parametrize("placement", ["peri", "pre", "post"])
def test_norm_placements(placement: str) -> None:
    model = build(small(norm_placement=placement), dtype=torch.float64).eval()
    block = model.blocks[0]
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    context = Context.make(x, model.config.attention, None, 1.0)

    def norm(t: torch.Tensor, used: bool) -> torch.Tensor:
        return t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6) if used else t

    before, after = placement != "post", placement != "pre"
    h = x + norm(block.attention(norm(x, before), context), after)
    expected = h + norm(block.ffn(norm(h, before), context), after)
    torch.testing.assert_close(block(x, context), expected)


def test_embedding_scale_norm_and_tied_head() -> None:
    model = build(small(embed_norm=False, tie_embeddings=True), dtype=torch.float64)
    tokens = torch.tensor([[3, 7]])
    torch.testing.assert_close(model.embed(tokens), model.embedding.weight[tokens] * 32**0.5)
    assert not any("head" in name for name, _ in model.named_parameters())
    plain = build(small(embed_scale=False), dtype=torch.float64)
    row = plain.embedding.weight[3]
    torch.testing.assert_close(plain.embed(tokens)[0, 0], row * torch.rsqrt(row.pow(2).mean() + 1e-6))


def test_initial_weights_depend_on_seed_name_and_expert_only() -> None:
    first, second = build(small()), build(small())
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters()):
        assert torch.equal(a, b), name
    more = build(small(experts=12))
    assert torch.equal(more.blocks[0].ffn.experts.gate_up[:8], first.blocks[0].ffn.experts.gate_up)
    assert not torch.equal(first.blocks[0].ffn.experts.down, first.blocks[1].ffn.experts.down)
    assert not torch.equal(build(small(seed=7)).head.weight, first.head.weight)
    weight = first.head.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert weight.abs().max() <= 0.06


def test_a_share_of_the_experts_starts_as_on_one_process() -> None:
    from moe_lab.model.experts import Experts

    whole, part = Experts(8, 6, 4), Experts(2, 6, 4, first=6)
    initialize(whole, 0.02, 1)
    initialize(part, 0.02, 1)
    assert torch.equal(whole.gate_up[6:], part.gate_up)


def test_loss_sums_leave_ignored_labels_out() -> None:
    logits = torch.randn(2, 5, 11, dtype=torch.float64)
    labels = torch.randint(0, 11, (2, 5))
    labels[0, :3] = IGNORE
    sums = cross_entropy(logits, labels)
    assert sums.labels == 7
    assert sums.cross_entropy == pytest.approx(
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
    )
    assert sums.z == pytest.approx(logits[labels != IGNORE].logsumexp(-1).square().sum().item())
    assert cross_entropy(logits.bfloat16(), labels).cross_entropy.dtype == torch.float32


@pytest.mark.parametrize("mode", ["auto", "reference"])
def test_a_step_trains_every_parameter(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_LAB_OPS", mode)
    model = build(small(), dtype=torch.float64)
    tokens = torch.randint(0, 256, (4, 32))
    sums = cross_entropy(model(tokens), tokens.roll(-1, 1))
    (sums.cross_entropy / sums.labels).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
    assert sums.cross_entropy.item() / 128 == pytest.approx(math.log(256), rel=0.05)
