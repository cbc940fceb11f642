"""Signed envelopes: what a listed key signed comes out, unchanged; nothing else does."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from bentoml_compile.artifacts import signing
from bentoml_compile.artifacts.signing import MAX_ENVELOPE, PAYLOAD_TYPE, PrivateKey, PublicKey, open_envelope
from bentoml_compile.errors import ArtifactRejected, ConfigError

# RFC 8032, section 7.1, TEST 2 and TEST 3: seed, public key, message, signature
RFC_8032 = [
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
        "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]
PKCS8_OF_A_SEED = bytes.fromhex("302e020100300506032b657004220420")  # RFC 8410, section 7
PAYLOAD = b'{"model": "encoder"}'
KEY = PrivateKey.new()
OTHER = PrivateKey.new()
P = 2**255 - 19


def altered(change: Callable[[dict[str, Any]], object], key: PrivateKey = KEY) -> bytes:
    content = json.loads(key.sign(PAYLOAD))
    change(content)
    return json.dumps(content).encode()


def described(change: Mapping[str, object]) -> bytes:
    """What KEY signed, with something else said about its signature."""
    return altered(lambda content: content["signatures"][0].update(change))


def signed_by(signatures: list[dict[str, str]]) -> bytes:
    return altered(lambda content: content.update(signatures=signatures))


def refusal(envelope: bytes, *keys: PublicKey) -> str:
    with pytest.raises(ArtifactRejected) as caught:
        open_envelope(envelope, keys or {KEY.public})
    return str(caught.value)


@settings(deadline=None)
@given(payload=st.binary(max_size=300))
def test_what_was_signed_comes_out_with_the_key_that_signed_it(payload: bytes) -> None:
    assert open_envelope(KEY.sign(payload), [OTHER.public, KEY.public]) == (payload, KEY.public)


@pytest.mark.parametrize(("seed", "public", "message", "signature"), RFC_8032)
def test_keys_and_signatures_are_those_of_rfc_8032(seed: str, public: str, message: str, signature: str) -> None:
    der = base64.b64encode(PKCS8_OF_A_SEED + bytes.fromhex(seed)).decode()
    key = PrivateKey.from_pem(f"-----BEGIN PRIVATE KEY-----\n{der}\n-----END PRIVATE KEY-----\n".encode())
    assert key.public == PublicKey(bytes.fromhex(public))
    assert signing._verifies(key.public, bytes.fromhex(signature), bytes.fromhex(message))
    assert not signing._verifies(key.public, bytes.fromhex(signature), bytes.fromhex(message) + b"\0")
    assert der in key.to_pem().decode()


def test_a_payload_is_opened_as_the_type_that_it_was_signed_as_and_no_other() -> None:
    lease = "application/vnd.bentoml-compile.lease+json"
    for signed_as, read_as in ((PAYLOAD_TYPE, lease), (lease, PAYLOAD_TYPE)):
        envelope = KEY.sign(PAYLOAD, signed_as)
        assert open_envelope(envelope, {KEY.public}, signed_as) == (PAYLOAD, KEY.public)
        with pytest.raises(ArtifactRejected, match="payload type"):
            open_envelope(envelope, {KEY.public}, read_as)
        renamed = envelope.replace(signed_as.encode(), read_as.encode())
        with pytest.raises(ArtifactRejected, match="no key"):
            open_envelope(renamed, {KEY.public}, read_as)


def test_what_is_signed_is_dsse_s_encoding_of_type_and_payload() -> None:
    content = json.loads(KEY.sign(PAYLOAD))
    assert base64.b64decode(content["payload"]) == PAYLOAD
    assert content["payloadType"] == "application/vnd.bentoml-compile.manifest+json"
    Ed25519PublicKey.from_public_bytes(KEY.public.raw).verify(
        base64.b64decode(content["signatures"][0]["sig"]),
        b'DSSEv1 45 application/vnd.bentoml-compile.manifest+json 20 {"model": "encoder"}',
    )


@settings(deadline=None)
@given(data=st.data())
def test_a_flipped_byte_is_refused_or_yields_the_same_payload(data: st.DataObject) -> None:
    envelope = bytearray(KEY.sign(PAYLOAD))
    envelope[data.draw(st.integers(0, len(envelope) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        payload, key = open_envelope(bytes(envelope), {KEY.public})
    except ArtifactRejected:
        return
    assert (payload, key) == (PAYLOAD, KEY.public)


def test_a_flipped_byte_of_payload_type_or_signature_is_always_refused() -> None:
    envelope = KEY.sign(PAYLOAD)
    for text in (
        base64.b64encode(PAYLOAD),
        PAYLOAD_TYPE.encode(),
        json.loads(envelope)["signatures"][0]["sig"].encode(),
    ):
        start = envelope.index(text)
        for position in range(start, start + len(text)):
            for bit in range(8):
                flipped = bytearray(envelope)
                flipped[position] ^= 1 << bit
                refusal(bytes(flipped))


@settings(deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_anything_that_is_no_envelope_is_refused(envelope: bytes) -> None:
    refusal(envelope)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(key=st.sampled_from(["payload", "payloadType", "signatures", "sig"]), value=JSON)
def test_a_value_of_another_kind_is_refused(key: str, value: Any) -> None:
    refusal(altered(lambda content: (content["signatures"][0] if key == "sig" else content).update({key: value})))


@pytest.mark.parametrize(
    ("envelope", "words"),
    [
        (b"[" * 100_000, "not a DSSE envelope"),
        (b'{"payload": ' + b"9" * 10_000 + b"}", "not a DSSE envelope"),
        (b"\xef\xbb\xbf" + KEY.sign(PAYLOAD), "not a DSSE envelope"),
        (KEY.sign(PAYLOAD).decode().encode("utf-16"), "not a DSSE envelope"),
        (KEY.sign(PAYLOAD) + b" {}", "not a DSSE envelope"),
        (KEY.sign(PAYLOAD).replace(b'{"keyid"', b'{"sig": "", "keyid"'), "a key stands in it twice"),
        (b'{"payload": "", ' + KEY.sign(PAYLOAD)[1:], "a key stands in it twice"),
        (altered(lambda content: content.pop("signatures")), "signatures: Field required"),
        (altered(lambda content: content["signatures"].clear()), "signatures: List should have at least 1 item"),
        (altered(lambda content: content.update(payload="\ud800")), "not a DSSE envelope"),
        (altered(lambda content: content.update(payload=PAYLOAD.decode())), "not a DSSE envelope"),
    ],
    ids=["deep", "digits", "mark", "utf-16", "more", "twice", "twice above", "unsigned", "empty", "surrogate", "plain"],
)
def test_a_malformed_envelope_is_refused_with_the_reason(envelope: bytes, words: str) -> None:
    assert words in refusal(envelope)


def test_an_envelope_that_is_too_large_is_refused_before_it_is_parsed() -> None:
    padded = KEY.sign(PAYLOAD).ljust(MAX_ENVELOPE)
    assert open_envelope(padded, {KEY.public}) == (PAYLOAD, KEY.public)
    assert f"the most is {MAX_ENVELOPE}" in refusal(padded + b" ")
    with pytest.raises(ValueError, match=f"the most is {MAX_ENVELOPE}"):
        KEY.sign(bytes(MAX_ENVELOPE))


def test_another_payload_type_is_refused_even_if_it_is_signed() -> None:
    kind = "application/vnd.in-toto+json"
    encoded = b"DSSEv1 28 application/vnd.in-toto+json 20 " + PAYLOAD
    signature = base64.b64encode(KEY._key.sign(encoded)).decode()
    envelope = altered(lambda content: content.update(payloadType=kind, signatures=[{"sig": signature}]))
    assert refusal(envelope) == f"payload type {kind!r}; this version reads {PAYLOAD_TYPE}"
    relabelled = altered(lambda content: content.update(signatures=[{"sig": signature}]))
    assert refusal(relabelled) == "no key of artifacts.public_keys signed it"


def test_a_signature_without_the_encoding_is_refused() -> None:
    signature = base64.b64encode(KEY._key.sign(PAYLOAD)).decode()
    assert "no key" in refusal(altered(lambda content: content.update(signatures=[{"sig": signature}])))


def test_only_a_listed_key_counts_whatever_the_envelope_calls_it() -> None:
    envelope = altered(lambda content: content["signatures"][0].update(keyid=str(KEY.public)), OTHER)
    assert refusal(envelope) == "no key of artifacts.public_keys signed it"
    with pytest.raises(ArtifactRejected, match="no key is trusted"):
        open_envelope(envelope, ())
    for change in ({"keyid": "unknown"}, {"keyid": ""}, {"keyid": None}, {"alg": "none"}):
        assert open_envelope(described(change), {KEY.public}) == (PAYLOAD, KEY.public)
    anonymous = altered(lambda content: content["signatures"][0].pop("keyid"))
    assert open_envelope(anonymous, {KEY.public}) == (PAYLOAD, KEY.public)


def test_one_valid_signature_of_a_listed_key_suffices() -> None:
    (ours,) = json.loads(KEY.sign(PAYLOAD))["signatures"]
    (theirs,) = json.loads(OTHER.sign(PAYLOAD))["signatures"]
    wrong = {"sig": base64.b64encode(bytes(64)).decode()}
    longer = {"sig": base64.b64encode(bytes(71)).decode()}  # of another algorithm
    for signatures in ([theirs, ours], [wrong, longer, {"sig": ""}, ours], [ours, ours], [ours] * 16):
        assert open_envelope(signed_by(signatures), {KEY.public}) == (PAYLOAD, KEY.public)
    for signatures in ([theirs, wrong], [theirs, theirs], [longer], [{"sig": ""}]):
        assert refusal(signed_by(signatures)) == "no key of artifacts.public_keys signed it"
    assert "at most 16" in refusal(signed_by([ours] * 17))


def test_base64_is_read_in_either_alphabet_and_only_as_an_encoder_writes_it() -> None:
    payload = bytes.fromhex("fbefbefbefbeff")  # "++++" and "/" in the standard alphabet
    content = json.loads(KEY.sign(payload))
    assert content["payload"] == "++++++++/w=="

    def with_payload(text: str) -> bytes:
        return json.dumps({**content, "payload": text}).encode()

    assert open_envelope(with_payload("--------_w=="), {KEY.public}) == (payload, KEY.public)
    others = [
        "++++----/w==",
        "++++++++/x==",
        "++++++++/w",
        "++++++++/w=",
        "++++++++/w===",
        "++++ ++++/w==",
        "++++++++/w==\n",
    ]
    for text in others:
        assert "not a DSSE envelope" in refusal(with_payload(text))


def test_a_public_key_and_its_text_are_inverses() -> None:
    text = str(KEY.public)
    assert text.startswith("ed25519:")
    assert PublicKey.parse(text) == KEY.public
    assert {PublicKey.parse(text), KEY.public} == {KEY.public}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ed25519:",
        base64.b64encode(KEY.public.raw).decode(),
        str(KEY.public).replace("ed25519", "rsa"),
        str(KEY.public).upper(),
        f"{KEY.public} ",
        f"{KEY.public}\n",
        f" {KEY.public}",
        str(KEY.public).rstrip("="),
        "ed25519:" + base64.b64encode(KEY.public.raw[:31]).decode(),
        "ed25519:" + base64.b64encode(KEY.public.raw + b"\0").decode(),
        "ed25519:" + KEY.public.raw.hex(),
        "ed25519:" + "_" * 42 + "8=",
        "ed25519:é",
    ],
    ids=[
        "empty",
        "no key",
        "bare",
        "rsa",
        "upper",
        "space after",
        "newline",
        "space before",
        "no padding",
        "short",
        "long",
        "hex",
        "other alphabet",
        "no ascii",
    ],  # no keys: they are others in each process
)
def test_a_public_key_that_is_written_differently_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"ed25519:<base64|not base64|alphabet|bytes"):
        PublicKey.parse(text)


def test_a_key_that_anybody_can_sign_for_is_refused() -> None:
    """Of order 1, 2, 4 and 8: of zeros, for example, as a placeholder may be."""
    forged = (1).to_bytes(32, "little") + bytes(32)
    zeros = Ed25519PublicKey.from_public_bytes(bytes(32))
    assert any(_accepts(zeros, forged, b"%d" % number) for number in range(100))
    eighth = int.from_bytes(bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little")
    for y in (0, 1, P - 1, P, P + 1, eighth, P - eighth):
        for sign in (0, 1 << 255):
            raw = (y | sign).to_bytes(32, "little")
            with pytest.raises(ValueError, match="anybody can sign"):
                PublicKey.parse("ed25519:" + base64.b64encode(raw).decode())


def _accepts(key: Ed25519PublicKey, signature: bytes, message: bytes) -> bool:
    try:
        key.verify(signature, message)
    except InvalidSignature:
        return False
    return True


def test_a_listed_key_that_is_no_point_of_the_curve_signs_nothing() -> None:
    assert refusal(KEY.sign(PAYLOAD), PublicKey(b"\2" + bytes(31))) == "no key of artifacts.public_keys signed it"


def test_a_private_key_and_its_pem_are_inverses() -> None:
    again = PrivateKey.from_pem(KEY.to_pem())
    assert again.public == KEY.public
    assert again.sign(PAYLOAD) == KEY.sign(PAYLOAD)
    assert KEY.to_pem().startswith(b"-----BEGIN PRIVATE KEY-----\n")


def pem(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    encryption = NoEncryption() if password is None else BestAvailableEncryption(password)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a private key"),
        (b"\0\xff", "not a private key"),
        (KEY.to_pem()[:-40], "not a private key"),
        (KEY.public.raw, "not a private key"),
        (pem(ec.generate_private_key(ec.SECP256R1())), "another algorithm"),
        (pem(Ed25519PrivateKey.generate(), b"secret"), "password"),
    ],
    ids=["empty", "binary", "cut off", "public", "P-256", "password"],
)
def test_another_pem_is_refused(content: bytes, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        PrivateKey.from_pem(content)
    file = tmp_path / "key.pem"
    file.write_bytes(content)
    monkeypatch.setenv("BENTOML_COMPILE_SIGNING_KEY_FILE", str(file))
    with pytest.raises(ConfigError, match=f"BENTOML_COMPILE_SIGNING_KEY_FILE={file} .*{words}"):
        PrivateKey.from_environment()


def test_the_environment_gives_a_key_as_text_or_as_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert PrivateKey.from_environment() is None
    monkeypatch.setenv("BENTOML_COMPILE_SIGNING_KEY", KEY.to_pem().decode())
    key = PrivateKey.from_environment()
    assert key is not None
    assert key.public == KEY.public
    monkeypatch.setenv("BENTOML_COMPILE_SIGNING_KEY_FILE", str(tmp_path / "key.pem"))
    with pytest.raises(ConfigError, match="both set"):
        PrivateKey.from_environment()
    monkeypatch.delenv("BENTOML_COMPILE_SIGNING_KEY")
    with pytest.raises(ConfigError, match=r"key\.pem cannot be read: No such file"):
        PrivateKey.from_environment()
    (tmp_path / "key.pem").write_bytes(OTHER.to_pem())
    key = PrivateKey.from_environment()
    assert key is not None
    assert key.public == OTHER.public


def test_an_unusable_key_in_the_environment_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    text = KEY.to_pem().decode().replace("PRIVATE KEY", "SECRET KEY")
    monkeypatch.setenv("BENTOML_COMPILE_SIGNING_KEY", text)
    with pytest.raises(ConfigError, match="BENTOML_COMPILE_SIGNING_KEY cannot be used") as caught:
        PrivateKey.from_environment()
    assert text.splitlines()[1] not in str(caught.value)
    assert text.splitlines()[1] not in repr(KEY)


@pytest.mark.parametrize(
    "statement",
    ["PrivateKey.new()", "PrivateKey.from_pem(b'')", "PrivateKey.from_environment()", "open_envelope(envelope, [key])"],
)
def test_without_cryptography_the_error_says_what_to_install(statement: str) -> None:
    script = f"""
import sys
sys.modules["cryptography"] = None  # as if it were not installed
from bentoml_compile.artifacts.signing import PrivateKey, PublicKey, open_envelope
from bentoml_compile.errors import ConfigError
key, envelope = PublicKey.parse({str(KEY.public)!r}), {KEY.sign(PAYLOAD)!r}
try:
    {statement}
except ConfigError as error:
    print(error)
"""
    environment = {**os.environ, "BENTOML_COMPILE_SIGNING_KEY": KEY.to_pem().decode()}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "pip install 'bentoml-compile[remote]'" in result.stdout
