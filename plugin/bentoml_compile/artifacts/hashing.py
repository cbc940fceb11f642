"""Hashes of texts and of files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def short_hash(parts: Iterable[str]) -> str:
    """12 hex digits over the parts and their boundaries."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogatepass")
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()[:12]


def hash_files(paths: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of each file's content by its path, "missing" where it cannot be read."""
    return {path: file_hash(path) for path in sorted(set(paths))}


def file_hash(path: str | Path) -> str:
    """The SHA-256 of a file's content, "missing" if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError:
        return "missing"
    return digest.hexdigest()
