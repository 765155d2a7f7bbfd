"""The parameters of a notebook: what its cell tagged ``parameters`` declares, and what a caller may pass for it.

The cell holds plain assignments, as in every lesson::

    ranks: int = 4  # processes on this machine
    precision: Literal["fp32", "bf16"] = "fp32"  # number format of the activations

Papermill would accept an unknown name with a warning, take ``true`` for a string, and put the values of a notebook
without the tag where its own defaults overwrite them. So everything is checked here, before a kernel starts: an unknown
name, a wrong type, a missing or second ``parameters`` cell, and a file that is no notebook are one sentence each, as
:class:`~moe_lab.errors.ConfigError`.

The type is the annotation, or the default's where there is none; :mod:`moe_lab.launch.values` says which types there
are and how text becomes one. Built in lesson 00_start_here.
"""

from __future__ import annotations

import ast
import difflib
import io
import json
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_lab.errors import ConfigError
from moe_lab.launch.values import MismatchError, convert

TAG = "parameters"


@dataclass(frozen=True)
class Parameter:
    """One declared parameter.

    ``default``: its value, or the source text where that is not a literal (``60 * 60``); ``default_text``: the source text;
    ``required``: it has none. ``type``: the annotation, or what stands in for it; ``help``: the comment beside it.
    """

    name: str
    default: Any
    default_text: str
    type: ast.expr
    help: str
    required: bool = False

    @property
    def type_name(self) -> str:
        """The type as a reader would write it: ``int``, ``list[int]``, ``Literal['fp32', 'bf16']``."""
        return ast.unparse(self.type)


def read_notebook(path: str | Path) -> dict[str, Any]:
    """The JSON document of a notebook file; :class:`ConfigError` if it is missing, not JSON, or no notebook.

    Checks the structure by hand: importing nbformat and its schemas takes two seconds on a laptop.
    """
    path = Path(path)
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no notebook {path}{_closest_file(path)}") from None
    except OSError as error:
        raise ConfigError(f"the notebook {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not a notebook: it is not JSON ({error})") from None
    if not isinstance(notebook, dict) or "nbformat" not in notebook:
        raise ConfigError(f"{path} is not a notebook: the JSON has no 'nbformat', which every notebook has")
    if notebook["nbformat"] != 4:
        raise ConfigError(
            f"{path} has notebook format {notebook['nbformat']}, but 4 is needed: convert it with "
            "'jupyter nbconvert --to notebook'"
        )
    cells = notebook.get("cells")
    if not isinstance(cells, list):
        raise ConfigError(f"{path} is not a valid notebook: it has no list of cells")
    for number, cell in enumerate(cells, 1):
        fields: dict[str, Any] = {"cell_type": str, "source": (str, list), "metadata": dict}
        wrong = [
            f for f, kind in fields.items() if not isinstance(cell, dict) or not isinstance(cell.get(f), kind)
        ]
        if wrong:
            raise ConfigError(f"{path} is not a valid notebook: cell {number} has no proper {wrong[0]}")
    return notebook


def _closest_file(path: Path) -> str:
    names = [p.name for p in path.parent.glob("*.ipynb")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, 1)
    return f": did you mean {path.parent / close[0]}?" if close else ""


def source(cell: Mapping[str, Any]) -> str:
    """The text of a cell, which a notebook file may hold as a list of lines."""
    text = cell["source"]
    return text if isinstance(text, str) else "".join(text)


def declared(notebook: Mapping[str, Any], name: str) -> dict[str, Parameter]:
    """The parameters that ``notebook`` declares, in its order. ``name`` is how messages call it.

    Raises :class:`ConfigError` unless exactly one cell has the tag ``parameters`` and it is plain Python, and for the
    executed copy of a parameterised notebook, whose own values would silently win over its defaults.
    """
    tagged = [c for c in notebook["cells"] if TAG in c.get("metadata", {}).get("tags", [])]
    if any("injected-parameters" in c.get("metadata", {}).get("tags", []) for c in notebook["cells"]):
        raise ConfigError(
            f"{name} is the executed copy of a run: run the original notebook with -p NAME VALUE instead"
        )
    if not tagged:
        raise ConfigError(
            f"{name} has no cell tagged '{TAG}': give the code cell that holds its defaults that tag "
            "(in JupyterLab: property inspector, cell tags)"
        )
    if len(tagged) > 1:
        raise ConfigError(f"{name} has {len(tagged)} cells tagged '{TAG}': keep the tag on one")
    if tagged[0]["cell_type"] != "code":
        raise ConfigError(
            f"the cell tagged '{TAG}' in {name} is a {tagged[0]['cell_type']} cell: tag a code cell"
        )
    text = source(tagged[0])
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise ConfigError(
            f"the '{TAG}' cell of {name} is not plain Python, line {error.lineno}: {(error.text or '').strip()}"
        ) from None
    comments = _comments(text)
    found: dict[str, Parameter] = {}
    for statement in body:
        if isinstance(statement, ast.AnnAssign):
            targets: list[ast.expr] = [statement.target]
            annotation: ast.expr | None = statement.annotation
        elif isinstance(statement, ast.Assign):
            targets, annotation = statement.targets, None
        else:
            continue  # an import that an annotation needs
        for target in targets:
            if isinstance(target, ast.Name):
                default = _literal(statement.value)
                found[target.id] = Parameter(
                    name=target.id,
                    default=default,
                    default_text=ast.unparse(statement.value) if statement.value else "(required)",
                    type=annotation or _type_of(statement.value, default),
                    help=_help(comments, statement.lineno, statement.end_lineno or statement.lineno),
                    required=statement.value is None,
                )
    return found


def _comments(text: str) -> dict[int, str]:
    """Comment text by line: beside code under the line's number, alone on a line under its negative."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            found[-token.start[0] if alone else token.start[0]] = token.string.lstrip("# ").strip()
    return found


def _help(comments: dict[int, str], first: int, last: int) -> str:
    """The comments beside lines ``first`` to ``last`` of a statement, else the one alone on the line above it."""
    beside = [comments[line] for line in range(first, last + 1) if line in comments]
    return " ".join(beside) or comments.get(-(first - 1), "")


def _literal(value: ast.expr | None) -> Any:
    """The value of a default, or its source text where it has to be computed."""
    if value is None:
        return None
    try:
        return ast.literal_eval(value)
    except ValueError:
        return ast.unparse(value)


def _type_of(value: ast.expr | None, default: Any) -> ast.expr:
    """The type that stands in for a missing annotation: the default's own, or ``Any`` where it does not tell."""
    computed = value is not None and isinstance(default, str) and not isinstance(value, ast.Constant)
    if default is None or computed:
        return ast.Name("Any")
    if isinstance(default, list) and default:
        kinds = {type(item).__name__ for item in default}
        if len(kinds) == 1:
            return ast.parse(f"list[{kinds.pop()}]", mode="eval").body
    return ast.Name(type(default).__name__)


def resolve(
    parameters: Mapping[str, Parameter], given: Mapping[str, object], notebook: str
) -> dict[str, Any]:
    """``given`` with every value checked and converted to its declared type.

    Raises :class:`ConfigError` for a name that ``parameters`` does not have, a value that does not fit, and a required
    parameter left out. ``notebook`` is how messages call the notebook.
    """
    resolved: dict[str, Any] = {}
    for name, value in given.items():
        if name not in parameters:
            close = difflib.get_close_matches(name, parameters, 1, cutoff=0.5)
            hint = f" (did you mean '{close[0]}'?)" if close else ""
            exists = ", ".join(parameters) or "none"
            raise ConfigError(f"{notebook} has no parameter '{name}'{hint}; its parameters: {exists}")
        try:
            resolved[name] = convert(value, parameters[name].type, isinstance(value, str))
        except MismatchError as error:
            raise ConfigError(f"parameter '{name}' of {notebook} wants {error}, but got {value!r}") from None
    for name, parameter in parameters.items():
        if parameter.required and name not in resolved:
            raise ConfigError(f"parameter '{name}' of {notebook} has no default: pass -p {name} VALUE")
    return resolved


def describe(parameters: Mapping[str, Parameter], notebook: str) -> str:
    """A table for people: name, type, default and comment of every parameter."""
    if not parameters:
        return f"{notebook} has no parameters"
    rows = [(p.name, p.type_name, p.default_text, p.help) for p in parameters.values()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]]).rstrip() for row in rows
    ]
    return "\n".join([f"parameters of {notebook} (name, type, default):", *(f"  {line}" for line in lines)])
