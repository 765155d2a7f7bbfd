"""Checkpoints in and out: both ways, one file or several, names apart or fused, memory, and files that are not right."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interop_models import FAMILIES, VARIANT_IDS, VARIANTS, VOCAB, ours, theirs
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from moe_lab.errors import ConfigError, DataError
from moe_lab.interop import (
    cli_export,
    cli_import,
    export_checkpoint,
    import_checkpoint,
    load_pretrained,
    save_pretrained,
)
from moe_lab.train import load_model, save_model
from moe_lab.train import tensor_files as files
from moe_lab.train.tensor_files import TensorFiles, write_file

TOKENS = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(2))
pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")


def reloaded(folder: Path) -> nn.Module:
    """A folder as transformers loads it, every tensor of it used and none missing."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def same_state(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.parametrize(("family", "name", "options"), VARIANTS, ids=VARIANT_IDS)
def test_there_and_back(family: str, name: str, options: dict[str, Any], tmp_path: Path) -> None:
    original = theirs(family, options)
    model = ours(original, tmp_path / "theirs")
    back = reloaded(save_pretrained(model, tmp_path / "ours", family))
    assert same_state(back, original)
    with torch.no_grad():
        assert torch.equal(back(TOKENS).logits, original(TOKENS).logits)
    assert load_pretrained(tmp_path / "ours").config == model.config
    chosen = json.loads((save_pretrained(model, tmp_path / "chosen") / "config.json").read_text())
    assert chosen["model_type"] == family  # norm placement and QK-norm tell the five apart


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("size", ["20KB", "1GB"])
def test_one_file_or_several(family: str, fused: bool, size: str, tmp_path: Path) -> None:
    original = theirs(family)
    original.save_pretrained(tmp_path / "theirs", max_shard_size=size, save_original_format=not fused)
    several = len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    assert several == (size == "20KB")
    assert any("gate_up_proj" in n for n in TensorFiles(tmp_path / "theirs").entries) == fused
    model = load_pretrained(tmp_path / "theirs")
    assert same_state(model, ours(original, tmp_path / "plain"))
    save_pretrained(model, tmp_path / "ours", family, max_shard_bytes=20_000 if several else 10**9)
    assert (len(list((tmp_path / "ours").glob("*.safetensors"))) > 1) == several
    assert same_state(reloaded(tmp_path / "ours"), original)


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_to_folder(family: str, tmp_path: Path) -> None:
    original = theirs(family)
    original.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    assert import_checkpoint(tmp_path / "theirs", tmp_path / "ours") == tmp_path / "ours"
    assert sorted(p.name for p in (tmp_path / "ours").iterdir()) == ["config.json", "model.safetensors"]
    model = load_model(tmp_path / "ours")
    assert same_state(model, load_pretrained(tmp_path / "theirs"))
    export_checkpoint(tmp_path / "ours", tmp_path / "back", family)
    before, after = TensorFiles(tmp_path / "theirs"), TensorFiles(tmp_path / "back")
    assert before.entries.keys() == after.entries.keys()
    for name, entry in before.entries.items():
        assert entry.shape == after.entries[name].shape
        assert torch.equal(before.read(name), after.read(name))


def test_types_stay_as_stored_and_a_bias_stays_precise(tmp_path: Path) -> None:
    original = theirs("afmoe").to(torch.bfloat16)
    original.model.layers[1].mlp.expert_bias.data = torch.linspace(0, 1, 8)
    original.save_pretrained(tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    for model in (load_pretrained(tmp_path / "theirs"), load_model(tmp_path / "ours")):
        types = {n: t.dtype for n, t in model.state_dict().items()}
        assert types.pop("blocks.1.ffn.router.selection_bias") == torch.float32
        assert set(types.values()) == {torch.bfloat16}
        assert torch.equal(model.blocks[1].ffn.router.selection_bias, torch.linspace(0, 1, 8))
        assert model(TOKENS).dtype == torch.bfloat16
    save_pretrained(load_pretrained(tmp_path / "theirs"), tmp_path / "back")
    assert TensorFiles(tmp_path / "back").entries["model.layers.1.mlp.expert_bias"].dtype == torch.float32
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_pretrained(tmp_path / "theirs", dtype=torch.float64)(TOKENS).dtype == torch.float64


STREAM = """
import gc, sys, json, torch
from pathlib import Path
from moe_lab.interop import export_checkpoint, import_checkpoint, load_pretrained
from moe_lab.interop.options import hf_config, model_config
from moe_lab.interop.families import FAMILIES
from moe_lab.interop.tensors import layout
from moe_lab.train.tensor_files import write_file

def make(folder, hidden):
    values = {"model_type": "mixtral", "vocab_size": 50, "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 4, "num_experts_per_tok": 2, "num_local_experts": 8, "intermediate_size": hidden}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    parts = [p for a in layout(FAMILIES["mixtral"], model_config(values)).values() for p in a[0]]
    write_file(folder / "model.safetensors", {p.name: (torch.float32, p.shape) for p in parts}, (torch.zeros(p.shape) for p in parts))

def status(field):
    line = next(x for x in open("/proc/self/status") if x.startswith(field))
    return int(line.split()[1]) / 1024

def growth(action):
    # The high-water mark of this process, set back to the present first; getrusage would begin with the parent's.
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    start = status("VmRSS")
    kept = action()
    return status("VmHWM") - start

torch.set_num_threads(1)
root = Path(sys.argv[1])
make(root / "small", 16); make(root / "big", 1024)
export_checkpoint(import_checkpoint(root / "small", root / "small_ours"), root / "small_back", "mixtral")
load_pretrained(root / "small")
grown = {
    "import": growth(lambda: import_checkpoint(root / "big", root / "ours")),
    "export": growth(lambda: export_checkpoint(root / "ours", root / "back", "mixtral")),
    "load": growth(lambda: load_pretrained(root / "big")),
}
size = (root / "big" / "model.safetensors").stat().st_size / 2**20
print(json.dumps({"size": size, **grown}))
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's high-water mark of memory"
)
def test_memory_stays_at_one_tensor(tmp_path: Path) -> None:
    """108 MiB of weights in tensors of 2 MiB: importing and exporting take a few of those, loading takes the model once."""
    done = subprocess.run(
        [sys.executable, "-c", STREAM, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    peak = json.loads(done.stdout)
    assert peak["size"] > 100
    assert peak["import"] < 12
    assert peak["export"] < 12
    # Loading may reuse the few pages that importing and exporting freed, so it can also grow by a little less than the model.
    assert peak["size"] - 12 < peak["load"] < peak["size"] + 12


# Files that are not right. Each case changes a good checkpoint and says what the one sentence must hold.


def edit(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return apply


def swap(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(16, 31)


def cut(size: int) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:size])

    return apply


def as_pickle(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / name)

    return apply


def old_pickle(folder: Path) -> None:
    torch.save({"a": torch.zeros(3)}, folder / "model.safetensors", _use_new_zipfile_serialization=False)


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def index_of(weight_map: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return apply


BAD_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a tensor missing": (edit(lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight")),
                         "lacks 1 of the .* tensors of its olmoe model, model.layers.1.mlp.experts.3.up_proj.weight first"),
    "many missing": (edit(lambda t: [t.pop(n) for n in list(t) if "layers.1" in n]), "lacks 33 of the 69 tensors"),
    "a tensor too many": (edit(lambda t: t.update(extra=torch.zeros(2))), "has 1 tensors that .* no place for, extra first"),
    "a wrong shape": (edit(swap), r"k_proj.weight of shape \[16, 31\], but its config.json makes it \[16, 32\]"),
    "whole numbers": (edit(lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int32)})), "must be floating-point"),
    "cut in the data": (cut(30_000), "is cut short: it has 30000 bytes, but its header describes"),
    "cut in the header": (cut(2_000), "is cut short: it has 2000 bytes, but its header alone takes"),
    "empty": (cut(0), "cannot be read: it is not a safetensors file"),
    "text": (write("model.safetensors", "version https://git-lfs.github.com/spec/v1"), "cannot be read: it is not a safetensors file"),
    "a pickle instead": (as_pickle("pytorch_model.bin"), "holds a pickle, pytorch_model.bin, which can run code"),
    "a pickle named otherwise": (as_pickle("model.safetensors"), "model.safetensors is a pickle"),
    "an old pickle": (old_pickle, "model.safetensors is a pickle"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
    "a shard missing": (index_of({"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}),
                        "1 of 2 files of its index are missing, model-00002-of-00002.safetensors first"),
    "a path in the index": (index_of({"a": "../secret"}), "no plain name"),
    "an index of nothing": (index_of(None), "is not an index"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "config is not JSON": (write("config.json", "{"), "is not JSON"),
    "config is a list": (write("config.json", "[]"), "holds a list, not an object"),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    theirs("olmoe").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", BAD_FILES)
def test_files_that_are_not_right(case: str, good: Path, tmp_path: Path) -> None:
    change, message = BAD_FILES[case]
    shutil.copytree(good, tmp_path / "bad")
    change(tmp_path / "bad")
    for run in (
        lambda: load_pretrained(tmp_path / "bad"),
        lambda: import_checkpoint(tmp_path / "bad", tmp_path / "out"),
    ):
        with pytest.raises(DataError, match=message) as caught:
            run()
        assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["bad"]


def test_folders_that_are_not_right(good: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_pretrained(tmp_path / "none")
    with pytest.raises(DataError, match="is a file: give the folder"):
        load_pretrained(good / "model.safetensors")
    import_checkpoint(good, tmp_path / "ours")
    with pytest.raises(DataError, match=r"holds a model of moe_lab already"):
        load_pretrained(tmp_path / "ours")
    with pytest.raises(DataError, match="holds a Hugging Face checkpoint: import it first"):
        load_model(good)
    with pytest.raises(DataError, match=r"holds no model: config.json is missing"):
        export_checkpoint(tmp_path, tmp_path / "out")
    with pytest.raises(DataError, match="is there already and is not an empty folder"):
        import_checkpoint(good, tmp_path / "ours")
    with pytest.raises(DataError, match="is there already and is not an empty folder"):
        save_pretrained(load_pretrained(good), tmp_path / "ours")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write to .*file/out"):
        import_checkpoint(good, tmp_path / "file" / "out")
    (tmp_path / "empty").mkdir()
    assert load_model(import_checkpoint(good, tmp_path / "empty")).config.n_layers == 2


def test_a_full_disk_leaves_nothing(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_checkpoint(good, tmp_path / "ours")

    def full(path: Path, tensors: Any, values: Any) -> None:
        path.write_bytes(bytes(100))
        raise OSError(28, "No space left on device")

    for module in ("reader", "writer"):
        monkeypatch.setattr(f"moe_lab.interop.{module}.write_file", full)
    with pytest.raises(DataError, match=r"cannot write to .*out: No space left on device"):
        import_checkpoint(good, tmp_path / "out")
    with pytest.raises(DataError, match="No space left on device"):
        export_checkpoint(tmp_path / "ours", tmp_path / "out", "olmoe")
    assert [p.name for p in tmp_path.iterdir()] == ["ours"]


def test_tied_embeddings_stored_twice(tmp_path: Path) -> None:
    theirs("mixtral", {"tie_word_embeddings": True}).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
                         "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, tmp_path / "model.safetensors")  # fmt: skip
    assert load_pretrained(tmp_path).config.tie_embeddings
    save_file(tensors | {"lm_head.weight": torch.zeros(VOCAB, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"lm_head.weight unlike its embeddings"):
        load_pretrained(tmp_path)


def test_our_files_that_are_not_right(good: Path, tmp_path: Path) -> None:
    model = load_pretrained(good)
    save_model(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"norm.weight has shape \[3\], but \[32\] is needed"):
        load_model(tmp_path)
    tensors.pop("norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"norm.weight is on one side only"):
        load_model(tmp_path)


def test_commands(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_import(str(good), str(tmp_path / "ours"), as_json=True) == 0
    summary = json.loads(capsys.readouterr().out)
    parameters = sum(p.numel() for p in load_pretrained(good).parameters())
    assert summary["architecture"] == "olmoe"
    assert summary["parameters"]["total"] == parameters > summary["parameters"]["active"]
    assert cli_export(str(tmp_path / "ours"), str(tmp_path / "back")) == 0
    assert f"exported as olmoe, {parameters:,} parameters" in capsys.readouterr().out
    assert same_state(reloaded(tmp_path / "back"), reloaded(good))
    assert cli_import(str(good), str(tmp_path / "again")) == 0
    assert "initial_model=" in capsys.readouterr().out


# The file format itself, against the library that defines it.

TYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensor_sets(draw: st.DrawFn) -> dict[str, Tensor]:
    names = draw(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=6).filter(lambda n: n != "__metadata__"), unique=True, max_size=5))  # fmt: skip
    result = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        seed = torch.Generator().manual_seed(draw(st.integers(0, 100)))
        result[name] = torch.randint(0, 2, shape, generator=seed).to(draw(st.sampled_from(TYPES)))
    return result


@settings(max_examples=40, deadline=None)
@given(tensor_sets(), st.data())
def test_safetensors_files_are_the_librarys(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("st")
    path = folder / files.SINGLE
    write_file(path, {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}, tensors.values())
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(loaded[n].dtype == t.dtype and torch.equal(loaded[n], t) for n, t in tensors.items())
    save_file(tensors, path)
    with TensorFiles(folder) as reader:
        assert reader.entries.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(reader.read(name).view(tensor.shape), tensor)
            start = data.draw(st.integers(0, tensor.numel()))
            count = data.draw(st.integers(0, tensor.numel() - start))
            assert torch.equal(reader.read(name, start, count), tensor.flatten()[start : start + count])
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(DataError):
        TensorFiles(folder)
    path.write_bytes(whole + b"x")
    with pytest.raises(DataError, match="is damaged"):
        TensorFiles(folder)


@pytest.mark.parametrize(
    ("header", "message"),
    [('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "its header is wrong"),
     ('{"a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}', "holds a as F8_E4M3"),
     ('{"a": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}', "is damaged"),
     ('{"a": {"dtype": "U8", "shape": [-4], "data_offsets": [0, -4]}}', "its header is wrong"),
     ('{"a": 3}', "its header is wrong"), ("[]", "its header is wrong"), ("nonsense", "its header is wrong")],
)  # fmt: skip
def test_headers_that_are_not_right(header: str, message: str, tmp_path: Path) -> None:
    (tmp_path / files.SINGLE).write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
    with pytest.raises(DataError, match=message):
        TensorFiles(tmp_path)


def test_an_unknown_architecture(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "bad")
    values = json.loads((good / "config.json").read_text())
    (tmp_path / "bad" / "config.json").write_text(json.dumps(values | {"model_type": "llama"}))
    with pytest.raises(
        ConfigError, match="model_type 'llama', which cannot be read here: known architectures are olmoe"
    ):
        load_pretrained(tmp_path / "bad")
