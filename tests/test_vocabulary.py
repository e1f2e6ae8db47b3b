"""The embedded vocabulary is a true byte-pair encoding, is what tiktoken makes of it, and can be made again."""

import hashlib
import socket
from collections import Counter

from Utils import data, vocabulary

import pytest
import regex
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken.load import load_tiktoken_bpe
from tiktoken_ext.openai_public import r50k_pat_str

# As OpenAI published it, https://github.com/openai/gpt-2/blob/master/src/encoder.py
GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def naive_encode(word, ranks):
    """The entries of one word, from scratch: join the neighbours of the lowest rank, leftmost first."""
    parts = [bytes([byte]) for byte in word.encode()]
    while True:
        best = None
        for i in range(len(parts) - 1):
            rank = ranks.get(parts[i] + parts[i + 1])
            if rank is not None and (best is None or rank < best[0]):
                best = rank, i
        if best is None:
            return parts
        i = best[1]
        parts = parts[:i] + [parts[i] + parts[i + 1]] + parts[i + 2 :]


def naive_train(text, size):
    """The definition, with nothing remembered from one entry to the next; fewer entries if the text gives no more."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < size:
        frequency = Counter()
        for word in regex.findall(GPT2_PATTERN, text):
            parts = naive_encode(word, ranks)
            for left, right in zip(parts, parts[1:], strict=False):
                frequency[left + right] += 1
        if not frequency:
            break
        most = max(frequency.values())
        ranks[min(join for join, count in frequency.items() if count == most)] = len(ranks)
    return ranks


def test_gpt2s_pattern_is_the_one_tiktoken_uses():
    assert r50k_pat_str == data.PATTERN


@settings(deadline=None)
@given(st.one_of(st.text(), st.text("ab1 '\n\t.!\x1c\u3000sdé", max_size=40)))
def test_the_pattern_cuts_words_as_gpt2s_own_does(text):
    assert regex.findall(data.PATTERN, text) == regex.findall(GPT2_PATTERN, text)


@settings(deadline=None)
@given(st.text("abc d\n'1é", min_size=1, max_size=120), st.integers(257, 285))
def test_training_agrees_with_the_definition(text, size):
    expected = naive_train(text, size)
    assert list(vocabulary.train(text, len(expected)).items()) == list(expected.items())
    if len(expected) < size:
        with pytest.raises(ValueError, match=f"gives {len(expected)} entries, not {size}"):
            vocabulary.train(text, size)


@settings(deadline=None)
@given(st.text("ab c", min_size=1, max_size=200), st.integers(257, 270), st.text("ab c\n", max_size=60))
def test_tiktoken_encodes_with_a_trained_vocabulary_as_the_definition_says(corpus, size, text):
    expected = naive_train(corpus, size)
    ranks = vocabulary.train(corpus, len(expected))
    encoding = tiktoken.Encoding("tiny", pat_str=data.PATTERN, mergeable_ranks=ranks, special_tokens={})
    words = regex.findall(GPT2_PATTERN, text)
    assert encoding.encode_ordinary(text) == [expected[part] for word in words for part in naive_encode(word, expected)]


def test_a_tiny_corpus_gives_the_entries_one_finds_by_hand():
    # "aab" twice, "b" once: aa 2, ab 2 -> "aa" sorts first; then aa|b 2.
    ranks = vocabulary.train("aab\naab\nb", 258)
    assert list(ranks)[256:] == [b"aa", b"aab"]


def test_the_stored_file_holds_4096_entries_as_tiktoken_reads_them(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # do not read an older copy
    ranks = load_tiktoken_bpe(str(data.RANKS))
    assert list(ranks.values()) == list(range(4096))
    assert list(ranks)[:256] == [bytes([byte]) for byte in range(256)]
    assert [data.embedded().decode_single_token_bytes(rank) for rank in range(4096)] == list(ranks)
    assert data.embedded().n_vocab == 4096
    assert data.embedded().special_tokens_set == set()


def test_each_stored_entry_joins_two_earlier_ones_within_a_word():
    entries = [data.embedded().decode_single_token_bytes(rank) for rank in range(4096)]
    ranks = {entry: rank for rank, entry in enumerate(entries)}
    for rank, entry in list(enumerate(entries))[256:]:
        earlier = [ranks.get(entry[:i], 4096) < rank > ranks.get(entry[i:], 4096) for i in range(1, len(entry))]
        assert any(earlier), entry
        text = entry.decode(errors="ignore")
        assert not text.strip() or len(regex.findall(GPT2_PATTERN, text)) == 1, entry


def test_the_embedded_vocabulary_needs_no_network(monkeypatch, tmp_path):
    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(socket, "socket", offline)
    monkeypatch.setattr(socket, "create_connection", offline)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    data.embedded.cache_clear()
    assert data.embedded().decode(data.embedded().encode_ordinary("import torch")) == "import torch"
    assert list(tmp_path.iterdir()) == []  # no copy that would outlive a new ranks file


def test_the_stored_file_can_be_made_again_byte_for_byte(tmp_path, monkeypatch, capsys):
    corpus = hashlib.sha256(data.standard_library()).hexdigest()
    if corpus != vocabulary.CORPUS:
        pytest.skip("this Python's standard library is not the one that the stored file was made from")
    monkeypatch.setattr(vocabulary, "RANKS", tmp_path / "ranks")
    vocabulary.main()
    assert (tmp_path / "ranks").read_bytes() == data.RANKS.read_bytes()
    assert corpus in capsys.readouterr().out
