"""The pictures in `docs/` are what their command draws, and every one is shown somewhere."""

import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "scripts" / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pictures()


def test_pictures_are_what_the_command_draws(drawn):
    kept = {path.name: path.read_text() for path in FOLDER.glob("*.svg")}
    assert kept.keys() == drawn.keys(), "make them again: make pictures"
    assert not [name for name in kept if kept[name] != drawn[name]], "make them again: make pictures"


def test_pictures_are_shown(drawn):
    shown = set()
    for page in (ROOT / "docs").glob("*.md"):
        shown |= set(re.findall(r"\]\(pictures/([\w.]+\.svg)\)", page.read_text()))
    assert shown == drawn.keys()


def test_merge_adds_up(drawn):
    """The sum of the parts and the attention over all tokens are the same number in the picture."""
    sums = re.findall(r'font-weight="600">([+−-]\d\.\d{3})<', drawn["merge.svg"])
    assert len(sums) == 2 and sums[0] == sums[1]
