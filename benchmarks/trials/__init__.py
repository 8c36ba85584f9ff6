"""Hyper-parameter searches by stages beside separate trials: `python -m benchmarks.trials`."""
