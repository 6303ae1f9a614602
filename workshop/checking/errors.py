"""Reasons why two deployments cannot be compared.

CheckError
└── RefusedError
"""


class CheckError(Exception):
    """The check could not be made: neither that the deployments differ is known, nor that they do not."""


class RefusedError(CheckError):
    """A deployment answers a request with an error."""
