"""`python -m dcpjax.convert`: what is written, what is refused, and what the tiny model still knows afterwards."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from dcpjax.convert import convert, main
from dcpjax.errors import ConfigError
from dcpjax.hub import TINY
from dcpjax.mesh import make_plan
from dcpjax.quant import QArray, plain
from models.config import read_config
from models.quantconfig import quantization_of
from models.stored import abstract, published
from models.tensorfile import open_file, write_file
from models.train import gates
from models.weights import load

pytestmark = pytest.mark.usefixtures("quick_compile")


def tensors_of(folder):
    return open_file(folder / "model.safetensors").tensors


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The tiny model in each format."""
    folder = tmp_path_factory.mktemp("converted")
    for name in ("fp8", "nvfp4", "none"):
        assert main(["--model", str(TINY), "--quantization", name, "--out", str(folder / name)]) == 0
    return folder


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_the_spelling_is_the_published_one(converted, data, name):
    """The same names and dtypes as in checkpoints that other tools wrote, but for scales of activations."""
    reference = data / "golden" / {"fp8": "q_fp8_block128", "nvfp4": "q_nvfp4_experts"}[name]

    def kinds(folder):
        """Whatever the numbers of layers and experts."""
        told = {(re.sub(r"(layers|experts)\.\d+\.", r"\1.", key), x.dtype) for key, x in tensors_of(folder).items()}
        return {(key, dtype) for key, dtype in told if not key.endswith("input_scale")}

    assert kinds(converted / name) == kinds(reference)
    said, want = (json.loads((folder / "config.json").read_text()) for folder in (converted / name, reference))
    assert quantization_of(said) == quantization_of(want) == name
    assert read_config(converted / name) == read_config(TINY)


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_values_are_near_and_stay_the_same(converted, tmp_path, name):
    cfg = read_config(TINY)
    params = load(converted / name, cfg, make_plan(1), jnp.bfloat16)
    told = abstract(cfg, make_plan(1), jnp.bfloat16, published(name, cfg))
    assert jax.tree.map(lambda x: x.shape, params) == jax.tree.map(lambda x: x.shape, told)
    want = load(TINY, cfg, make_plan(1), jnp.float32)

    def error(x, y):
        x, y = np.asarray(x, np.float32), np.asarray(y)
        return np.linalg.norm(x - y) / np.linalg.norm(y)

    moe = plain(params.layers.moe, jnp.float32)
    assert 0 < error(moe.gate, want.layers.moe.gate) < {"fp8": 0.03, "nvfp4": 0.12}[name]
    assert (error(params.layers.attention.k_b, want.layers.attention.k_b) > 0) == (name == "fp8")
    assert isinstance(params.mtp.layers.moe.gate, QArray) == (name == "fp8")
    convert(converted / name, tmp_path / "again", name)
    once, again = tensors_of(converted / name), tensors_of(tmp_path / "again")
    assert once.keys() == again.keys()
    for key, tensor in once.items():
        assert tensor.tobytes() == again[key].tobytes(), key


def test_without_quantisation_nothing_changes(converted):
    want, got = tensors_of(TINY), tensors_of(converted / "none")
    assert want.keys() == got.keys()
    for key, tensor in want.items():
        assert tensor.dtype == got[key].dtype
        np.testing.assert_array_equal(tensor, got[key], err_msg=key)


def test_widening(converted, tmp_path):
    convert(converted / "fp8", tmp_path / "wide", "none", "float32", file_bytes=10_000_000)
    assert len([*tmp_path.glob("wide/*.safetensors")]) > 2
    assert "quantization_config" not in json.loads((tmp_path / "wide" / "config.json").read_text())
    cfg = read_config(TINY)
    got, want = (load(f, cfg, make_plan(1), jnp.float32) for f in (tmp_path / "wide", converted / "fp8"))
    jax.tree.map(np.testing.assert_array_equal, got, plain(want, jnp.float32))


def test_files_beside_the_weights(converted):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (converted / "fp8" / name).read_bytes() == (TINY / name).read_bytes()


def test_nothing_is_overwritten(converted, tmp_path, capsys):
    before = {path.name for path in converted.iterdir()}
    with pytest.raises(ConfigError, match="exists already; nothing is overwritten"):
        convert(TINY, converted / "fp8", "nvfp4")
    assert main(["--model", str(TINY), "--quantization", "fp8", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dcpjax.convert: error: ") and "exists already" in line
    assert {path.name for path in converted.iterdir()} == before


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_what_no_number_is_in_is_not_converted(tmp_path, capsys, name, value):
    """It would give a checkpoint that is damaged from the start."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    tensors = {key: np.array(tensor) for key, tensor in open_file(folder / "model.safetensors").tensors.items()}
    wrong = "model.layers.2.mlp.experts.1.down_proj.weight"
    tensors[wrong][3, 5] = value
    specs = {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
    write_file(folder / "model.safetensors", specs, tensors.__getitem__)
    assert main(["--model", str(folder), "--quantization", name, "--out", str(tmp_path / "x")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{wrong} holds values that are NaN or infinite" in line
    assert not (tmp_path / "x").exists()


def test_a_conversion_that_fails_leaves_nothing(data, tmp_path):
    """Experts of 40 columns are no whole groups."""
    assert (
        main(["--model", str(data / "golden" / "b_group2"), "--quantization", "nvfp4", "--out", str(tmp_path / "x")])
        == 2
    )
    assert not [*tmp_path.iterdir()]


def test_wrong_arguments_are_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--model", str(TINY), "--quantization", "int4", "--out", "x"])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "invalid choice: 'int4'" in line and "fp8" in line


def test_look_ups_are_answered_as_before(converted):
    """One answer in a long table: right at least 95 % as often as in bfloat16."""
    cfg, tokenizer = read_config(TINY), tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))

    def right(folder):
        params = plain(load(folder, cfg, make_plan(1), jnp.float32), jnp.float32)
        return gates.look_up(gates.Bench(params, cfg, tokenizer), 384, 24)

    want = right(TINY)
    assert want >= 0.95
    assert right(converted / "fp8") >= 0.95 * want
    assert right(converted / "nvfp4") >= 0.95 * want
