"""`bentoml-compile keys`: the keys that sign artifacts, and those that services trust."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import click

from bentoml_compile.artifacts.signing import KEY, KEY_FILE, PrivateKey
from bentoml_compile.errors import ConfigError

_HOW = """\
{file} holds the private key. Keep it in a secret: not in the repository, and not in the Bento (.bentoignore).
It signs artifacts where a process is to upload them, by one of

  export {key_file}={path}
  export {key}="$(cat {path})"

The line above is its public key. Services load what it signed if their config lists it:

  services:
    YourService:
      torch_compile:
        artifacts:
          public_keys:
            - {public}"""


@click.group()
def keys() -> None:
    """Make and show keys: a private one signs artifacts, public ones say whose artifacts a service loads."""


@keys.command()
@click.argument("file", type=click.Path(path_type=Path), default="signing-key.pem")
def new(file: Path) -> None:
    """Write a new private key to FILE (default: signing-key.pem) and print its public key."""
    with _errors():
        key = PrivateKey.new()
    try:
        _write(file, key.to_pem())
    except FileExistsError:
        raise click.UsageError(f"{file} exists and is kept; name another file, or remove it") from None
    except OSError as error:
        raise click.UsageError(f"{file} cannot be written: {error.strerror}") from error
    click.echo(str(key.public))
    path = shlex.quote(str(file.absolute()))
    click.echo(_HOW.format(file=file, path=path, key=KEY, key_file=KEY_FILE, public=key.public), err=True)


@keys.command()
@click.argument("file", type=click.File("rb"))
def show(file: BinaryIO) -> None:
    """Print the public key of the private one in FILE (PEM; - for stdin)."""
    try:
        with _errors():
            click.echo(str(PrivateKey.from_pem(file.read()).public))
    except ValueError as error:
        raise click.UsageError(f"{file.name}: {error}") from None


def _write(file: Path, content: bytes) -> None:
    """A new file that its owner alone can read; all of the content or no file."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(content)
    except BaseException:
        file.unlink()
        raise


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
