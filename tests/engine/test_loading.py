"""Where models come from, and what is told while they load."""

import io
import logging

import pytest

from dcpjax import hub
from dcpjax.errors import ConfigError
from dcpjax.progress import loading


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
