"""The table of what the server answers names tests that exist."""

import ast

from dcpjax.server.rows import ROWS
from tests.server.process import ROOT


def test_every_test_that_is_named_exists():
    for rows in ROWS.values():
        for row in rows:
            file, found, name = row.test.partition("::")
            if not found:
                assert row.test.startswith("400"), row
                continue
            tree = ast.parse((ROOT / f"tests/server/test_{file}.py").read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, row.test


def test_what_is_refused_is_refused(client):
    assert client.post("/v1/completions", json={"prompt": "x", "priority": 1}).status_code == 400
