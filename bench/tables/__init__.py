"""The tables of results in the docs and the README, from bench/results/*.json: `python -m bench.tables`."""
