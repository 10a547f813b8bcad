"""The loading benchmark on a small random checkpoint."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.bench import load, synthetic
from dcpjax.mesh import make_plan
from dcpjax.quant import QArray, plain
from models import weights
from models.config import from_hf, read_config
from tests.engine import small

pytestmark = pytest.mark.usefixtures("quick_compile")

# Widths of whole NVFP4 groups.
RAW = small.RAW | {"hidden_size": 64, "moe_intermediate_size": 32}


def test_the_layers_are_of_every_kind():
    cfg = from_hf(synthetic.FEW_LAYERS)
    assert {(kind.full, kind.sparse) for kind in cfg.layers} >= {(True, False), (False, True), (True, True)}
    assert cfg.num_layers == 6 and cfg.has_mtp and cfg.hidden_size == 6144 and cfg.moe.num_experts == 256


@pytest.mark.parametrize("quantization", ["fp8", "nvfp4", None])
def test_what_is_written_has_the_right_size(tmp_path, quantization):
    size = synthetic.write(tmp_path / "x", RAW, quantization)
    assert size <= (tmp_path / "x" / "model.safetensors").stat().st_size <= size + 200_000
    cfg = read_config(tmp_path / "x")
    params = weights.load(tmp_path / "x", cfg, make_plan(1), jnp.float32)
    assert isinstance(params.layers.moe.gate, QArray) == (quantization is not None)
    wide = plain(params, jnp.float32)
    for x in (wide.layers.moe.gate, wide.layers.moe.down, wide.layers.attention.o, wide.layers.attention.k_b):
        np.testing.assert_allclose(np.std(x) * x.shape[-1] ** 0.5, 1, rtol=0.2)
    np.testing.assert_array_equal(wide.norm, 1)


def test_measuring(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(load, "_travel_rate", lambda sharding, rate=load._travel_rate: rate(sharding, 1 << 20))
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    parser = load.argparse.ArgumentParser()
    load.add_arguments(parser)
    config, out = str(tmp_path / "config.json"), tmp_path / "figures.json"
    words = [
        "--config",
        config,
        "--tensor-parallel-size",
        "2",
        "--dtype",
        "float32",
        "--decode",
        "4",
        "--json",
        str(out),
    ]
    load.run(parser.parse_args([str(tmp_path / "x"), *words]))
    row = json.loads(out.read_text())
    assert len(row["tokens"]) == 4 and row["load_gb_s"] > 0 and row["read_gb_s"] > 0
    assert row["share"] == pytest.approx(row["load_gb_s"] / min(row["read_gb_s"], row["travel_gb_s"]))
    assert row["layer_gb"] * 1e9 < row["gb"] * 1e9 < small.CONFIG.num_layers * 10 * row["layer_gb"] * 1e9
    assert "of the slower; host memory" in capsys.readouterr().out
