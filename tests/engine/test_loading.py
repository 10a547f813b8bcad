"""Where models come from, and what is told while they load."""

import io
import logging

import jax
import numpy as np
import pytest

from dcpjax import build, hub
from dcpjax.errors import ConfigError
from dcpjax.mesh import make_plan
from dcpjax.progress import loading
from models.config import from_hf
from models.params import init, pad_to
from models.saving import write_json
from tests.engine.small import RAW


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_in_a_log(caplog):
    clock = Clock()
    with caplog.at_level(logging.INFO, "dcpjax"), loading(io.StringIO(), clock) as progress:
        for clock.now, done in ((9, 2e9), (11, 3e9), (12, 4e9), (25, 9e9), (30, 10e9)):
            progress(int(done), 10_000_000_000)
    assert [record.message for record in caplog.records] == [
        "loading weights: 3.0 of 10.0 GB, 273 MB/s",
        "loading weights: 9.0 of 10.0 GB, 360 MB/s",
        "weights: 10,000.0 MB in 30.0 s, 333 MB/s",
    ]


def test_a_bar_on_a_terminal(caplog):
    stream, clock = Terminal(), Clock()
    with caplog.at_level(logging.INFO, "dcpjax"), loading(stream, clock) as progress:
        progress(3_000_000, 10_000_000)
        clock.now = 2.0
        progress(10_000_000, 10_000_000)
    assert "loading" in stream.getvalue() and "10.0/10.0 MB" in stream.getvalue()
    assert [record.message for record in caplog.records] == ["weights: 10.0 MB in 2.0 s, 5 MB/s"]


def test_models_of_every_place(tmp_path):
    assert hub.find(None) == (hub.TINY, "tiny")
    assert hub.find(tmp_path) == (tmp_path, tmp_path.name)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7, "top_p": null, "transformers_version": "5"}')
    assert hub.generation_defaults(tmp_path) == {"temperature": 0.7, "transformers_version": "5"}
    for text in ('{"temperature": "hot"}', '{"temperature": NaN}', '{"top_p": 5}', '{"max_new_tokens": 0}', "[]"):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"generation_config\.json"):
            hub.generation_defaults(tmp_path)
    asked = []

    def fetch(name, **more):
        asked.append((name, more["revision"], more["allow_patterns"]))
        return str(tmp_path)

    assert hub.find("zai-org/GLM-5.2-FP8", fetch) == (tmp_path, "GLM-5.2-FP8")
    assert hub.find("zai-org/GLM-5.2@refs/pr/3", fetch) == (tmp_path, "GLM-5.2")
    wanted = ["*.json", "*.jinja", "*.safetensors"]
    assert asked == [("zai-org/GLM-5.2-FP8", None, wanted), ("zai-org/GLM-5.2", "refs/pr/3", wanted)]


@pytest.mark.parametrize("model", ["nowhere", "/no/such/folder", "a/b/c"])
def test_what_is_neither_a_folder_nor_an_id(model):
    with pytest.raises(ConfigError, match=f"model '{model}' is not a folder; give a folder .* or a Hub id"):
        hub.find(model)


def test_a_hub_that_does_not_answer():
    def fetch(name, **more):
        raise OSError("401 Client Error\nlots of\nlines")

    with pytest.raises(ConfigError, match=r"and the Hub does not give it: 401 Client Error\. Give a folder"):
        hub.find("owner/name", fetch)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def test_a_dummy_needs_a_configuration_and_no_weights(tmp_path):
    """Of the shapes, dtypes and places that a plain checkpoint has on these devices, with its padding."""
    write_json(tmp_path / "config.json", {**RAW, "quantization_config": FP8})
    config = build.EngineConfig(decode_context_parallel_size=2, block_size=4, max_num_seqs=2, load_format="dummy")
    found = build.build_runner(tmp_path, config).params
    drawn = pad_to(init(from_hf(RAW), jax.random.key(0)), from_hf(RAW), make_plan(2, 2))
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(drawn), strict=True):
        assert (got.shape, got.dtype, got.sharding) == (want.shape, want.dtype, want.sharding)
        got, want = np.asarray(got), np.asarray(want)
        assert np.array_equal(got[want == 0], want[want == 0]), "padding and biases"
        assert abs(got.std() - want.std()) <= 0.15 * want.std() and abs(got.mean() - want.mean()) < 0.15
    with pytest.raises(ConfigError, match="load_format must be one of auto, safetensors, dummy, got 'pt'"):
        build.EngineConfig(load_format="pt")
