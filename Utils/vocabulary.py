"""This project's own vocabulary: a byte-pair encoding of 4,096 entries, and how it was made.

The first 256 entries are the single bytes, so every text can be written. Each of the other 3,840 joins two entries
that stand side by side: always the join that is most frequent in the corpus and, among equally frequent ones, the one
whose bytes sort first. Joins never cross the words into which GPT-2's pattern cuts a text. There are no special tokens.

`vocabulary.tiktoken` was made from CPython 3.11.7's standard library; CORPUS is the SHA-256 of that text. To make
it again, from the library of the Python that runs (another version's gives slightly other entries, and losses that
do not compare with those of the stored ones):

    python -m Utils.vocabulary

Sources   https://arxiv.org/abs/1508.07909   https://github.com/openai/tiktoken
"""

import base64
import hashlib
import heapq
from collections import Counter, defaultdict
from itertools import pairwise

from Utils.data import EMBEDDED_SIZE, PATTERN, RANKS, standard_library

import regex

CORPUS = "1d3a2c5e7900613e230f5bac0f2f34550521bdeb94a5d60cabd510a93d2a93a9"


def train(text, size):
    """Return {bytes of an entry: rank}, `size` entries (256 or more), learned from `text`."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = Counter(regex.findall(PATTERN, text))
    words = [([bytes([byte]) for byte in word.encode()], count) for word, count in words.items()]

    frequency = Counter()  # of each join of two entries side by side
    homes = defaultdict(set)  # the words in which it stands or once stood
    for i, (parts, count) in enumerate(words):
        for join in map(b"".join, pairwise(parts)):
            frequency[join] += count
            homes[join].add(i)

    heap = [(-count, join) for join, count in frequency.items()]
    heapq.heapify(heap)
    while len(ranks) < size:
        if not heap:
            raise ValueError(f"the text is too short: it gives {len(ranks)} entries, not {size}")
        count, best = heapq.heappop(heap)
        if -count != frequency[best]:
            continue  # an old count; the heap holds the new one as well
        ranks[best] = len(ranks)
        changed = set()
        for i in homes.pop(best):
            parts, count = words[i]
            for join in map(b"".join, pairwise(parts)):
                frequency[join] -= count
                changed.add(join)
            merge(parts, ranks)
            for join in map(b"".join, pairwise(parts)):
                frequency[join] += count
                homes[join].add(i)
                changed.add(join)
        for join in changed:
            if frequency[join]:
                heapq.heappush(heap, (-frequency[join], join))
    return ranks


def merge(parts, ranks):
    """Join neighbours in the list `parts` of bytes, the lowest rank first and leftmost, until none is in `ranks`."""
    while True:
        known = [(ranks[join], i) for i, join in enumerate(map(b"".join, pairwise(parts))) if join in ranks]
        if not known:
            return
        i = min(known)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def main():
    text = standard_library()
    ranks = train(text.decode(), EMBEDDED_SIZE)
    RANKS.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()))
    print(f"{RANKS}: {len(ranks):,} entries from a corpus with SHA-256 {hashlib.sha256(text).hexdigest()}")


if __name__ == "__main__":
    main()
