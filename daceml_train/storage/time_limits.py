"""Time limits that users set by environment variables."""

import os

from daceml_train.errors import DacemlError


def seconds_of(variable: str, default: float, error: type[DacemlError]) -> float:
    """The seconds that an environment variable gives. Raises `error` for what is not a positive number."""
    given = os.environ.get(variable)
    if not given:
        return default
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise error(f"{variable}={given!r} is not a positive number of seconds")
    return seconds
