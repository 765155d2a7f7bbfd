"""Which functions can run on ranks: those that another process can import by name."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

from moe_lab.errors import ConfigError


def reference(fn: Callable[..., Any] | str, arguments: Mapping[str, Any]) -> str:
    """``"module:function"`` for ``fn``, after checking that ranks can import it and that it takes ``arguments``.

    Raises :class:`ConfigError` for a function of a notebook cell or script (module ``__main__``), a lambda, an inner
    function, a bound method or any other object that has no importable name, and for arguments that do not fit. A
    string is only checked for its form: the kernel does not import what only ranks need.
    """
    if isinstance(fn, str):
        module, separator, name = fn.partition(":")
        if not (separator and all(part.isidentifier() for part in (*module.split("."), *name.split(".")))):
            raise ConfigError(f"{fn!r} names no function: write it as 'package.module:function'")
        if module == "__main__":
            raise ConfigError(_HOW_TO_MOVE.format(name=name))
        return fn
    if isinstance(fn, functools.partial):
        raise ConfigError(
            "a functools.partial cannot be run on ranks: pass the function, and its arguments as keywords of run()"
        )
    module, name = getattr(fn, "__module__", None) or "", getattr(fn, "__qualname__", "")
    if not callable(fn) or not name:
        raise ConfigError(
            f"run() takes an importable function or 'module:function', but got a {type(fn).__name__}: {fn!r}"
        )
    if "<lambda>" in name or "<locals>" in name:
        kind = "a lambda" if "<lambda>" in name else "defined inside another function"
        raise ConfigError(
            f"{name} is {kind}, which other processes cannot import: define it at the top level of a module's file"
        )
    if module == "__main__":
        raise ConfigError(_HOW_TO_MOVE.format(name=name))
    try:
        importable = operator.attrgetter(name)(sys.modules[module]) is fn
    except (KeyError, AttributeError):
        importable = False
    if not importable:
        raise ConfigError(
            f"ranks cannot import {name} from {module}: pass a function that is found there under its own name"
        )
    try:
        inspect.signature(fn).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{module}:{name}{inspect.signature(fn)} cannot be called with these arguments: {error}"
        ) from None
    except ValueError:
        pass  # some built-in functions have no signature
    return f"{module}:{name}"


def resolve(target: str) -> Callable[..., Any]:
    """Import what :func:`reference` named. Raises whatever the import raises."""
    module, _, name = target.partition(":")
    fn = operator.attrgetter(name)(importlib.import_module(module))
    if not callable(fn):
        raise TypeError(f"{target} is a {type(fn).__name__}, not a function")
    return fn


_HOW_TO_MOVE = (
    "{name} is defined in a notebook cell or script (module __main__), which other processes cannot import: "
    "move it to a file, for example with %%writefile my_ranks.py, then import my_ranks and run my_ranks.{name}"
)
