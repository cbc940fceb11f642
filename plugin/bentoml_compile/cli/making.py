"""A service that a command makes, and the end of the command where that fails."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator

import click


class NotMade(click.ClickException):
    """The service cannot be made; no matter of how the command is used."""

    exit_code = 2


@contextlib.contextmanager
def making(target: str) -> Iterator[None]:
    """Inside, a service is made, which writes to stderr; what it raises is the command's end, with status 2.

    Raises:
        NotMade
    """
    from bentoml.exceptions import BentoMLException

    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except BentoMLException as error:
        raise NotMade(f"{target}: {error}") from error
    except SystemExit as error:  # whatever its status: the service is not there
        raise NotMade(f"{target} could not be made: it ended the process, with {error.code!r}") from error
    except Exception:
        click.echo(traceback.format_exc(), err=True)  # the service's own
        raise NotMade(f"{target} could not be made; its error is above") from None
