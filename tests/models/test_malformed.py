"""Damaged and hostile checkpoints through the command line: one line that names what is wrong, and an exit code."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dcpjax import serve
from dcpjax.llm import LLM
from models.tensorfile import open_file
from tests.server.in_thread import InThread

FP8, PLAIN = "q_fp8_block128", "b_group2"
SINGLE, INDEX, SECOND = "model.safetensors", "model.safetensors.index.json", "model-00002-of-00002.safetensors"
NORM = "model.norm.weight"
SCALE = "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"

CASES = {}


def case(told, base=PLAIN, cut=False):
    """Adds a case: what spoils the folder, and the line that must come. `cut`: two files and an index."""

    def add(spoil):
        CASES[spoil.__name__] = (spoil, told, base, cut)
        return spoil

    return add


def tensors_of(folder):
    return {name: np.array(tensor) for name, tensor in open_file(folder / SINGLE).tensors.items()}


def edit_tensors(folder, change):
    tensors = tensors_of(folder)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def edit_json(path, change):
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(change(raw) or raw))


def edit_header(folder, change):
    """Replaces the header's text and its length."""
    raw = (folder / SINGLE).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    text = change(raw[8 : 8 + size])
    (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def edit_entry(folder, **new):
    def change(text):
        entries = json.loads(text)
        entries[NORM].update(new)
        return json.dumps(entries).encode()

    edit_header(folder, change)


def edit_place(folder, file):
    """The index says that a tensor lies in another file."""
    edit_json(folder / INDEX, lambda raw: raw["weight_map"].update({NORM: file}))


@case(r"model\.safetensors is truncated: 'model\..*' ends at byte \d+ of \d+")
def truncated(folder):
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-1000])


@case(r"model\.safetensors is truncated or no safetensors file: its header does not fit in 100 bytes")
def truncated_in_the_header(folder):
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:100])


@case(r"model\.safetensors is truncated or no safetensors file: its header does not fit in 0 bytes")
def zero_length(folder):
    (folder / SINGLE).write_bytes(b"")


@case(r"does not fit in \d+ bytes")
def header_longer_than_any_file(folder):
    raw = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes((1 << 63).to_bytes(8, "little") + raw[8:])


@case(r"model\.safetensors is corrupt: a header of 100000001 bytes, at most 100000000 are allowed")
def header_too_large(folder):
    with (folder / SINGLE).open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(8 + 100_000_001)  # takes no room on the disk


@case(r"model\.safetensors is corrupt: its header cannot be parsed")
def header_is_no_json(folder):
    edit_header(folder, lambda text: b"{" * len(text))


@case(r"model\.safetensors is corrupt: its header cannot be parsed")
def header_is_deep(folder):
    edit_header(folder, lambda text: b"[" * 200_000)


@case(r"model\.safetensors is corrupt: its header cannot be parsed \('model\.norm\.weight' occurs twice\)")
def name_twice_in_the_header(folder):
    entry = b'"model.norm.weight":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    edit_header(folder, lambda text: b"{" + entry + b"," + text[1:])


@case(r"entry of 'model\.norm\.weight' cannot be read: .*'F3'.*Known dtypes")
def unknown_dtype(folder):
    edit_entry(folder, dtype="F3")


@case(r"entry of 'model\.norm\.weight' cannot be read")
def negative_shape(folder):
    edit_entry(folder, shape=[-8, -7])


@case(r"entry of 'model\.norm\.weight' cannot be read")
def shape_of_words(folder):
    edit_entry(folder, shape=["56"])


@case(r"model\.safetensors is corrupt: the header gives '.*' the bytes \d+ to \d+")
def overlapping_offsets(folder):
    edit_entry(folder, data_offsets=[0, 224])


@case(r"corrupt: the header gives 'model\.norm\.weight' the bytes 9000000 to 9000224")
def offsets_past_the_end(folder):
    edit_entry(folder, data_offsets=[9_000_000, 9_000_224])


@case(r"model\.safetensors is corrupt: 4 bytes follow the last tensor")
def bytes_after_the_data(folder):
    with (folder / SINGLE).open("ab") as file:
        file.write(b"more")


@case(r"1 of a type that cannot be read: model\.norm\.weight int8 instead of float32 or bfloat16 or float16")
def wrong_dtype(folder):
    edit_tensors(folder, lambda tensors: tensors.update({NORM: np.ones(56, np.int8)}))


@case(r"2 missing: model\.norm\.weight, lm_head\.weight")
def missing_tensors(folder):
    edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in (NORM, "lm_head.weight")])


@case(r"1 unknown: 'model\.bad\\n\\x1b\[2Jname'")
def name_with_control_characters(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"model.bad\n\x1b[2Jname": np.ones(1, np.float32)}))


@case(r"model-00002-of-00002\.safetensors cannot be read: No such file or directory", cut=True)
def missing_shard(folder):
    (folder / SECOND).unlink()


@case(r"model-00002-of-00002\.safetensors cannot be read", cut=True)
def shard_is_a_folder(folder):
    (folder / SECOND).unlink()
    (folder / SECOND).mkdir()


@case(r"index\.json is corrupt: it cannot be parsed", cut=True)
def index_is_no_json(folder):
    (folder / INDEX).write_text('{"weight_map": {')


@case(r"index\.json is corrupt: it cannot be parsed", cut=True)
def index_is_no_text(folder):
    (folder / INDEX).write_bytes(b"\xff\xfe\x00")


@case(r"index\.json is corrupt: no weight_map can be read", cut=True)
def index_without_map(folder):
    (folder / INDEX).write_text('{"weight_map": [1]}')


@case(r"index\.json is corrupt: it cannot be parsed \('model\.norm\.weight' occurs twice\)", cut=True)
def name_twice_in_the_index(folder):
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{"{NORM}": "{SECOND}", ', 1))


@case(r"names files that are not \*\.safetensors in its own folder: \.\./model\.safetensors", cut=True)
def path_upwards(folder):
    shutil.copy(folder / SECOND, folder.parent / SINGLE)
    edit_place(folder, f"../{SINGLE}")


@case(r"in its own folder: /.*/model-00002-of-00002\.safetensors", cut=True)
def absolute_path(folder):
    edit_place(folder, str((folder / SECOND).resolve()))


@case(r"in its own folder: config\.json", cut=True)
def path_to_another_kind_of_file(folder):
    edit_place(folder, "config.json")


@case(r"in its own folder: 'model\\x00\.safetensors'", cut=True)
def path_with_a_zero(folder):
    edit_place(folder, "model\0.safetensors")


@case(r"holds tensors twice: model\.norm\.weight \(model-00001-of-00002\.safetensors and model-00002", cut=True)
def tensor_in_two_files(folder):
    for file in ("model-00001-of-00002.safetensors", SECOND):
        tensors = {name: np.array(x) for name, x in open_file(folder / file).tensors.items()}
        save_file(tensors | {NORM: np.ones(56, np.float32)}, folder / file)


@case(rf"{re.escape(SCALE)} holds scales that are NaN, infinite", base=FP8)
def nan_scales(folder):
    edit_tensors(folder, lambda tensors: tensors[SCALE].fill(np.nan))


@case(rf"1 missing: {re.escape(SCALE)}", base=FP8)
def missing_scales(folder):
    edit_tensors(folder, lambda tensors: tensors.pop(SCALE))


@case(rf"{re.escape(SCALE)} \[1, 1\] instead of \[2, 2\]", base=FP8)
def scales_of_another_shape(folder):
    edit_tensors(folder, lambda tensors: tensors.update({SCALE: np.ones((1, 1), np.float32)}))


@case(r"1 missing: lm_head\.weight_scale_inv", base=FP8)
def values_without_scales(folder):
    head = ml_dtypes.float8_e4m3fn
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].astype(np.float32).astype(head)}))


@case(r"2 of another shape than config\.json says: model\.embed_tokens\.weight \[101, 56\] instead of \[102, 56\]")
def wrong_vocabulary(folder):
    edit_json(folder / "config.json", lambda raw: raw.update(vocab_size=102))


@case(r"the tokenizer has ids up to 3071, the model a vocabulary of 101: they do not belong together")
def tokenizer_of_another_model(folder):
    tiny = pathlib.Path(__file__).parents[2] / "models" / "tiny"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, folder)


@case(r"tokenizer\.json cannot be read")
def tokenizer_is_no_json(folder):
    (folder / "tokenizer.json").write_text("{")


@case(r"config\.json is not valid JSON")
def config_is_no_json(folder):
    (folder / "config.json").write_text("{")


@case(r"config\.json must hold a mapping, not a list")
def config_is_a_list(folder):
    (folder / "config.json").write_text("[1]")


@case(r"has no config\.json")
def no_config(folder):
    (folder / "config.json").unlink()


@case(r"config\.json: rope_parameters = 'none' must be a mapping")
def config_of_wrong_types(folder):
    edit_json(folder / "config.json", lambda raw: raw.update(rope_parameters="none"))


@case(r"quant_method 'gguf' is not known")
def unknown_quantisation(folder):
    edit_json(folder / "config.json", lambda raw: raw.update(quantization_config={"quant_method": "gguf"}))


@case(r"generation_config\.json is not valid JSON")
def generation_config_is_no_json(folder):
    (folder / "generation_config.json").write_text("{")


@case(r"has neither model\.safetensors nor model\.safetensors\.index\.json")
def no_weights(folder):
    (folder / SINGLE).rename(folder / "pytorch_model.bin")


def spoiled(name, data, tmp_path):
    spoil, told, base, cut = CASES[name]
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for file in ("config.json", SINGLE):
        shutil.copy(data / "golden" / base / file, folder)
    if cut:
        tensors = tensors_of(folder)
        names, where = sorted(tensors), {}
        for i in range(2):
            file = f"model-{i + 1:05}-of-00002.safetensors"
            save_file({n: tensors[n] for n in names[i::2]}, folder / file)
            where |= dict.fromkeys(names[i::2], file)
        (folder / SINGLE).unlink()
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    spoil(folder)
    return folder, told


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_an_exit_code(name, data, tmp_path, capfd, quick_compile):
    folder, told = spoiled(name, data, tmp_path)

    def make_llm(arguments):
        return LLM(**arguments)

    code = serve.main([str(folder), "--port", "0"], make_llm=make_llm, environment={}, start=InThread)
    out, err = capfd.readouterr()
    assert code == 2 and not out
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("dcpjax.serve: error: ") and lines[0].isprintable()
    assert re.search(told, lines[0]), lines[0]


@pytest.mark.parametrize("command", ["serve", "convert"])
def test_the_commands_themselves(command, data, tmp_path):
    folder, told = spoiled("truncated", data, tmp_path)
    options = {
        "serve": [str(folder), "--port", "0"],
        "convert": ["--model", str(folder), "--quantization", "fp8", "--out", str(tmp_path / "out")],
    }
    line = [sys.executable, "-m", f"dcpjax.{command}", *options[command]]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(line, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and not done.stdout
    (error,) = [text for text in done.stderr.splitlines() if not text.startswith("INFO")]
    assert error.startswith(f"dcpjax.{command}: error: ") and re.search(told, error)
