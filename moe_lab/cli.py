"""The ``moe-lab`` command. Each subcommand imports what it calls when it runs, so that ``--help`` answers at once.

An error that moe_lab raises on purpose is its one sentence on standard error and its ``exit_status``; Ctrl-C is 130; a
traceback is a bug. Nothing is computed here. First used in lesson 00_start_here.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from moe_lab.errors import DataError, MoeLabError

KEY_RESULTS = 4  # recorded numbers that `results` shows for a run


class _Parser(argparse.ArgumentParser):
    """One sentence for a wrong command line, and numbers such as ``-1e-3`` and ``-inf`` taken as values."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
        self._negative_number_matcher = re.compile(r"-(\d|\.\d|inf$)")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{message}; see '{self.prog} --help'\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``moe-lab``: run the command line ``arguments`` and return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser, commands = _parser()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        close = difflib.get_close_matches(arguments[0], commands, 1)
        hint = f": did you mean '{close[0]}'?" if close else "."
        parser.exit(2, f"unknown command '{arguments[0]}'{hint} Commands: {', '.join(commands)}\n")
    options, later = parser.parse_known_args(arguments)
    if later and hasattr(options, "settings") and not any(text.startswith("-") for text in later):
        # argparse takes positional arguments from one place only; settings may stand before, between and after options.
        options.settings = [*options.settings, *later]
    elif later:
        parser.error(f"unrecognized arguments: {' '.join(later)}")
    try:
        return int(options.call(options))
    except MoeLabError as error:
        sys.stdout.flush()
        print(error, file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> tuple[_Parser, list[str]]:
    parser = _Parser(
        prog="moe-lab",
        description="Mixture-of-experts training, from one notebook cell to a cluster.",
        epilog="example:\n  moe-lab run notebooks/00_start_here.ipynb\n\n'moe-lab COMMAND --help' shows an example of each command",
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    parser.set_defaults(call=lambda options: _version() if options.version else _help(parser))
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for add in (_add_run, _add_train, _add_data, _add_import, _add_export, _add_results, _add_doctor):
        add(commands)
    return parser, list(commands.choices)


def _help(parser: argparse.ArgumentParser) -> int:
    """What a command without its subcommand does: show the help, as an error."""
    parser.print_help()
    return 2


def _version() -> int:
    import moe_lab

    print(moe_lab.__version__)
    return 0


def _add_run(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="execute a notebook as a job and keep its record",
        description="Execute a notebook as a job: a new folder under --out gets the executed notebook and record.json.\n"
        "The notebook's working directory is the current one. Exit status: 0 done, 1 a cell failed, 2 parameters\n"
        "or notebook unusable (nothing was started), 124 time limit, 138 the kernel died, 128 + n signal n.",
        epilog="example:\n  moe-lab run notebooks/00_start_here.ipynb -p ranks 2 --timeout 600",
    )
    parser.add_argument("notebook", metavar="NOTEBOOK", help="an .ipynb file with a cell tagged 'parameters'")
    parser.add_argument(
        "-p", "--parameter", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"),
        help="set a parameter; lists as JSON or 1,2,4; booleans true or false; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--out", default="runs", metavar="DIR", help="where the run's folder is made (default: runs)"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="seconds for the whole run (default: none)"
    )
    parser.add_argument(
        "--json", action="store_true", help="no progress; print the run's record as JSON at the end"
    )
    parser.add_argument(
        "--help-parameters", action="store_true", help="list the notebook's parameters and leave"
    )
    parser.set_defaults(call=_run)


def _run(options: argparse.Namespace) -> int:
    from moe_lab.launch import job
    from moe_lab.launch.parameters import declared, describe, read_notebook
    from moe_lab.records import RunRecord

    if options.help_parameters:
        print(describe(declared(read_notebook(options.notebook), options.notebook), options.notebook))
        return 0
    try:
        folder = job.run_notebook(
            options.notebook, dict(options.parameter), out=options.out, timeout_s=options.timeout,
            show=not options.json,
        )  # fmt: skip
    except job.NotebookError as error:
        if options.json:
            _print_json(RunRecord.open(error.folder).read())
        raise
    if options.json:
        _print_json(RunRecord.open(folder).read())
    return 0


def _add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a preset, in this process or as one rank under torchrun",
        description="Train a preset. Settings are dotted names of the configuration. Under torchrun, one process a GPU.",
        epilog="examples:\n  moe-lab train --preset laptop optim.lr=1e-3\n"
        "  moe-lab train --preset laptop --out runs/mine checkpoint_every=100\n"
        "  moe-lab train --preset laptop --out runs/mine checkpoint_every=100 --resume auto\n"
        "  torchrun --nproc-per-node 4 -m moe_lab.cli train --preset laptop",
    )
    parser.add_argument("--preset", required=True, metavar="NAME", help="name of the preset, such as laptop")
    parser.add_argument("--out", metavar="DIR", help="the run's folder (default: a new one under runs)")
    parser.add_argument(
        "--resume", metavar="DIR|auto",
        help="go on from a checkpoint, from the last one of a run's folder, or (auto) from the last one in --out",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=600, metavar="S",
        help="seconds that ranks wait for each other, at the start and in a collective (default: 600)",
    )  # fmt: skip
    parser.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="settings that override the preset's"
    )
    parser.set_defaults(call=_train)


def _train(options: argparse.Namespace) -> int:
    from moe_lab.train import cli_train

    return cli_train(options.preset, options.settings, options.out, options.resume, options.timeout)


def _add_data(commands: Any) -> None:
    data = commands.add_parser(
        "data",
        help="prepare text for training",
        description="Work on training data.",
        epilog="example:\n  moe-lab data prepare my_texts/ --out data/mine",
    )
    data.set_defaults(call=lambda options: _help(data))
    parser = data.add_subparsers(metavar="ACTION", title="actions").add_parser(
        "prepare",
        help="text to a folder of token files",
        description="Turn text into a folder of token files. Inputs: UTF-8 text files, .jsonl files with a field 'text' a line,\n"
        "either one also as .gz or .zst, and folders of them.",
        epilog="example:\n  moe-lab data prepare my_texts/ more.jsonl.zst --out data/mine --tokenizer bpe --vocab-size 8192",
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="a text file, a .jsonl file or a folder")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to make")
    parser.add_argument("--tokenizer", choices=["byte", "bpe"], help="(default: byte)")
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="ids of a trained bpe tokenizer (default: 4096)"
    )
    parser.add_argument(
        "--tokenizer-file", metavar="F", help="use this tokenizer.json instead of training one"
    )
    parser.add_argument("--eod-token", metavar="TOKEN", help="its special token that ends a document")
    parser.add_argument(
        "--val-fraction", type=float, metavar="X", help="share for validation (default: 0.05)"
    )
    parser.add_argument(
        "--include", action="append", default=[], metavar="PATTERN",
        help="in folders take only files like this, such as '*.txt'; may be repeated",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the folder's tokens.json at the end")
    parser.set_defaults(call=_data_prepare)


def _data_prepare(options: argparse.Namespace) -> int:
    from moe_lab.data import prepare

    given = {
        name: getattr(options, name)
        for name in ("tokenizer", "vocab_size", "tokenizer_file", "eod_token", "val_fraction")
        if getattr(options, name) is not None
    }
    folder = prepare(
        options.inputs,
        options.out,
        include=options.include,
        log=lambda line: print(line, file=sys.stderr),
        **given,
    )
    if options.json:
        _print_json(folder.info)
    else:
        splits = ", ".join(
            f"{name} {split['tokens']:,} tokens" for name, split in folder.info["splits"].items()
        )
        print(f"{folder.path}: {splits}, vocabulary {folder.vocab_size}")
    return 0


def _add_import(commands: Any) -> None:
    parser = commands.add_parser(
        "import",
        help="a Hugging Face checkpoint to a model that training can start from",
        description="Read an OLMoE, Mixtral, Qwen3-MoE, FlexOlmo or AFMoE checkpoint (safetensors) and write it as a model of ours.",
        epilog="example:\n  moe-lab import OLMoE-1B-7B/ --out models/olmoe",
    )
    parser.add_argument("source", metavar="HF_DIR", help="folder with config.json and safetensors files")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to make")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(call=_import)


def _import(options: argparse.Namespace) -> int:
    from moe_lab.interop import cli_import

    return cli_import(options.source, options.out, options.json)


def _add_export(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="a model of ours to a Hugging Face checkpoint",
        description="Write a model of ours in the layout that transformers loads.",
        epilog="example:\n  moe-lab import OLMoE-1B-7B/ --out models/olmoe\n  moe-lab export models/olmoe --out my_model --architecture olmoe",
    )
    parser.add_argument(
        "source", metavar="DIR", help="folder of a model, such as the one in a training run's folder"
    )
    parser.add_argument("--out", required=True, metavar="HF_DIR", help="the folder to make")
    parser.add_argument("--architecture", metavar="NAME", help="(default: the one that fits)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(call=_export)


def _export(options: argparse.Namespace) -> int:
    from moe_lab.interop import cli_export

    return cli_export(options.source, options.out, options.architecture, options.json)


def _add_results(commands: Any) -> None:
    parser = commands.add_parser(
        "results",
        help="what has been run and measured",
        description="List the runs under a folder, oldest first, with the first numbers that each recorded.",
        epilog="example:\n  moe-lab results runs --json",
    )
    parser.add_argument("folder", nargs="?", default="runs", metavar="DIR", help="(default: runs)")
    parser.add_argument("--json", action="store_true", help="print the whole records as a JSON list")
    parser.set_defaults(call=_results)


def _results(options: argparse.Namespace) -> int:
    from moe_lab.records import RunRecord

    top = Path(options.folder)
    if not top.is_dir():
        raise DataError(
            f"there is no folder {top}: 'moe-lab run' and 'moe-lab train' make runs/ in the current directory"
        )
    runs, damaged = [], []
    for path in top.rglob("record.json"):
        try:
            runs.append((str(path.parent), RunRecord.open(path.parent).read()))
        except DataError as error:
            damaged.append(str(error))
    runs.sort(key=lambda run: run[1]["started"])
    if options.json:
        _print_json([{"folder": folder, **record} for folder, record in runs])
    else:
        for folder, record in runs:
            print(_one_line(folder, record))
        if not runs:
            print(f"no runs under {top}")
    for message in damaged:
        print(message, file=sys.stderr)
    return 1 if damaged else 0


def _one_line(folder: str, record: dict[str, Any]) -> str:
    seconds = "" if record["seconds"] is None else f"{record['seconds']:.1f} s"
    results = record["results"].items()
    numbers = [(k, v) for k, v in results if isinstance(v, (int, float)) and not isinstance(v, bool)]
    shown = ", ".join(f"{name} {value:.6g}" for name, value in numbers[:KEY_RESULTS])
    more = f", {len(numbers) - KEY_RESULTS} more" if len(numbers) > KEY_RESULTS else ""
    started = record["started"][:19].replace("T", " ")
    return f"{record['status']:<8} {record['name']:<24} {started} {seconds:>10}  {folder}  {shown}{more}".rstrip()


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what this machine can run, on which path, and what is missing",
        description="Say what this machine can run, on which path, and how to install what is missing.\n"
        "Exit status 0 when it can train the laptop preset, 1 otherwise.",
        epilog="example:\n  moe-lab doctor --json",
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.set_defaults(call=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from moe_lab.doctor import examine, report

    found = examine()
    if options.json:
        _print_json(found)
    else:
        print(report(found))
    return 0 if found["ready"] else 1


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main())
