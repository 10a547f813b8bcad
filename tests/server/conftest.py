"""One server for all tests that leave it as it was; drafts on, so that steps bring several tokens."""

import httpx
import pytest

from tests.server.process import ServerProcess


@pytest.fixture(scope="session")
def server():
    with ServerProcess("--served-model-name", "fake", "alias", fake={"num_drafts": 2, "delay": 0.002}) as running:
        yield running


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client
