"""Values for a notebook's parameters: from a command line's text, or from Python, to the declared type.

Types: ``int``, ``float``, ``bool``, ``str``, ``list`` and ``list[T]``, ``dict``, ``Literal[...]``, ``Optional[T]`` and
``T | None``. As text, booleans are ``true`` or ``false``; a float may be ``1e-3``; a list is JSON, or ``1,2,4`` where it is
flat; a dict is a JSON object; ``none`` is None where the type allows that. A Python value must have the type already,
but for an int where a float is declared. Types are annotations as the ``ast`` module parses them: nothing is evaluated.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any


class MismatchError(Exception):
    """A value that does not fit a type; the message says what would."""


def convert(value: object, type_: ast.expr, text: bool) -> Any:
    """``value`` as ``type_``, an annotation; ``text``: it may be a command line's spelling of that type.

    Raises :class:`MismatchError` where it does not fit.
    """
    if isinstance(type_, ast.Constant) and isinstance(type_.value, str):  # a quoted annotation
        type_ = ast.parse(type_.value, mode="eval").body
    match _head(type_):
        case "None":
            if value is None or (text and str(value).lower() in ("none", "null")):
                return None
            raise MismatchError("None")
        case "Optional" | "Union" | "|":
            return _convert_union(value, type_, text)
        case "Literal":
            options = [ast.literal_eval(option) for option in _arguments(type_)]
            for option in options:
                if (type(value) is type(option) and value == option) or (text and str(value) == str(option)):
                    return option
            raise MismatchError("one of " + ", ".join(map(repr, options)))
        case "list" | "List" | "Sequence":
            return _convert_list(value, type_, text)
        case "dict" | "Dict":
            value = _json(value) if text else value
            if isinstance(value, dict) and all(isinstance(key, str) for key in value):
                return value
            raise MismatchError('a JSON object such as {"name": 1}')
        case "bool":
            if isinstance(value, bool):
                return value
            if text and str(value).lower() in ("true", "false"):
                return str(value).lower() == "true"
            raise MismatchError("bool: true or false")
        case "int":
            if isinstance(value, int) and not isinstance(value, bool):
                return value
            if text and re.fullmatch(r"[+-]?\d[\d_]*", str(value).strip()):
                return int(str(value))
            raise MismatchError("int: a whole number such as 4")
        case "float":
            return _convert_float(value, text)
        case "str":
            if isinstance(value, str):
                return value
            raise MismatchError("str: text")
        case "Any" | "object":
            return _json(value, otherwise=value) if text else value
        case name:
            known = "int, float, bool, str, list, dict, Literal or Optional"
            raise MismatchError(f"{name}, which a job cannot pass: annotate the parameter with {known}")


def _convert_float(value: object, text: bool) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if text:
        try:
            number = float(str(value))
        except ValueError:
            number = float("nan")
        if number == number:
            return number
    raise MismatchError("float: a number such as 0.5 or 1e-3")


def _convert_union(value: object, type_: ast.expr, text: bool) -> Any:
    """The first alternative that fits, None before text so that ``none`` is not taken for a word."""
    wants = []
    for option in sorted(_alternatives(type_), key=lambda t: (_head(t) != "None", _head(t) == "str")):
        try:
            return convert(value, option, text)
        except MismatchError as error:
            wants.append(str(error))
    raise MismatchError(" or ".join(wants[1:] + wants[:1]))


def _convert_list(value: object, type_: ast.expr, text: bool) -> list[Any]:
    element = _arguments(type_)[0] if isinstance(type_, ast.Subscript) else ast.Name("Any")
    wanted = f"{ast.unparse(type_)}: a JSON list"
    if text:
        flat = not str(value).lstrip().startswith("[")
        items: object = [part.strip() for part in str(value).split(",")] if flat else _json(value)
        text = flat  # the elements of a flat list are a command line's text; those of a JSON list have types
    else:
        items = list(value) if isinstance(value, tuple) else value
    if not isinstance(items, list):
        raise MismatchError(wanted)
    try:
        return [convert(item, element, text) for item in items]
    except MismatchError as error:
        raise MismatchError(f"{wanted}, each element {error}") from None


def _json(value: object, otherwise: Any = None) -> Any:
    try:
        return json.loads(str(value))
    except ValueError:
        return otherwise


def _head(type_: ast.expr) -> str:
    """The name a type goes by: ``list`` of ``list[int]``, ``|`` of ``int | None``, ``Literal`` of ``typing.Literal[1]``."""
    match type_:
        case ast.Subscript(value=inner):
            return _head(inner)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case ast.BinOp(op=ast.BitOr()):
            return "|"
        case ast.Constant(value=None):
            return "None"
        case _:
            return ast.unparse(type_)


def _arguments(type_: ast.expr) -> list[ast.expr]:
    """The types between the brackets."""
    if not isinstance(type_, ast.Subscript):
        return []
    inside = type_.slice
    return list(inside.elts) if isinstance(inside, ast.Tuple) else [inside]


def _alternatives(type_: ast.expr) -> list[ast.expr]:
    if isinstance(type_, ast.BinOp):
        return _alternatives(type_.left) + _alternatives(type_.right)
    if _head(type_) in ("Optional", "Union"):
        options = _arguments(type_)
        return [*options, ast.Constant(None)] if _head(type_) == "Optional" else options
    return [type_]
