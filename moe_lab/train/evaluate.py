"""Looking at a model in training: loss on validation, a sample of text, the whole weights. Lesson: 00_start_here.

Where weights are shared out, over expert-parallel ranks or by FSDP2, all ranks call these together.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from moe_lab.data import Tokenizer
from moe_lab.model import Transformer, cross_entropy
from moe_lab.parallel import Group, sum_over_ranks
from moe_lab.train.generate import generate

SAMPLE_PROMPT = "And the LORD said"


@torch.no_grad()
def validation_loss(
    model: Transformer, batches: Iterable[tuple[Tensor, Tensor, Tensor | None]], device: torch.device
) -> float:
    """Cross-entropy in nats a label over all ranks' ``batches`` of (inputs, labels, document ids or None)."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    for tokens, labels, documents in batches:
        part = cross_entropy(model(tokens, documents), labels)
        sums += torch.stack([part.cross_entropy.double(), part.labels.double()])
    model.train()
    loss, count = sum_over_ranks(sums).tolist()
    return loss / count


def sample_text(model: Transformer, tokenizer: Tokenizer, tokens: int, context: int) -> str:
    """:data:`SAMPLE_PROMPT` and ``tokens`` sampled after it, seeing at most ``context`` at a time."""
    prompt = [int(i) for i in tokenizer.encode(SAMPLE_PROMPT)]
    ids = generate(model, prompt, tokens, context=context)
    return tokenizer.decode([i for i in ids if i < tokenizer.vocab_size])


def whole_state(model: Transformer, ep: Group) -> dict[str, Tensor]:
    """The weights and buffers of the whole model, put together from the ranks that share them."""
    whole = {}
    for name, tensor in model.state_dict().items():
        if hasattr(tensor, "full_tensor"):  # FSDP2's
            tensor = tensor.full_tensor()
        elif ".experts." in name and ep.size > 1:
            parts = [torch.empty_like(tensor) for _ in range(ep.size)]
            torch.distributed.all_gather(parts, tensor.contiguous(), group=ep.handle)
            tensor = torch.cat(parts)
        whole[name] = tensor
    return whole
