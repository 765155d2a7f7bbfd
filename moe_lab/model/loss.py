"""The training loss: summed cross-entropy and z-loss over the positions that have a label. Lesson: 01_moe_layer.

Sums, not means: the trainer divides by the number of labels of the whole step over all ranks, so that every label
counts the same however it is spread over microbatches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100  # label of a position that is not predicted


@dataclass
class LossSums:
    """``cross_entropy`` in nats and ``z``, the sum of logsumexp(logits)^2, both scalars summed over ``labels`` positions."""

    cross_entropy: Tensor
    z: Tensor
    labels: Tensor


def cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> LossSums:
    """Sums over the labels that are not :data:`IGNORE`; in fp32 at least."""
    precise = torch.promote_types(logits_BSV.dtype, torch.float32)
    logits_TV = logits_BSV.reshape(-1, logits_BSV.shape[-1]).to(precise)
    labels_T = labels_BS.reshape(-1)
    counted = labels_T != IGNORE
    log_z = logits_TV.logsumexp(-1)
    picked = logits_TV.gather(1, labels_T.clamp_min(0).unsqueeze(1)).squeeze(1)
    zero = log_z.new_zeros(())
    return LossSums(
        cross_entropy=torch.where(counted, log_z - picked, zero).sum(),
        z=torch.where(counted, log_z.square(), zero).sum(),
        labels=counted.sum(),
    )
