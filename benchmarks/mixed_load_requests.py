"""The seeded sequence of requests of benchmarks/mixed_load.py: texts that have a given number of tokens."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

BATCHES = (1, 8)  # texts
LENGTHS = (8, 128)  # tokens, [CLS] and [SEP] among them
SEED = 20
# each is one token of BERT's uncased vocabulary
WORDS = "time year people way day man thing woman life child world school state family student group country problem"


@dataclass(frozen=True, slots=True)
class Request:
    """Texts of one request; the longest has `length` tokens, the others at least half as many."""

    texts: list[str]
    length: int


def requests(count: int) -> list[Request]:
    """The first `count` requests: sizes uniform in BATCHES, lengths uniform in the logarithm within LENGTHS."""
    draw = random.Random(SEED)
    return [_request(draw) for _ in range(count)]


def _request(draw: random.Random) -> Request:
    batch = draw.randint(*BATCHES)
    shortest, longest = map(math.log, LENGTHS)
    length = round(math.exp(draw.uniform(shortest, longest)))
    lengths = [length, *(draw.randint(max(length // 2, LENGTHS[0]), length) for _ in range(batch - 1))]
    draw.shuffle(lengths)
    return Request([" ".join(draw.choices(WORDS.split(), k=one - 2)) for one in lengths], length)
