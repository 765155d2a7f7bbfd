"""Typed fields: checking a frozen dataclass against its annotations, and moving it to and from plain values.

``config.py`` is written with these. Lesson: 00_start_here.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from moe_lab.errors import ConfigError

T = TypeVar("T")


def fail(owner: object, name: str, allowed: str) -> typing.NoReturn:
    """Raise the :class:`ConfigError` for field ``name`` of ``owner``: its value, and what is ``allowed``."""
    raise ConfigError(f"{type(owner).__name__}.{name} is {getattr(owner, name)!r}, but must be {allowed}")


def check_types(owner: object) -> None:
    """Hold each field against its annotation: ``int`` takes no bool or float, ``float`` takes ints, Literals list all."""
    hints = get_type_hints(type(owner))
    for item in dataclasses.fields(owner):  # type: ignore[arg-type]
        value, hint = getattr(owner, item.name), hints[item.name]
        if not _matches(value, hint):
            fail(owner, item.name, describe_type(hint))
        if isinstance(value, float) and not math.isfinite(value):
            fail(owner, item.name, "a finite number")


def _matches(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint) and not isinstance(value, bool)
    if origin in (types.UnionType, typing.Union):
        return any(_matches(value, option) for option in get_args(hint))
    if origin is tuple:
        return isinstance(value, tuple) and all(_matches(v, get_args(hint)[0]) for v in value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint)


def describe_type(hint: Any) -> str:
    """A type annotation in words, as error messages and ``--help`` use it."""
    origin = get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe_type(option) for option in get_args(hint))
    if origin is tuple:
        return f"a list, each item {describe_type(get_args(hint)[0])}"
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        types.NoneType: "none",
    }
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def at_least(owner: object, minimum: float, *names: str) -> None:
    """Raise unless each named field of ``owner`` is ``minimum`` or more."""
    for name in names:
        if getattr(owner, name) < minimum:
            fail(owner, name, f"at least {minimum}")


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as nested plain dicts, ready for JSON."""
    result: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            value = to_dict(value)
        result[item.name] = list(value) if isinstance(value, tuple) else value
    return result


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted names: ``{"optim": {"lr": 1}} -> {"optim.lr": 1}``."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, dict)
        flat.update(flatten(value, f"{prefix}{name}.") if inner else {prefix + name: value})
    return flat


def from_dict(cls: type[T], values: dict[str, Any]) -> T:
    """The configuration of class ``cls`` that :func:`to_dict` made ``values`` from; unknown or missing names are errors."""
    hints = get_type_hints(cls)
    fields = {item.name: item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise ConfigError(f"{cls.__name__} has no field {name!r}{suggestion(name, fields)}")
    missing = [
        n for n, f in fields.items()
        if n not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]  # fmt: skip
    if missing:
        raise ConfigError(f"{cls.__name__} needs {', '.join(missing)}, which the given values lack")
    arguments = {}
    for name, value in values.items():
        nested = _dataclass_in(hints[name])
        if nested is not None and isinstance(value, dict):
            value = from_dict(nested, value)
        arguments[name] = tuple(value) if isinstance(value, list) else value
    return cls(**arguments)


def _dataclass_in(hint: Any) -> type[Any] | None:
    options = get_args(hint) if get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    return next((option for option in options if dataclasses.is_dataclass(option)), None)  # type: ignore[return-value]


def suggestion(name: str, known: typing.Iterable[str]) -> str:
    """``: did you mean ...?`` for the closest of ``known``, or the whole list when none is close."""
    known = sorted(set(known))
    close = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {close[0]!r}?" if close else f": known are {', '.join(known)}"


def override(config: T, assignments: list[str]) -> T:
    """``config`` with ``name=value`` texts applied; a name is a dotted path or a last part that occurs only once.

    Example: ``override(cfg, ["model.moe.n_experts=16", "lr=1e-3", "dense_layers=0,1"])``. All are applied before the
    result is checked, so values that only fit together can be given together.
    """
    values = to_dict(config)
    paths = _leaf_types(type(config), values)
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text!r} is not of the form name=value")
        matches = [p for p in paths if p == name] or [
            p for p in paths if p.split(".")[-1] == name or p.endswith("." + name)
        ]
        if len(matches) > 1:
            raise ConfigError(f"{name!r} could be {' or '.join(matches)}: give the longer name")
        if not matches:
            leaves = [p for path in paths for p in (path, path.split(".")[-1])]
            raise ConfigError(f"the configuration has no field {name!r}{suggestion(name, leaves)}")
        node = values
        *parents, leaf = matches[0].split(".")
        for parent in parents:
            node = node[parent]
        node[leaf] = parse(value, paths[matches[0]], matches[0])
    return from_dict(type(config), values)


def _leaf_types(cls: type[Any], values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    hints = get_type_hints(cls)
    leaves: dict[str, Any] = {}
    for name, value in values.items():
        nested = _dataclass_in(hints[name])
        if nested is not None and isinstance(value, dict):
            leaves.update(_leaf_types(nested, value, f"{prefix}{name}."))
        elif nested is None:
            leaves[prefix + name] = hints[name]
    return leaves


def parse(text: str, hint: Any, name: str) -> Any:
    """``text`` as a value of the annotation ``hint``: numbers, true/false, none, words, and lists with commas."""
    for option in get_args(hint) if get_origin(hint) in (types.UnionType, typing.Union) else (hint,):
        value = _parse_one(text.strip(), option)
        if value is not None or (option is types.NoneType and text.strip().lower() == "none"):
            return value
    raise ConfigError(f"{name} is {text!r}, but must be {describe_type(hint)}")


def _parse_one(text: str, hint: Any) -> Any:
    if get_origin(hint) is tuple:
        parts = [part for part in text.strip("[]()").replace(" ", "").split(",") if part]
        items = [_parse_one(part, get_args(hint)[0]) for part in parts]
        return None if any(item is None for item in items) else items
    if get_origin(hint) is Literal:
        return text if text in get_args(hint) else None
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower())
    if hint in (int, float):
        try:
            return int(text.replace("_", "")) if hint is int else float(text)
        except ValueError:
            return None
    return text if hint is str else None
