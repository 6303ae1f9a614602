"""Serve, imported with its warnings ignored."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own use of pydantic is deprecated
    import ray.serve  # noqa: F401
