"""What is computed: attention, router, dispatch, experts, block, transformer, loss. Knows no process group.

A reader can follow a token through ``transformer.py`` -> ``block.py`` -> ``attention.py`` and ``moe.py`` ->
``router.py`` -> ``dispatch.py`` -> ``experts.py``. Lesson: 01_moe_layer.

Shape legend, here and in ``ops`` and ``parallel``: T tokens, K chosen experts a token, E experts, L local experts,
R rows, D model width, F expert width, S sequence, B batch, V vocabulary, H heads, C head dimension.
"""

from moe_lab.model.dispatch import ExpertTransport, LocalTransport, Routing
from moe_lab.model.loss import IGNORE, LossSums, cross_entropy
from moe_lab.model.moe import MoELayer
from moe_lab.model.transformer import Transformer, build

__all__ = [
    "IGNORE",
    "ExpertTransport",
    "LocalTransport",
    "LossSums",
    "MoELayer",
    "Routing",
    "Transformer",
    "build",
    "cross_entropy",
]
