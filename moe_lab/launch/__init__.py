"""Several ranks on this machine, started from a notebook, a script or a test.

``run(fn, ranks=4)`` calls an importable function on every rank of a fresh process group and returns their results::

    from moe_lab import launch
    launch.run("my_module:train_a_little", ranks=4, timeout_s=60, steps=10)   # -> [dict of rank 0, ..., of rank 3]

How it works, and why it is a call of a tenth of a second and not of four seconds:

- :mod:`~moe_lab.launch.run` (in the kernel) checks the call, then talks to
- :mod:`~moe_lab.launch.agent`, a warm process that has imported torch once and forks the ranks;
- :mod:`~moe_lab.launch.worker` is what happens inside a rank;
- :mod:`~moe_lab.launch.diagnose` turns what the ranks left behind into one error that names the right rank.

Everything passes through small files in one folder (``rank<k>.log``, ``.json``, ``.beat``, ``.stack``), so a run that
went wrong can be read with a text editor. Importing this package imports no torch.
"""

from moe_lab.launch.beats import heartbeat
from moe_lab.launch.client import shutdown
from moe_lab.launch.run import run

__all__ = ["heartbeat", "run", "shutdown"]
