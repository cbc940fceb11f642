"""`bentoml-compile keys`, as a user runs it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from bentoml_compile.artifacts.signing import PrivateKey, PublicKey, open_envelope
from bentoml_compile.cli import main


def run(*arguments: str, input: bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["keys", *arguments], input=input)


def key_in(file: Path) -> PrivateKey:
    return PrivateKey.from_pem(file.read_bytes())


def test_new_writes_a_key_for_its_owner_alone_and_prints_the_public_one(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    umask = os.umask(0)
    try:
        result = run("new", str(file))
    finally:
        os.umask(umask)
    assert result.exit_code == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert PublicKey.parse(result.stdout.rstrip("\n")) == key_in(file).public
    assert file.read_text().splitlines()[1] not in result.output


def test_new_without_a_name_writes_into_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("new").stdout.strip() == str(key_in(tmp_path / "signing-key.pem").public)


def test_what_new_says_to_export_and_to_configure_fits_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder whose name a shell would split."""
    folder = tmp_path / "two words"
    folder.mkdir()
    said = run("new", str(folder / "key.pem")).stderr
    lines = [line.strip() for line in said.splitlines()]
    config = yaml.safe_load(said[said.index("  services:") :])
    (text,) = config["services"]["YourService"]["torch_compile"]["artifacts"]["public_keys"]
    exports = [line for line in lines if line.startswith("export ")]
    assert len(exports) == 2
    for export in exports:
        script = "from bentoml_compile.artifacts.signing import PrivateKey; import sys\n"
        script += "key = PrivateKey.from_environment(); assert key\nsys.stdout.buffer.write(key.sign(b'{}'))"
        signed = subprocess.run(
            ["sh", "-c", f'{export}; exec "$0" -c "$1"', sys.executable, script], check=True, stdout=subprocess.PIPE
        )
        assert open_envelope(signed.stdout, {PublicKey.parse(text)})[0] == b"{}"


def test_new_never_overwrites(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    link = tmp_path / "link.pem"
    link.symlink_to(tmp_path / "nowhere.pem")
    file.write_text("mine")
    for existing in (file, link):
        result = run("new", str(existing))
        assert result.exit_code == 2
        assert "exists and is kept" in result.stderr
        assert not result.stdout
    assert file.read_text() == "mine"
    assert not (tmp_path / "nowhere.pem").exists()


def test_new_in_a_folder_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    result = run("new", str(tmp_path / "gone" / "key.pem"))
    assert result.exit_code == 2
    assert "cannot be written: No such file" in result.stderr


def test_show_prints_the_public_key_of_a_file_or_of_stdin(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    public = run("new", str(file)).stdout
    assert run("show", str(file)).stdout == public
    assert run("show", "-", input=file.read_bytes()).stdout == public


def test_show_of_what_is_no_private_key_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    assert run("show", str(file)).exit_code == 2
    file.write_text("ssh-ed25519 AAAA")
    result = run("show", str(file))
    assert result.exit_code == 2
    assert f"{file}: not a private key" in result.stderr


def test_without_cryptography_the_command_says_what_to_install(tmp_path: Path) -> None:
    script = "import sys; sys.modules['cryptography'] = None; from bentoml_compile.cli import main; main()"
    command = [sys.executable, "-c", script, "keys", "new", str(tmp_path / "key.pem")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "pip install 'bentoml-compile[remote]'" in result.stderr
    assert not (tmp_path / "key.pem").exists()
