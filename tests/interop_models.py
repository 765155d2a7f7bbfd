"""Small random Hugging Face models of the five families, and what comparing with them takes."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, logging

from moe_lab.interop import load_pretrained
from moe_lab.model import Transformer

logging.disable_progress_bar()
logging.set_verbosity_error()

VOCAB = 50
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "intermediate_size": 24, "initializer_range": 0.05,
    # A padding id gives its row of the embedding no gradient in transformers; the others only matter for generation.
    "pad_token_id": None, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "olmoe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 20},
    "flex_olmo": {"num_experts": 8},
    "afmoe": {"num_experts": 8, "moe_intermediate_size": 20, "head_dim": 8},
}
# FlexOlmo with K = 1 and its weights unnormalised is left out: the norm behind the experts takes the only weight away
# again, so the router's gradient is a rounding error of eps and there is nothing to compare.
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("olmoe", "default", {}),
    ("olmoe", "normalised, tied, all heads", {"norm_topk_prob": True, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("olmoe", "top 1, eps and theta", {"num_experts_per_tok": 1, "rms_norm_eps": 1e-2, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    ("mixtral", "default", {}),
    ("mixtral", "own head_dim, window", {"head_dim": 12, "sliding_window": 4}),
    ("mixtral", "tied, top 3, eps", {"tie_word_embeddings": True, "num_experts_per_tok": 3, "rms_norm_eps": 1e-3, "num_key_value_heads": 1}),
    ("qwen3_moe", "default", {}),
    ("qwen3_moe", "normalised, own head_dim, dense by index", {"norm_topk_prob": True, "head_dim": 12, "mlp_only_layers": [1]}),
    ("qwen3_moe", "dense by step, window", {"decoder_sparse_step": 2, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5}),
    ("qwen3_moe", "tied, theta, eps", {"tie_word_embeddings": True, "rms_norm_eps": 1e-4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("flex_olmo", "default", {}),
    ("flex_olmo", "normalised, own head_dim", {"norm_topk_prob": True, "head_dim": 12}),
    ("flex_olmo", "tied, top 3", {"tie_word_embeddings": True, "num_experts_per_tok": 3, "rms_norm_eps": 1e-3}),
    ("afmoe", "two shared, window and full layers", {"num_shared_experts": 2, "sliding_window": 4, "global_attn_every_n_layers": 2, "route_scale": 2.5, "num_hidden_layers": 3}),
    ("afmoe", "one shared, scaled embeddings, all full", {"num_shared_experts": 1, "mup_enabled": True, "num_dense_layers": 0, "layer_types": ["full_attention"] * 2}),
    ("afmoe", "none shared, tied, two dense", {"num_shared_experts": 0, "tie_word_embeddings": True, "num_dense_layers": 2, "num_hidden_layers": 3, "head_dim": 12}),
]  # fmt: skip
VARIANT_IDS = [f"{family}: {name}" for family, name, _ in VARIANTS]


def theirs(family: str, options: dict[str, Any] | None = None, seed: int = 0) -> nn.Module:
    """A model of transformers, eager paths only, every parameter random: gains about 1, biases not 0."""
    config = AutoConfig.for_model(family, **{**BASE, **FAMILIES[family], **(options or {})})
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            gain = name.endswith("norm.weight") or "layernorm" in name
            parameter.copy_(1 + 0.3 * noise if gain else 0.2 * noise)
    return model.eval()


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``model`` in ``dtype``; RoPE's frequencies stay fp32, in which both sides compute angles by definition."""
    frequencies = model.model.rotary_emb.inv_freq
    model.to(dtype)
    model.model.rotary_emb.inv_freq = frequencies.float()
    return model


class DoubleStaysDouble(TorchFunctionMode):
    """Refuses to round fp64 to fp32.

    transformers computes norms, both softmaxes and router scores in fp32 by name, in a fp64 model too, which limits any
    comparison to 1e-7. Under this mode those casts keep a fp64 tensor as it is, and the same code runs in fp64.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if function is Tensor.float:
                return args[0]
            if function is Tensor.to:
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def ours(model: nn.Module, folder: Path, dtype: torch.dtype | None = None) -> Transformer:
    """The same model as one of ours, by way of ``save_pretrained`` and a folder."""
    model.save_pretrained(folder)
    return load_pretrained(folder, dtype=dtype)


def gradients_as_ours(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The gradients of a transformers model by our parameters' names: saved and loaded in place of the weights."""
    with torch.no_grad():
        carrier = copy.deepcopy(model)
        for parameter, source in zip(carrier.parameters(), model.parameters()):
            gradient = source.grad if source.grad is not None else torch.zeros_like(source)
            parameter.copy_(gradient)
    return dict(ours(carrier, folder).named_parameters())


def relative(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b| in the 2-norm, in fp64; |a| where b is all zero."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / (b.norm() if b.norm() > 0 else 1.0))
