"""What the tests of libraries share, compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.aot import libraries
from tests.engines.aot.libraries import Words, word_inputs, words


@pytest.fixture(scope="session")
def words_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return libraries.compile_library(words(), word_inputs(), tmp_path_factory.mktemp("words"), "words")


@pytest.fixture
def model() -> Words:
    return words()
