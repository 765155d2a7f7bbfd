"""The doctor: what it says is true of this machine, and it speaks where things are missing too."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from typing import Any

import psutil
import pytest
import torch

from moe_lab import cli, doctor
from moe_lab.doctor import paths


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """One look at this machine."""
    return doctor.examine()


def names(items: list[dict[str, Any]], usable: bool = True) -> list[str]:
    """The names of the items that can, or cannot, be used."""
    return [item["name"] for item in items if item["usable"] == usable]


def test_it_says_what_is_installed_and_there(found: dict[str, Any]) -> None:
    assert found["versions"]["torch"] == metadata.version("torch")
    assert found["machine"]["memory_gib"] == round(psutil.virtual_memory().total / 2**30, 1)
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert found["backends"]["gloo"] == torch.distributed.is_gloo_available()
    assert "local" in names(found["transports"])
    assert "fp32" in names(found["precision"])
    assert json.loads(json.dumps(found)) == found


def test_it_claims_only_what_the_trainer_accepts(found: dict[str, Any]) -> None:
    from moe_lab import presets
    from moe_lab.errors import ConfigError
    from moe_lab.fields import override
    from moe_lab.train.describe import check_supported

    for name in names(found["transports"]):
        ranks = [] if name == "local" else ["parallel.ep=2"]
        check_supported(override(presets.get("laptop"), [*ranks, f"parallel.transport={name}"]))
    for name in names(found["precision"]):
        check_supported(override(presets.get("laptop"), [f"precision={name}"]))
    for item in found["precision"]:
        if item["note"].startswith("not in this version"):
            with pytest.raises(ConfigError):
                check_supported(override(presets.get("laptop"), [f"precision={item['name']}"]))


def test_a_format_without_its_hardware_is_said_to_be_emulated() -> None:
    cards = {"7.0": "emulation", "9.0": "emulation", "10.0": "native"}
    for capability, path in cards.items():
        notes = {item["name"]: item for item in paths.precision(torch, [{"capability": capability}])}
        assert path in notes["mxfp8"]["note"]
        assert "not verified on hardware" in notes["mxfp8"]["note"]
        assert ("needs a GPU" in notes["fp8_rowwise"]["note"]) == (capability == "7.0")


def test_deepep_lists_the_line_for_each_thing_it_lacks() -> None:
    machine = {"gpus": [{"capability": "9.0"}], "cuda": {"nccl": "2.29.7", "nvcc": None}}
    missing: list[dict[str, str]] = []
    usable, note = paths._needs_deepep(machine, missing)
    assert not usable
    assert "2.29.7" in note
    lines = [item["install"] for item in missing if item["for"] == "transport deepep"]
    assert any("--no-deps 'nvidia-nccl-cu13==" in line for line in lines)
    assert any("-e '.[deepep]'" in line for line in lines)
    assert len(lines) == 3
    usable, _ = paths._needs_deepep({"gpus": [], "cuda": {}}, missing)
    assert not usable
    assert len(missing) == 3


def test_without_a_needed_package_it_says_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version

    def without(package: str) -> str:
        if package == "papermill":
            raise metadata.PackageNotFoundError(package)
        return "2.10.0" if package == "torch" else version(package)

    monkeypatch.setattr(metadata, "version", without)
    found = doctor.examine()
    lines = {item["what"]: item["install"] for item in found["missing"]}
    assert lines["papermill >=2.7"].endswith("-m pip install 'papermill>=2.7'")
    assert any(what.startswith("torch") and "found 2.10.0" in what for what in lines)
    assert not found["ready"]
    assert any("papermill" in why for why in found["blocking"])
    assert "can train the laptop preset: no: " in doctor.report(found)


def test_without_torch_it_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_import", lambda name: None)
    found = doctor.examine()
    assert not found["ready"]
    assert found["transports"] == found["precision"] == []
    assert "no gloo" in doctor.report(found)


def test_too_little_memory_or_no_text_blocks(found: dict[str, Any]) -> None:
    small = {**found, "machine": {**found["machine"], "available_gib": 0.5}}
    assert any("0.5 GiB" in why for why in doctor._blocking(small))
    tools = [{"name": "data/kjv.txt", "usable": False, "note": ""}]
    assert any("kjv.txt" in why for why in doctor._blocking({**found, "tools": tools}))


def test_the_command_prints_text_or_json_and_ends_with_the_verdict(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = cli.main(["doctor"])
    text = capsys.readouterr().out
    assert "transports" in text
    assert f"can train the laptop preset: {'yes' if status == 0 else 'no'}" in text
    done = subprocess.run(
        [sys.executable, "-m", "moe_lab.cli", "doctor", "--json"], capture_output=True, text=True
    )
    assert done.returncode == status
    assert json.loads(done.stdout)["ready"] == (status == 0)
