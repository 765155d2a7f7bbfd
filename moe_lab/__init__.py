"""moe_lab: mixture-of-experts training, from one notebook cell to a cluster.

The folders from the bottom up: ``ops`` (how one operation is computed fast), ``routing``, ``plan``, ``data``,
``launch``, ``sim`` (what the rest leans on), ``model`` (what is computed), ``parallel`` (where), ``train`` (the loop),
``checks`` and ``bench``, ``viz`` and ``cli``. A folder imports lower ones only.
"""

__version__ = "0.1.0"
