"""Signed manifests and leases: DSSE envelopes (https://github.com/secure-systems-lab/dsse) over Ed25519.

key = PrivateKey.new()
envelope = key.sign(payload)
payload, signer = open_envelope(envelope, {key.public})
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bentoml_compile.errors import ArtifactRejected, ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PAYLOAD_TYPE = "application/vnd.bentoml-compile.manifest+json"
MAX_ENVELOPE = 4 << 20  # bytes; JSON may take twenty times as much memory, before anything is verified
KEY = "BENTOML_COMPILE_SIGNING_KEY"
KEY_FILE = "BENTOML_COMPILE_SIGNING_KEY_FILE"

_PREFIX = "ed25519:"
_P = 2**255 - 19
_D = -121665 * pow(121666, -1, _P)
_STANDARD = str.maketrans("-_", "+/")


def has_private_key() -> bool:
    """Whether the environment names one; `PrivateKey.from_environment` finds out whether it can be used."""
    return KEY in os.environ or KEY_FILE in os.environ


@dataclass(frozen=True, slots=True)
class PublicKey:
    """An Ed25519 public key; `parse` and `str` are inverses.

    Raises:
        ValueError: not 32 bytes, or one of the few for which anybody can make signatures.
    """

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != 32:
            raise ValueError(f"a key of {len(self.raw)} bytes; Ed25519 has 32")
        if _of_small_order(self.raw):
            raise ValueError("a key that anybody can sign for; make one with `bentoml-compile keys new`")

    @classmethod
    def parse(cls, text: str) -> PublicKey:
        """The key of `ed25519:<base64 of 32 bytes>`, written exactly so.

        Raises:
            ValueError: anything else.
        """
        if not text.startswith(_PREFIX):
            raise ValueError(f"not {_PREFIX}<base64 of 32 bytes>, as `bentoml-compile keys show FILE` prints it")
        encoded = text.removeprefix(_PREFIX)
        raw = _decode(encoded)
        if base64.b64encode(raw).decode() != encoded:
            raise ValueError("not in base64's standard alphabet")
        return cls(raw)

    def __str__(self) -> str:
        return _PREFIX + base64.b64encode(self.raw).decode()


class PrivateKey:
    """An Ed25519 private key, which signs manifests and leases."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def new(cls) -> PrivateKey:
        with _needs_cryptography():
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_pem(cls, pem: bytes) -> PrivateKey:
        """The key of a PEM text (PKCS8) without a password.

        Raises:
            ValueError: no such text, a password, or a key of another algorithm.
            ConfigError: `cryptography` is not installed.
        """
        with _needs_cryptography():
            from cryptography.exceptions import UnsupportedAlgorithm
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
            from cryptography.hazmat.primitives.serialization import load_pem_private_key
        try:
            key = load_pem_private_key(pem, password=None)
        except TypeError:
            raise ValueError("it has a password; write it without one: openssl pkey -in FILE") from None
        except (ValueError, UnsupportedAlgorithm):
            raise ValueError("not a private key in PEM; make one with `bentoml-compile keys new`") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError("a key of another algorithm than Ed25519; make one with `bentoml-compile keys new`")
        return cls(key)

    @classmethod
    def from_environment(cls) -> PrivateKey | None:
        """The key in $BENTOML_COMPILE_SIGNING_KEY (PEM), or in the file that ..._KEY_FILE names; None: neither is set.

        Raises:
            ConfigError: both are set, or what is set cannot be used.
        """
        text, file = os.environ.get(KEY), os.environ.get(KEY_FILE)
        if text is not None and file is not None:
            raise ConfigError(f"{KEY} and {KEY_FILE} are both set; unset one of them")
        try:
            if text is not None:
                return cls.from_pem(text.encode(errors="surrogateescape"))
            return cls.from_pem(Path(file).read_bytes()) if file is not None else None
        except ValueError as error:  # never with the value: it may be the key
            raise ConfigError(f"{KEY if file is None else f'{KEY_FILE}={file}'} cannot be used: {error}") from None
        except OSError as error:
            raise ConfigError(f"{KEY_FILE}={file} cannot be read: {error.strerror}") from error

    def to_pem(self) -> bytes:
        """The key as PEM (PKCS8), without a password."""
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def public(self) -> PublicKey:
        return PublicKey(self._key.public_key().public_bytes_raw())

    def sign(self, payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
        """The envelope of a payload, which is opened as one of this type only.

        Raises:
            ValueError: it would be larger than MAX_ENVELOPE, which nobody opens.
        """
        signature = self._key.sign(_encoded(payload, payload_type))
        content = {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": payload_type,
            "signatures": [{"keyid": str(self.public), "sig": base64.b64encode(signature).decode()}],
        }
        envelope = json.dumps(content).encode()
        if len(envelope) > MAX_ENVELOPE:
            raise ValueError(f"an envelope of {len(envelope)} bytes; the most is {MAX_ENVELOPE}")
        return envelope


def open_envelope(
    envelope: bytes, keys: Collection[PublicKey], payload_type: str = PAYLOAD_TYPE
) -> tuple[bytes, PublicKey]:
    """The payload of an envelope that one of the keys signed, and that key.

    The envelope's `keyid`s and whatever else it says are not trusted and not used.

    Raises:
        ArtifactRejected: no listed key signed exactly this payload as one of `payload_type`; or it is no DSSE envelope.
        ConfigError: `cryptography` is not installed.
    """
    if not keys:
        raise ArtifactRejected("no key is trusted; list those that may sign in artifacts.public_keys")
    content = _parse(envelope)
    if content.payloadType != payload_type:
        raise ArtifactRejected(f"payload type {content.payloadType[:100]!r}; this version reads {payload_type}")
    try:
        payload = _decode(content.payload)
        signatures = [_decode(signature.sig) for signature in content.signatures]
    except ValueError as error:
        raise ArtifactRejected(f"not a DSSE envelope: {error}") from None
    signed = _encoded(payload, payload_type)
    for key in keys:
        if any(_verifies(key, signature, signed) for signature in signatures):
            return payload, key
    raise ArtifactRejected("no key of artifacts.public_keys signed it")


class _Signature(BaseModel):
    model_config = ConfigDict(strict=True)
    sig: str


class _Envelope(BaseModel):
    model_config = ConfigDict(strict=True)  # unknown keys are ignored: DSSE, envelope.md
    payload: str
    payloadType: str
    signatures: Annotated[list[_Signature], Field(min_length=1, max_length=16)]


def _parse(envelope: bytes) -> _Envelope:
    if len(envelope) > MAX_ENVELOPE:
        raise ArtifactRejected(f"an envelope of {len(envelope)} bytes; the most is {MAX_ENVELOPE}")
    try:
        return _Envelope.model_validate(json.loads(envelope.decode(), object_pairs_hook=_without_duplicates))
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise ArtifactRejected(f"not a DSSE envelope: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactRejected(f"not a DSSE envelope: {error}") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object that parsers could read differently is refused."""
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key stands in it twice")
    return content


def _verifies(key: PublicKey, signature: bytes, signed: bytes) -> bool:
    with _needs_cryptography():
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    try:
        Ed25519PublicKey.from_public_bytes(key.raw).verify(signature, signed)
    except InvalidSignature:
        return False
    return True


def _encoded(payload: bytes, payload_type: str) -> bytes:
    """What is signed: DSSE's pre-authentication encoding."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def _decode(text: str) -> bytes:
    """Base64 in either alphabet, as DSSE asks; ValueError for what no encoder writes."""
    with contextlib.suppress(ValueError):
        content = base64.b64decode(text.translate(_STANDARD))
        if text in (base64.b64encode(content).decode(), base64.urlsafe_b64encode(content).decode()):
            return content
    raise ValueError("not base64 as an encoder writes it")


def _of_small_order(raw: bytes) -> bool:
    """Whether eight times the point is the neutral one: its signatures say nothing (RFC 8032, section 5.1).

    The points' y are 0, 1, -1, and the roots of d*y^4 + 2*y^2 - 1, whose doubles have y = 0.
    """
    y = int.from_bytes(raw, "little") & (2**255 - 1)
    return y * (y**2 - 1) * (_D * y**4 + 2 * y**2 - 1) % _P == 0


@contextlib.contextmanager
def _needs_cryptography() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        message = f"signed artifacts need cryptography ({error}): pip install 'bentoml-compile[remote]'"
        raise ConfigError(message) from error
