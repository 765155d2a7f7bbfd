"""The repository itself: its shape, its environment, its notebooks as stored, its tools and its words."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
TOP_LEVEL = {
    "notebooks",
    "moe_lab",
    "tests",
    "data",
    "environment.yml",
    "README.md",
    "pyproject.toml",
    "LICENSE",
}
BUILD_LEFTOVERS = {"moe_lab.egg-info", "runs", "build", "dist"}
MAX_LINES = 400
MODULES = sorted((ROOT / "moe_lab").rglob("*.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# Written apart, so that this file does not hold what it forbids.
UNFINISHED = ["TO" "DO", "FIX" "ME", "XX" "X", "HA" "CK"]  # fmt: skip
ELSEWHERE = ["/wor" "k/", "pypi" ".org", "python" "hosted", "download." "pytorch"]  # fmt: skip


def tracked() -> list[str]:
    """The repository's files: what git tracks, or what is there where this is no checkout."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    hidden = re.compile(r"(^|/)(\.|__pycache__)")
    found = (path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file())
    return [name for name in found if not hidden.search(name) and name.split("/")[0] not in BUILD_LEFTOVERS]


def test_the_top_level_is_what_it_should_be() -> None:
    top = {name.split("/")[0] for name in tracked()}
    assert {name for name in top if not name.startswith(".")} == TOP_LEVEL


def test_the_conda_environment_is_python_and_pip_and_this_package() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    *conda, pip = environment["dependencies"]
    assert conda == [f"python{project['requires-python']}", "pip"]
    assert pip == {"pip": ["-e ."]}


def test_nothing_on_a_laptop_depends_on_deepep() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    everywhere = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    assert not [line for line in everywhere if re.search(r"deep.?ep|nccl|triton", line, re.IGNORECASE)]
    assert all("sys_platform == 'linux'" in line for line in project["optional-dependencies"]["deepep"])


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    commands = [line for line in script.splitlines() if "[test]" in line and "pytest" in line]
    assert len(commands) == 1
    assert commands[0] in (ROOT / "README.md").read_text().splitlines()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_stored_as_it_should_be(path: Path) -> None:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.id for cell in code if cell.outputs or cell.execution_count is not None] == []
    assert [cell.id for cell in notebook.cells if "papermill" in cell.metadata] == []
    tags = [cell.metadata.get("tags", []) for cell in notebook.cells]
    assert sum("parameters" in tag for tag in tags) == 1
    assert "parameters" in code[0].metadata.tags, "the first code cell is the parameters"
    assert not any("injected-parameters" in tag for tag in tags)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_parameters_of_a_notebook_are_annotated_and_explained(path: Path) -> None:
    from moe_lab.launch.parameters import declared, read_notebook, resolve

    parameters = declared(read_notebook(path), path.name)
    assert parameters
    for parameter in parameters.values():
        assert parameter.help, f"{parameter.name} has no comment"
        assert parameter.type_name != "Any", f"{parameter.name} has no type"
        assert resolve({parameter.name: parameter}, {parameter.name: parameter.default}, path.name)


def test_the_text_holds_no_unfinished_business_and_no_place_of_its_making() -> None:
    unfinished = re.compile(r"\b(" + "|".join(UNFINISHED) + r")\b")
    elsewhere = re.compile("|".join(map(re.escape, ELSEWHERE)))
    found = []
    for name in tracked():
        if name in ("LICENSE", "data/kjv.txt"):
            continue
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if unfinished.search(line) or elsewhere.search(line):
                found.append(f"{name}:{number}: {line.strip()[:80]}")
    assert found == []


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Public functions and classes of a module and public methods of those classes, by dotted name."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, kinds) and not node.name.startswith("_"):
            yield node.name, node
            for inner in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(inner, kinds) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", inner


def test_every_module_and_every_public_name_has_a_docstring() -> None:
    without = []
    for path in MODULES:
        name = path.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not ast.get_docstring(tree):
            without.append(name)
        for defined, node in public_definitions(tree):
            if not ast.get_docstring(node):  # type: ignore[arg-type]
                without.append(f"{name}: {defined}")
    assert without == []


def test_no_module_is_too_long() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_the_shipped_text_is_whole() -> None:
    assert (ROOT / "data" / "kjv.txt").stat().st_size == 4_298_239


@pytest.mark.parametrize(
    "tool",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy"],
        ["lint-imports", "--no-cache"],
    ],
    ids=" ".join,
)
def test_the_tools_are_content(tool: list[str]) -> None:
    program = Path(sys.executable).parent / tool[0]
    done = subprocess.run([str(program), *tool[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_notebooks_are_plain_json_with_a_last_newline() -> None:
    for path in NOTEBOOKS:
        text = path.read_text(encoding="utf-8")
        assert text.endswith("}\n")
        assert json.loads(text)
