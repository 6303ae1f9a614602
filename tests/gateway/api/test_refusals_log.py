"""Serve's log of calls: refusals in one line, defects with their traceback."""

import logging
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own use of pydantic is deprecated
    from ray.serve.exceptions import gRPCStatusError

from gateway.api.refusals_log import logger, shorten_refusals
from gateway.errors import InvalidRequestError


def logged(error):
    """Returns the record of an exception as Serve logs it, after all filters."""
    shorten_refusals()
    record = logger.makeRecord(
        "ray.serve", logging.ERROR, "f", 1, "Request failed.", (), (type(error), error, None)
    )
    assert logger.filter(record)
    return record


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_refusal_is_one_line_without_its_text(is_wrapped):
    error = InvalidRequestError("prompt", "secret")
    record = logged(gRPCStatusError(error, code=None, details="") if is_wrapped else error)
    assert (record.getMessage(), record.exc_info) == ("Request failed. InvalidRequestError", None)


def test_log_of_a_defect_has_its_traceback():
    assert logged(RuntimeError("x")).exc_info is not None
