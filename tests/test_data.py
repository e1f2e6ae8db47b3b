"""Text becomes the same tokens everywhere, batches depend on what they should, and nothing a user does is fatal."""

import errno
import hashlib
import itertools
import os
import random
import re
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from Utils import data
from Utils.errors import UserError

import numpy as np
import pytest
import tiktoken
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(data.__file__).resolve().parent.parent
PROSE = "It was a bright cold day in April, and the clocks were striking thirteen.\n" * 20


@pytest.fixture
def prose(tmp_path):
    file = tmp_path / "prose.txt"
    file.write_text(PROSE)
    return file


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "tokens"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The default corpus, tokenized once: (seconds, text), (seconds, text from the cache)."""
    folder, loads = tmp_path_factory.mktemp("library"), []
    for _ in range(2):
        start = time.perf_counter()
        text = data.load(4096, cache=folder)
        loads.append((time.perf_counter() - start, text))
    return loads


@pytest.fixture
def no_gpt2(monkeypatch, tmp_path):
    """A machine that has never seen GPT-2's files and whose network is a proxy at which nobody listens."""
    monkeypatch.delitem(tiktoken.registry.ENCODINGS, "gpt2", raising=False)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktoken"))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    data.gpt2.cache_clear()
    yield
    data.gpt2.cache_clear()


def in_another_python(code, **popen):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes, **popen)


# Tokens


@settings(deadline=None)
@given(st.text())
def test_every_text_comes_back_from_its_tokens(text):
    assert data.embedded().decode(data.tokenize(text, data.embedded()).tolist()) == text


def test_every_byte_is_a_token():
    for byte in range(256):
        assert data.embedded().decode_bytes([byte]) == bytes([byte])
        assert data.embedded().encode_single_token(bytes([byte])) == byte


@pytest.mark.parametrize("text", ["<|endoftext|>", "a <|endoftext|> b <|fim_prefix|>", "one\r\ntwo\rthree\n", "a\0b\0"])
def test_special_text_line_ends_and_nul_are_ordinary_text(text, tmp_path, cache):
    file = tmp_path / "text"
    file.write_bytes(text.encode())
    tokens = data.load(4096, file, cache).tokens
    assert data.embedded().decode_bytes(tokens.tolist()) == text.encode()


def test_the_endoftext_of_gpt2_is_never_made(monkeypatch):
    ranks = {bytes([byte]): byte for byte in range(256)}
    special = tiktoken.Encoding("small", pat_str=data.PATTERN, mergeable_ranks=ranks, special_tokens={"<|x|>": 256})
    assert data.tokenize("a<|x|>b", special).tolist() == list(b"a<|x|>b")


SHORT = re.compile(data.CHUNK.pattern.replace("65536", "8"), data.CHUNK.flags)
pairs = itertools.product(b"ab!'1\x1c x\r\n\t", repeat=2)
ranks = {bytes([byte]): byte for byte in range(256)} | {bytes(pair): 256 + i for i, pair in enumerate(pairs)}
IN_PAIRS = tiktoken.Encoding("pairs", pat_str=data.PATTERN, mergeable_ranks=ranks, special_tokens={})  # shows any cut
words = st.builds("{}x".format, st.text("ab!'1\x1cé", max_size=3))  # \x1c is white space to `re`, not to tiktoken
gaps = st.sampled_from([" ", "\n", "\r\n", "\t ", " \u3000", "\n\x1c", "\n\n\n", "\n   "])


@settings(deadline=None)
@given(st.lists(st.tuples(words, gaps)))
def test_a_cut_at_white_space_cuts_no_word(pairs):
    text = "".join(word + gap for word, gap in pairs)
    cut = [token for chunk in SHORT.finditer(text) for token in IN_PAIRS.encode_ordinary(chunk[0])]
    assert cut == IN_PAIRS.encode_ordinary(text)


@settings(deadline=None)
@given(st.text(st.sampled_from("a \n\x1c\u3000!"), max_size=200))
def test_chunks_are_bounded_and_lose_nothing(text):
    chunks = [match[0] for match in SHORT.finditer(text)]
    assert "".join(chunks) == text
    assert all(0 < len(chunk) <= 8 for chunk in chunks)


@pytest.mark.parametrize("unit", ["a", "xq", "^", " ", "漢"])
def test_a_line_of_many_megabytes_takes_bounded_time(unit, tmp_path, cache):
    file = tmp_path / "line.txt"
    size = 20_000_000 if unit == "xq" else 4_000_000
    file.write_text(unit * (size // len(unit.encode())))
    start = time.perf_counter()
    tokens = data.load(4096, file, cache).tokens
    assert time.perf_counter() - start < 30
    assert (data.embedded().decode_bytes(tokens.tolist()) == file.read_bytes()) is True  # no diff of megabytes


# The default corpus


def test_the_default_corpus_is_quick_and_quicker_from_the_cache(library):
    (first_seconds, first), (second_seconds, second) = library
    assert (first.cached, second.cached) == (False, True)
    assert first_seconds < 20
    assert second_seconds < 1
    assert first[:-1][1:] == second[:-1][1:]
    assert np.array_equal(first.tokens, second.tokens)


def test_the_default_corpus_is_the_text_of_the_standard_library(library):
    _, text = library[0]
    assert text.source == f"Python {sys.version.split()[0]}'s standard library"
    assert text.vocabulary == "embedded-4096"
    assert text.tokens.dtype == np.uint16
    assert text.tokens.max() < 4096
    written = data.embedded().decode_bytes(text.tokens.tolist())
    assert (written == data.standard_library()) is True  # no diff of megabytes
    assert Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes() in written


def test_the_standard_library_is_read_in_one_order_without_tests_and_packages(tmp_path, monkeypatch):
    kept = {"a.py": b"a = 1\n", "b.py": b"b = 2\n", "json/x.py": b"x\n", "testing/y.py": b"caf\xc3\xa9 \xff\n"}
    left_out = ["test/t.py", "json/tests/t.py", "idlelib/idle_test/t.py", "site-packages/p.py", "dist-packages/p.py"]
    left_out += ["__pycache__/c.py", "_sysconfigdata__linux.py", "config-3.11/python-config.py", "notes.txt", "b.pyc"]
    for name, content in reversed([*kept.items(), *((name, b"left out") for name in left_out)]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "dangling.py").symlink_to("nowhere")

    def backwards(top, walk=os.walk):
        for folder, folders, names in walk(top):
            folders.sort(reverse=True)
            yield folder, folders, sorted(names, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.get)
    assert data.standard_library().decode() == "a = 1\nb = 2\nx\ncafé \ufffd\n"


def test_a_python_without_source_asks_for_a_file(tmp_path, monkeypatch, cache):
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.get)
    with pytest.raises(UserError, match="text file of your own"):
        data.load(4096, cache=cache)


# Texts that cannot be used


def refusal(*args, **kwargs):
    with pytest.raises(UserError) as caught:
        data.load(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_missing_file_is_refused(tmp_path, cache):
    assert refusal(4096, tmp_path / "none.txt", cache) == f"{tmp_path}/none.txt: no such file; name a text file"


def test_a_folder_is_refused(tmp_path, cache):
    assert f"{tmp_path}: is a folder" in refusal(4096, tmp_path, cache)


def test_an_unreadable_file_is_refused(tmp_path, cache, prose):
    (tmp_path / "loop").symlink_to("loop")  # permissions do not keep root out, this does
    assert os.strerror(errno.ELOOP) in refusal(4096, tmp_path / "loop", cache)
    assert os.strerror(errno.ENOTDIR) in refusal(4096, prose / "inside", cache)


@pytest.mark.parametrize("damage", ["garbage", "YQ== 0\n", "YQ== one\n"])
def test_a_damaged_vocabulary_is_named(damage, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "RANKS", tmp_path / "ranks")
    (tmp_path / "ranks").write_text(damage)
    with pytest.raises(UserError, match="ranks: is damaged"):
        data.embedded.__wrapped__()


def test_a_text_that_no_memory_holds_is_refused(prose, cache, monkeypatch):
    def full(_):
        raise MemoryError

    monkeypatch.setattr(Path, "read_bytes", full)
    assert f"{prose}: does not fit into this machine's memory" in refusal(4096, prose, cache)


def test_an_empty_file_is_refused(tmp_path, cache):
    (tmp_path / "empty").touch()
    assert "is empty" in refusal(4096, tmp_path / "empty", cache)


@pytest.mark.parametrize(
    ("content", "offset", "encoding"),
    [
        (b"caf\xe9 au lait", "byte 3 is 0xe9", "LATIN1"),
        ("Grüße".encode("utf-16"), "byte 0 is 0xff", "UTF-16"),
        (b"\x89PNG\r\n\x1a\n\0\0", "byte 0 is 0x89", "LATIN1"),
        (b"a" * 70_000 + b"\xe2\x82", "byte 70,000 is 0xe2", "LATIN1"),
    ],
)
def test_bytes_that_are_not_utf8_are_refused_with_their_place_and_a_way_out(content, offset, encoding, tmp_path, cache):
    file = tmp_path / "binary"
    file.write_bytes(content)
    message = refusal(4096, file, cache)
    assert message.startswith(f"{file}: is not UTF-8 text ({offset})")
    assert f"iconv -f {encoding} -t UTF-8" in message
    assert not cache.exists()


def test_a_text_shorter_than_a_window_is_refused_with_both_numbers(prose, cache):
    count = len(data.load(4096, prose, cache).tokens)
    assert len(data.load(4096, prose, cache, need=count).tokens) == count
    message = refusal(4096, prose, cache, need=count + 1)
    assert f"holds {count:,} tokens but one window needs {count + 1:,}" in message


def test_no_path_means_the_default_corpus(monkeypatch, cache):
    monkeypatch.setattr(data, "standard_library", lambda: b"import this\n")
    assert "standard library" in data.load(4096, "", cache).source
    assert data.embedded().decode(data.load(4096, None, cache).tokens.tolist()) == "import this\n"


def test_a_model_with_fewer_entries_than_any_vocabulary_is_our_bug(prose, cache):
    with pytest.raises(ValueError, match="4096"):
        data.load(4095, prose, cache)


# Batches


TOKENS = np.arange(1000, dtype=np.uint16)


def test_targets_are_the_inputs_one_token_further_on():
    x, y = data.batch(TOKENS, step=3, batch_size=8, block_size=16, seed=1)
    for tensor in (x, y):
        assert tensor.shape == (8, 16)
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(y, x + 1)  # the tokens count up
    assert torch.equal(x[:, 1:], x[:, :-1] + 1)


def test_a_batch_depends_on_seed_step_and_rank_alone():
    settings = [(step, seed, rank) for step in range(3) for seed in range(3) for rank in range(2)]

    def draw(order):
        return {s: data.batch(TOKENS, s[0], 8, 16, seed=s[1], rank=s[2])[0] for s in order}

    first = draw(settings)
    np.random.seed(7)
    torch.manual_seed(7)
    random.seed(7)
    second = draw(reversed(settings))
    assert all(torch.equal(first[s], second[s]) for s in settings)
    assert len({tuple(x.flatten().tolist()) for x in first.values()}) == len(settings)


def test_windows_start_everywhere_from_the_first_token_to_the_last_that_fits():
    tokens, starts = TOKENS[:20], set()
    for step in range(50):
        x, y = data.batch(tokens, step, batch_size=16, block_size=4, seed=0)
        starts |= set(x[:, 0].tolist())
        assert y.max() <= 19
    assert starts == set(range(16))  # 15 + 4 is the last token, the target of the last window


def test_a_text_of_one_window_gives_that_window():
    x, y = data.batch(TOKENS[:5], step=0, batch_size=2, block_size=4, seed=0)
    assert x.tolist() == [[0, 1, 2, 3]] * 2
    assert y.tolist() == [[1, 2, 3, 4]] * 2


def test_large_token_ids_stay_positive():
    x, y = data.batch(np.full(10, 50256, np.uint16), step=0, batch_size=1, block_size=4, seed=0)
    assert set(x.flatten().tolist() + y.flatten().tolist()) == {50256}


# The cache


def assert_rebuilt(prose, cache):
    again, after = data.load(4096, prose, cache), data.load(4096, prose, cache)
    assert (again.cached, after.cached) == (False, True)
    for text in (again, after):
        assert text.tokens.tolist() == data.embedded().encode_ordinary(PROSE)
    assert len(list(cache.iterdir())) == 1


def test_tokens_come_from_the_cache_the_second_time(prose, cache, monkeypatch):
    first = data.load(4096, prose, cache)
    monkeypatch.setattr(data, "tokenize", None)
    second = data.load(4096, str(prose), cache)
    assert (first.cached, second.cached) == (False, True)
    assert first.digest == second.digest
    assert np.array_equal(first.tokens, second.tokens)


def test_the_digest_tells_texts_and_vocabularies_apart(prose, cache):
    text = data.load(4096, prose, cache)
    assert text.digest == hashlib.sha256(text.tokens.tobytes() + b"embedded-4096").hexdigest()[:12]
    prose.write_text(PROSE + "x")
    changed = data.load(4096, prose, cache)
    assert not changed.cached
    assert changed.digest != text.digest


def test_another_embedded_vocabulary_finds_no_old_tokens(prose, cache, tmp_path, monkeypatch):
    data.load(4096, prose, cache)
    monkeypatch.setattr(data, "RANKS", tmp_path / "ranks")
    data.RANKS.write_bytes(b"AA== 0\n")
    assert not data.load(4096, prose, cache).cached


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:1],
        lambda content: content[:32],
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content[:-2],
        lambda content: content + b"\0\0",
        lambda content: b"garbage " * 100,
        lambda content: bytes(len(content)),
    ],
)
def test_a_damaged_cache_is_noticed_and_made_again(damage, prose, cache):
    data.load(4096, prose, cache)
    (file,) = cache.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert_rebuilt(prose, cache)


def test_no_flipped_bit_goes_unnoticed(tmp_path, cache):
    short = tmp_path / "short.txt"
    short.write_text("To be, or not to be")
    data.load(4096, short, cache)
    (file,) = cache.iterdir()
    content = file.read_bytes()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        file.write_bytes(flipped)
        assert not data.load(4096, short, cache).cached, place
        assert file.read_bytes() == content


def test_the_cache_of_another_text_under_this_name_is_noticed(prose, cache, tmp_path):
    data.load(4096, prose, cache)
    (file,) = cache.iterdir()
    (tmp_path / "other").write_text("another text")
    data.load(4096, tmp_path / "other", tmp_path / "elsewhere")
    (other,) = (tmp_path / "elsewhere").iterdir()
    file.write_bytes(other.read_bytes())
    assert_rebuilt(prose, cache)


def test_without_a_cache_folder_every_run_tokenizes(prose, tmp_path):
    (tmp_path / "a file").touch()
    for cache in (tmp_path / "a file", tmp_path / "a file" / "tokens"):
        for _ in range(2):
            text = data.load(4096, prose, cache)
            assert not text.cached
            assert text.tokens.tolist() == data.embedded().encode_ordinary(PROSE)


def test_a_folder_in_the_place_of_the_cache_file_is_survived(prose, cache):
    data.load(4096, prose, cache)
    (file,) = cache.iterdir()
    file.unlink()
    file.mkdir()
    assert not data.load(4096, prose, cache).cached
    assert list(cache.iterdir()) == [file]


def test_a_full_disk_leaves_nothing_behind(prose, cache, monkeypatch):
    def write_half(self, content):
        with open(self, "wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_half)
        assert not data.load(4096, prose, cache).cached
    assert list(cache.iterdir()) == []
    assert_rebuilt(prose, cache)


def test_two_processes_at_once_do_no_harm(prose, cache):
    prose.write_text(PROSE * 500)
    code = f"from Utils import data; print(data.load(4096, {str(prose)!r}, {str(cache)!r}).digest)"
    both = [in_another_python(code) for _ in range(2)]
    answers = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    text = data.load(4096, prose, cache)
    assert text.cached
    assert {digest.strip() for digest, _ in answers} == {text.digest}
    assert len(list(cache.iterdir())) == 1


# GPT-2's vocabulary


@pytest.fixture
def gpt2(monkeypatch):
    """A stand-in for GPT-2's vocabulary that is always to be had: the single bytes. Its list counts the requests."""
    ranks = {bytes([byte]): 255 - byte for byte in range(256)}
    encoding = tiktoken.Encoding("gpt2", pat_str=data.PATTERN, mergeable_ranks=ranks, special_tokens={})
    requests = []
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: requests.append(name) or encoding)
    data.gpt2.cache_clear()
    yield requests
    data.gpt2.cache_clear()


def test_a_large_model_gets_the_vocabulary_of_gpt2(gpt2, prose, cache):
    text = data.load(50257, prose, cache)
    assert gpt2 == ["gpt2"]
    assert text.vocabulary == "gpt2"
    assert text.tokens.tolist() == [255 - byte for byte in PROSE.encode()]
    smaller = data.load(50256, prose, cache)
    assert smaller.vocabulary == "embedded-4096"
    assert smaller.tokens.tolist() == data.embedded().encode_ordinary(PROSE)


def test_cached_tokens_of_gpt2_need_no_network(gpt2, prose, cache, monkeypatch, capfd):
    first = data.load(50304, prose, cache)
    data.gpt2.cache_clear()
    monkeypatch.setattr(tiktoken, "get_encoding", None)
    second = data.load(50304, prose, cache)
    assert second.cached
    assert second.vocabulary == "gpt2"
    assert second.digest == first.digest
    assert capfd.readouterr().err == ""


def assert_fell_back(text, stderr):
    assert text.vocabulary == "embedded-4096"
    assert text.tokens.tolist() == data.embedded().encode_ordinary(PROSE)
    (line,) = stderr.splitlines()
    for word in ("GPT-2", "embedded", "network", "TIKTOKEN_CACHE_DIR"):
        assert word in line


def test_a_dead_proxy_means_the_embedded_vocabulary_and_one_line(no_gpt2, prose, cache, capfd):
    start = time.perf_counter()
    assert_fell_back(data.load(50304, prose, cache), capfd.readouterr().err)
    assert time.perf_counter() - start < 10


def test_a_half_written_file_in_the_cache_of_tiktoken_means_the_same(no_gpt2, prose, cache, capfd):
    folder = Path(os.environ["TIKTOKEN_CACHE_DIR"])
    folder.mkdir()
    for name in ("vocab.bpe", "encoder.json"):
        url = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        (folder / hashlib.sha1(url.encode()).hexdigest()).write_bytes(b"#version: 0.2\n\xc4\xa0 t\n\xc4")
    assert_fell_back(data.load(50304, prose, cache), capfd.readouterr().err)


def test_a_proxy_that_never_answers_is_not_waited_for(no_gpt2, prose, cache):
    assert data.PATIENCE <= 10
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        environment = os.environ | {
            name: f"http://127.0.0.1:{proxy.getsockname()[1]}"
            for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
        }
        code = f"""
import time
from Utils import data
data.PATIENCE, start = 1, time.perf_counter()
text = data.load(50304, {str(prose)!r}, {str(cache)!r})
assert time.perf_counter() - start < 5
"""
        process = in_another_python(code, env=environment)
        proxy.settimeout(30)
        connection, _ = proxy.accept()  # and not a word
        with connection:
            _, stderr = process.communicate(timeout=30)  # the process ends though its question is still open
    assert process.returncode == 0, stderr
    text = data.load(4096, prose, cache)
    assert text.cached
    assert_fell_back(text, stderr)
