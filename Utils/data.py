"""Text -> tokens -> the batch of step i.

The text is the source of Python's standard library, which lies on every machine that can run the scripts, or a
file of the user's own. It is taken byte for byte as it lies on disk: line ends, NUL characters and a byte-order mark
stay in it as ordinary characters, and so does text that looks like a special token ("<|endoftext|>").

tiktoken turns it into tokens, with one of two vocabularies:

    embedded-4096   this project's own, in vocabulary.tiktoken beside this file; Utils/vocabulary.py made it
    gpt2            GPT-2's 50,257 entries, which tiktoken downloads once

Tokens are stored in .cache/tokens under a name made from the text and the vocabulary, so a changed text finds no old
tokens, and sealed with a checksum, so a damaged file is noticed and made again.
"""

import base64
import contextlib
import functools
import hashlib
import itertools
import os
import platform
import re
import sys
import sysconfig
import threading
import uuid
from pathlib import Path
from typing import NamedTuple

from Utils.errors import UserError

import numpy as np
import torch

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "tokens"
RANKS = Path(__file__).resolve().parent / "vocabulary.tiktoken"  # a line per token: base64 of its bytes, its rank
EMBEDDED_SIZE, GPT2_SIZE = 4096, 50257  # entries
PATIENCE = 10  # seconds to wait for GPT-2's files, all in all

# How GPT-2 cuts text into words before it merges bytes; in tiktoken's spelling, which never backtracks.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

# tiktoken gets slow on words of megabytes, and some versions crash, so it is given this many characters at a time. A
# cut where white space begins falls between two words and changes no token; only where there is none is a word cut.
CHUNK = re.compile(r".{1,65536}(?<=\S)(?=[ \t\r\n]|\Z)|.{1,65536}", re.DOTALL)

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
MACHINE_MADE = ("_sysconfigdata", "config-")  # written when Python was built: full of that machine's paths


class Text(NamedTuple):
    tokens: np.ndarray  # (n,) uint16
    source: str  # for people: where the text came from
    vocabulary: str  # "embedded-4096" or "gpt2"
    digest: str  # 12 hexadecimal digits: equal in two runs that trained on the same tokens of the same vocabulary
    cached: bool  # True if the tokens were already in the cache


def load(vocab_size, path=None, cache=CACHE, need=1):
    """Return the `Text` in the file `path` (default: Python's standard library) in tokens below `vocab_size`.

    GPT-2's vocabulary is used if it fits in `vocab_size` and can be had, this project's own otherwise. Raises UserError
    if the text cannot be read, is empty, is not UTF-8 or holds fewer than `need` tokens (a window: block size + 1).
    """
    if vocab_size < EMBEDDED_SIZE:
        raise ValueError(f"the smallest vocabulary has {EMBEDDED_SIZE} entries, the model only {vocab_size}")
    source = str(path) if path else f"Python {platform.python_version()}'s standard library"
    text = _read(path) if path else standard_library()

    vocabularies = {"gpt2": gpt2} if vocab_size >= GPT2_SIZE else {}
    for vocabulary, encoding in (vocabularies | {"embedded-4096": embedded}).items():
        file = Path(cache, _sha256(vocabulary.encode(), RANKS.read_bytes(), text).hexdigest())
        tokens = _fetch(file)
        cached = tokens is not None
        if not cached and encoding():
            tokens = tokenize(_decode(text, source), encoding())
            _store(file, tokens)
        if tokens is not None:
            break

    if len(tokens) < need:
        raise UserError(f"{source}: holds {len(tokens):,} tokens but one window needs {need:,}; give a longer text")
    return Text(tokens, source, vocabulary, _sha256(tokens, vocabulary.encode()).hexdigest()[:12], cached)


def batch(tokens, step, batch_size, block_size, seed, rank=0):
    """Return x and y as one tensor, (2, B, T) int64: random windows of `tokens`, and the same one token further on.

    They depend on the tokens, the seed, the step and the rank alone, so every script trains on the same batches.
    """
    random = np.random.default_rng([seed, step, rank])
    starts = random.integers(len(tokens) - block_size, size=batch_size)  # (B,)
    windows = starts[:, None] + np.arange(block_size)  # (B, T)
    return torch.from_numpy(tokens[np.stack([windows, windows + 1])].astype(np.int64))  # (2, B, T)


# The text


def standard_library():
    """Return the source of Python's standard library, its tests left out, as UTF-8; always in the same order."""
    files = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT and not name.startswith(MACHINE_MADE))
        sources = (name for name in sorted(names) if name.endswith(".py") and not name.startswith(MACHINE_MADE))
        files += [Path(folder, name) for name in sources]
    text = b"".join(file.read_bytes() for file in files if file.is_file())  # a distribution may leave dangling links
    if not text:
        raise UserError("this Python comes without the source of its standard library; name a text file of your own")
    return text.decode(errors="replace").encode()


def _read(path):
    if os.path.exists(path) and not os.path.isfile(path):  # some have no end, and no script finds what another has read
        raise UserError(f"{path}: is a folder, a pipe or a device; name one text file")
    try:
        text = Path(path).read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; name a text file") from None
    except MemoryError:
        raise UserError(f"{path}: does not fit into this machine's memory; name a shorter text") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name a text file that you may read") from None
    if not text:
        raise UserError(f"{path}: is empty; name a file with text in it")
    return text


def _decode(text, source):
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if text.startswith((b"\xff\xfe", b"\xfe\xff")) else "LATIN1"
        raise UserError(
            f"{source}: is not UTF-8 text (byte {error.start:,} is 0x{text[error.start]:02x}); if it is text, "
            f"convert it, for instance: iconv -f {encoding} -t UTF-8 OLD > NEW"
        ) from None


# The tokens


@functools.cache
def embedded():
    """Return this project's own vocabulary, a tiktoken.Encoding of 4,096 entries; needs no network."""
    import tiktoken  # only here and in gpt2: tokens from the cache do without it

    # tiktoken's own loader would copy the file to a temporary folder and read that copy ever after.
    lines = (line.split() for line in RANKS.read_bytes().splitlines())
    try:
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    except ValueError:
        ranks = {}
    if len(ranks) != EMBEDDED_SIZE:
        raise UserError(f"{RANKS}: is damaged; get it again, for instance with git checkout")
    return tiktoken.Encoding("embedded-4096", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


@functools.cache
def gpt2():
    """Return GPT-2's vocabulary, a tiktoken.Encoding; or None, and a line on stderr, if it cannot be had.

    tiktoken waits for ever on a network that accepts a connection and then says nothing, so a thread of its own asks.
    """
    import tiktoken

    answer = ["no answer"]

    def ask():
        try:
            answer[0] = tiktoken.get_encoding("gpt2")
        except Exception as error:  # of requests, urllib3, ssl, the file system, a wrong checksum: each means "no"
            answer[0] = type(error).__name__

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if isinstance(answer[0], tiktoken.Encoding):
        return answer[0]
    print(
        f"GPT-2's vocabulary cannot be had ({answer[0]}); using the embedded one of {EMBEDDED_SIZE:,} entries instead. "
        "To get it, run once with a network, or set TIKTOKEN_CACHE_DIR to a folder where tiktoken has stored it.",
        file=sys.stderr,
    )
    return None


def tokenize(text, encoding):
    """Return the tokens of `text`, (n,) uint16; what looks like a special token is ordinary text."""
    chunks = (encoding.encode_ordinary(chunk[0]) for chunk in CHUNK.finditer(text))
    return np.fromiter(itertools.chain.from_iterable(chunks), np.uint16)


# The cache: a file is the SHA-256 of its name and its tokens, then the tokens


def _fetch(file):
    """Return the tokens in `file`, or None if there is no such file, or one that is damaged or not ours."""
    try:
        stored = np.fromfile(file, np.uint16)
    except OSError:
        return None
    seal, tokens = stored[:16].tobytes(), stored[16:]
    return tokens if seal == _sha256(file.name.encode(), tokens).digest() else None


def _store(file, tokens):
    """Write `tokens` to `file` at one stroke, whoever else does the same; where that is impossible, do without."""
    draft = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    with contextlib.suppress(OSError):  # a full disk, a folder that may not be written: the next run tokenizes again
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_bytes(_sha256(file.name.encode(), tokens).digest() + tokens.tobytes())
            draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)


def _sha256(*parts):
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total
