"""Documents that are made from the code say what the code says."""

import json
import pathlib

from dcpjax import support

ROOT = pathlib.Path(__file__).parent.parent


def test_support_page_is_what_the_checks_say():
    raw = json.loads((ROOT / "tests/data/glm-5.2/config.json").read_text())
    page = (ROOT / "docs/support.md").read_text()
    assert support.render(raw) == page, "make it again: python -m dcpjax.support tests/data/glm-5.2/config.json"
    assert "| runs |" in page and "refused: " in page


def test_architecture_names_every_module():
    text = (ROOT / "docs/architecture.md").read_text()
    modules = [
        path.relative_to(ROOT).as_posix()
        for folder in ("dcpjax", "models")
        for path in (ROOT / folder).rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    ]
    missing = [module for module in modules if f"`{module}`" not in text]
    assert not missing, f"docs/architecture.md has no line for {missing}"
