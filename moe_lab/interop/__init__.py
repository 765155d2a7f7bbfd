"""Hugging Face checkpoints in and out: OLMoE, Mixtral, Qwen3-MoE, FlexOlmo and AFMoE. Lesson: 08_full_stack.

``load_pretrained(folder)`` is such a model as one of ours, ``import_checkpoint(folder, out)`` the same as a folder that
training can start from (``TrainConfig.initial_model``), ``save_pretrained(model, folder)`` and
``export_checkpoint(folder, out)`` the way back. All work on safetensors, a tensor at a time; none needs transformers.

The function is the same both ways, to rounding. Three things differ around it:

* The balance loss. For L MoE layers of E experts and K choices, transformers computes one term over all layers' tokens
  together, E sum_i c_i P_i with c_i the tokens that chose expert i over all tokens: the c_i sum to K, so it is K at
  balance, where ours is 1 (f_i = c_i / K), once a layer. For one layer theirs is K times ours; for several it is K times
  ours of the layers' tokens taken together. ``model_config`` sets the weight accordingly. AFMoE has no such loss.
* ``pad_token_id``: transformers gives that row of the embedding no gradient; here it has one.
* Padding: pass ``documents_BS`` with a negative number where ``attention_mask`` is 0.
"""

from moe_lab.interop.command import cli_export, cli_import
from moe_lab.interop.families import FAMILIES
from moe_lab.interop.options import model_config
from moe_lab.interop.reader import import_checkpoint, load_pretrained
from moe_lab.interop.writer import export_checkpoint, save_pretrained

__all__ = [
    "FAMILIES",
    "cli_export",
    "cli_import",
    "export_checkpoint",
    "import_checkpoint",
    "load_pretrained",
    "model_config",
    "save_pretrained",
]
