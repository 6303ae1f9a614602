"""Reasons why two deployments cannot be compared.

CheckError
└── RefusedError
"""


class CheckError(Exception):
    """The check failed, so it is unknown whether the deployments differ."""


class RefusedError(CheckError):
    """A deployment answers a request with an error status."""
