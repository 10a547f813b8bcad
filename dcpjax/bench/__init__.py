"""Measurements: `python -m dcpjax.bench NAME`. Every figure is a ratio of two arms in one run, beside a prediction."""
