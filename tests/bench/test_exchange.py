"""The padded exchange of tokens: the same layer, and never fewer bytes than the sum that the engine uses."""

import numpy as np
import pytest

from dcpjax.bench import exchange
from models.config import MoeConfig

CONFIG = MoeConfig(8, 3, 16, 16, 1, 1, True, 1.0)


@pytest.mark.parametrize("devices", [1, 4, 8])
def test_all_arms_are_the_same_layer(devices):
    parts, *others = (call() for call in exchange.arms(exchange.inputs(CONFIG, 32, 16), devices).values())
    assert len(others) == 2
    for other in others:
        np.testing.assert_allclose(other, parts, rtol=1e-4, atol=1e-5)


def test_bytes_decide_for_the_sum():
    """On any number of devices a padded exchange receives half as much again; one that knew its sizes would win from 13 on."""
    for devices in (2, 4, 8, 64):
        found = exchange.received(devices, 8)
        assert found["padded"] == pytest.approx(1.5 * found["sum"])
    better = [n for n in range(2, 65) if exchange.received(n, 8)["ragged"] < exchange.received(n, 8)["sum"]]
    assert better == list(range(13, 65))
