"""What machines share: the keys that sign artifacts, and the remote that holds them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shlex
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bentoml_compile.artifacts.remote_files import RemoteFiles
from bentoml_compile.artifacts.signing import KEY, KEY_FILE, PrivateKey, PublicKey
from bentoml_compile.doctor.check import Finding, in_one_line, ok, problem, warning, within
from bentoml_compile.doctor.storage import cannot_write
from bentoml_compile.errors import ConfigError

_NEW_KEY = "bentoml-compile keys new"
_LOCAL = ("file", "local")


def keys(texts: Sequence[str], *, has_remote: bool) -> Iterator[Finding]:
    """artifacts.public_keys, and the private key of this environment."""
    if importlib.util.find_spec("cryptography") is None:
        if has_remote or texts:
            yield problem("cryptography is not installed", "pip install 'bentoml-compile[remote]'")
        else:
            yield ok("no keys, and no remote that needs them")
        return
    trusted: list[PublicKey] = []
    for text in texts:
        try:
            trusted.append(PublicKey.parse(text))
        except ValueError as error:
            yield problem(f"artifacts.public_keys: {text}: {error}", "bentoml-compile keys show FILE")
    try:
        own = PrivateKey.from_environment()
    except ConfigError as error:
        yield problem(str(error), _for_private_key(str(error), texts))
        return
    if has_remote and not texts:
        listed = f"[{own.public}]" if own is not None else "[ed25519:...]"
        yield warning(
            "artifacts.public_keys is empty: nothing is loaded from the remote, and nothing uploaded from here",
            f"torch_compile: {{artifacts: {{public_keys: {listed}}}}}"
            + ("" if own is not None else f"; `{_NEW_KEY}` makes a pair"),
        )
    if own is not None:
        yield from _private(own, trusted, problem if has_remote else warning)
    elif trusted:
        meaning = ": nothing is uploaded from here" if has_remote else ""
        yield ok(f"{_count(trusted)}; no signing key in this environment{meaning}")
    elif not has_remote:
        yield ok("no keys, and no remote that needs them")


def _private(
    own: PrivateKey, trusted: Sequence[PublicKey], unlisted: Callable[[str, str], Finding]
) -> Iterator[Finding]:
    if trusted and own.public not in trusted:
        yield unlisted(
            f"this environment signs as {own.public}, which artifacts.public_keys does not list: "
            "nothing is uploaded from here",
            f"torch_compile: {{artifacts: {{public_keys: [{', '.join(map(str, [*trusted, own.public]))}]}}}}",
        )
    else:
        yield ok(f"{_count(trusted)}; this environment signs as {own.public}")
    file = os.environ.get(KEY_FILE)
    if file is not None and Path(file).stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield warning(f"{file} holds the private key, and other users can read it", f"chmod 600 {shlex.quote(file)}")


def _count(trusted: Sequence[PublicKey]) -> str:
    return f"{len(trusted)} public key{'' if len(trusted) == 1 else 's'}"


def _for_private_key(message: str, public_keys: Sequence[str]) -> str:
    """A new key helps only where none is listed yet."""
    if "both set" in message:
        return f"unset {KEY_FILE}"
    file = os.environ.get(KEY_FILE)
    if file is not None and "Permission" in message:
        return f"chmod u+r {shlex.quote(file)}"
    if public_keys:
        variable = f"{KEY} to" if file is None else f"{KEY_FILE} to the file of"
        return f"set {variable} the private key of {' or '.join(public_keys)}, or unset it: then nothing is uploaded"
    if file is not None and not os.path.exists(file):
        return f"{_NEW_KEY} {shlex.quote(file)}"
    return f'{_NEW_KEY} && export {KEY_FILE}="$PWD/signing-key.pem"'


def signs() -> bool:
    """Whether this environment has a private key that can be used."""
    try:
        return PrivateKey.from_environment() is not None
    except ConfigError:
        return False


def remote(uri: str, *, seconds: float, writes: bool) -> Iterator[Finding]:
    """The remote of a config: read, and written (a small object below `<uri>/doctor/`) where a key would sign.

    Args:
        seconds: remote_timeout, for all of it together.
    """
    protocol = uri.split(":", 1)[0]
    try:
        files = RemoteFiles(uri, seconds=seconds)
    except ConfigError as error:
        text, _, fix = str(error).rpartition(": pip ")
        yield problem(text, f"pip {fix}") if text else problem(str(error), "pip install the package that has it")
        return
    place = files.uri
    if protocol in _LOCAL and not os.path.lexists(path := Path(uri.split("://", 1)[1])):
        yield _absent(place, path, writes)
        return
    started = time.monotonic()
    try:
        said = within(seconds, lambda: _written(files, protocol) if writes else _read(files))
    except TimeoutError:
        yield _no_answer(place, protocol, seconds)
    except FileNotFoundError as error:
        yield problem(f"{place}: there is no such bucket: {in_one_line(error)}", _make(protocol, place))
    except PermissionError as error:
        yield problem(f"{place}: {in_one_line(error)}", _permit(protocol, uri, writes))
    except Exception as error:
        if time.monotonic() - started >= seconds:  # the file system gave up, before the wait for it was seen to be over
            yield _no_answer(place, protocol, seconds)
        else:
            yield problem(f"{place} cannot be used: {in_one_line(error)}", _way_to(protocol))
    else:
        yield ok(f"{place}: {said} in {time.monotonic() - started:.2f} s; remote_timeout is {seconds:g} s")


def _no_answer(place: str, protocol: str, seconds: float) -> Finding:
    return problem(
        f"{place}: no answer within remote_timeout ({seconds:g} s), so a boot waits so long and then compiles",
        f"{_way_to(protocol)}; or torch_compile: {{artifacts: {{remote_timeout: {2 * seconds:g}}}}}",
    )


def _absent(place: str, path: Path, writes: bool) -> Finding:
    """Of a folder that is not there."""
    if (reason := cannot_write(path)) is not None:
        return problem(f"{place} is not there, and {reason}", f"mount -a, or mkdir -p {shlex.quote(str(path))}")
    if writes:
        return ok(f"{place} is not there yet; it is made by the first upload")
    return warning(
        f"{place} is not there yet; it is made by the first upload, and this environment uploads nothing",
        f"mount -a, or mkdir -p {shlex.quote(str(path))}",
    )


def _read(files: RemoteFiles) -> str:
    files.list("")
    return "read"


def _written(files: RemoteFiles, protocol: str) -> str:
    files.list("")
    path, content = f"doctor/{secrets.token_hex(8)}", secrets.token_bytes(64)
    try:
        files.write(path, content)
    except FileNotFoundError:
        if protocol not in _LOCAL:
            raise
        files.write(path, content)  # another doctor has just removed the folder
    try:
        if files.read(path, len(content)) != content:
            raise OSError("it does not give back what was written to it")
    finally:
        files.remove(path)
        if protocol in _LOCAL:
            with contextlib.suppress(OSError):  # another doctor's object lies there
                Path(files.uri.split("://", 1)[1], "doctor").rmdir()
    return "read and written"


def _way_to(protocol: str) -> str:
    if protocol != "s3":
        return "see that this machine reaches it, and that it has space"
    endpoint = os.environ.get("FSSPEC_S3_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT_URL_S3")
    return f"curl -sv {shlex.quote(endpoint or os.environ.get('AWS_ENDPOINT_URL', 'https://s3.amazonaws.com'))}"


def _make(protocol: str, place: str) -> str:
    if protocol == "s3":
        return f"aws s3 mb s3://{place.split('://', 1)[1].split('/', 1)[0]}"
    return "make it, or name another one: torch_compile: {artifacts: {remote: ...}}"


def _permit(protocol: str, uri: str, writes: bool) -> str:
    if protocol in _LOCAL:
        return f"chown -R {os.geteuid()} {shlex.quote(uri.split('://', 1)[1])}"
    actions = "read, list, write and delete" if writes else "read and list"
    return f"let these credentials {actions} below it" + ("; aws sts get-caller-identity" if protocol == "s3" else "")
