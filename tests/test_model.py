"""The model is GPT-2: checked against Hugging Face's implementation, and against float64 arithmetic written out."""

import math
from itertools import pairwise

from Utils.model import GPT2, PRESETS, Config, attention

import numpy as np
import pytest
import torch
from torch.nn import functional as F

CONFIG = Config(n_layer=3, n_head=4, n_embd=32, block_size=24, vocab_size=101)
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # Hugging Face multiplies from the other side


def a_model(config=CONFIG, seed=0):
    """A model whose biases and layer norms do something, and whose attention is far from uniform."""
    model = GPT2(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def ids(batch, length, config=CONFIG, seed=0):
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def split(window):
    """Input and what comes next, (B, T) each, of ids (B, T + 1)."""
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


@pytest.fixture(scope="module")
def hugging_face():
    """Builds Hugging Face's GPT-2 of a Config; nothing is downloaded."""
    transformers = pytest.importorskip("transformers")

    def build(config):
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=config.vocab_size, n_positions=config.block_size, n_embd=config.n_embd, n_layer=config.n_layer,
            n_head=config.n_head, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="eager",
            bos_token_id=0, eos_token_id=0))

    return build


def turned(name, tensor):
    return tensor.t() if name.endswith(TRANSPOSED) else tensor


@pytest.fixture
def twins(hugging_face):
    """Our model and Hugging Face's, with the same weights."""
    ours, theirs = a_model(), hugging_face(CONFIG)
    theirs.load_state_dict({name: turned(name, tensor) for name, tensor in ours.state_dict().items()})
    return ours, theirs


# Against another implementation


def test_parameters_have_the_names_and_shapes_of_hugging_faces_gpt2(hugging_face):
    theirs = {name: turned(name, tensor).shape for name, tensor in hugging_face(CONFIG).state_dict().items()}
    assert {name: tensor.shape for name, tensor in GPT2(CONFIG).state_dict().items()} == theirs


@pytest.mark.parametrize("length", (1, 7, CONFIG.block_size))
def test_logits_are_those_of_hugging_faces_gpt2(twins, length):
    ours, theirs = twins
    x = ids(3, length)
    logits = ours(x)
    assert logits.shape == (3, length, CONFIG.vocab_size)
    assert logits.std() > 0.5  # there is something to compare
    torch.testing.assert_close(logits, theirs(input_ids=x).logits, atol=1e-4, rtol=0)


def test_loss_and_gradients_are_those_of_hugging_faces_gpt2(twins):
    ours, theirs = twins
    window = ids(3, CONFIG.block_size)
    loss = ours(*split(window))
    expected = theirs(input_ids=window, labels=window).loss  # shifts the labels itself
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)

    loss.backward()
    expected.backward()
    gradients = {name: turned(name, parameter.grad) for name, parameter in theirs.named_parameters()}
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert parameter.grad.abs().max() > 1e-3, name
        assert (parameter.grad - gradients[name]).abs().max() < 1e-4, name


def test_weights_of_hugging_faces_gpt2_can_be_loaded(hugging_face):
    theirs, ours = hugging_face(CONFIG).eval(), GPT2(CONFIG, seed=5)
    ours.load_state_dict({name: turned(name, tensor) for name, tensor in theirs.state_dict().items()})
    x = ids(2, 9)
    torch.testing.assert_close(ours(x), theirs(input_ids=x).logits, atol=1e-4, rtol=0)


# Size


def on_meta(config):
    with torch.device("meta"):  # shapes without memory
        return GPT2(config)


def test_gpt2_with_its_own_vocabulary_has_124_439_808_parameters():
    assert on_meta(PRESETS["gpt2"]._replace(vocab_size=50257)).n_parameters == 124_439_808


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_parameters_as_counted_by_hand(name):
    L, _, C, T, V = PRESETS[name]
    norm = 2 * C
    block = norm + (C * 3 * C + 3 * C) + (C * C + C) + norm + (C * 4 * C + 4 * C) + (4 * C * C + C)
    assert on_meta(PRESETS[name]).n_parameters == V * C + T * C + L * block + norm  # lm_head is wte


def test_presets_are_those_that_were_measured():
    assert {name: (*config[:4], config.vocab_size) for name, config in PRESETS.items()} == {
        "small": (4, 6, 384, 64, 4096), "gpt2": (12, 12, 768, 1024, 50304), "tiny": (2, 2, 64, 32, 4096)}
    assert round(on_meta(PRESETS["small"]).n_parameters / 1e6, 1) == 8.7


# What it may see


@pytest.mark.parametrize("place", (1, 10, CONFIG.block_size - 1))
def test_a_later_token_changes_no_earlier_logits(place):
    model, x = a_model(), ids(1, CONFIG.block_size)
    changed = x.clone()
    changed[0, place] = (x[0, place] + 1) % CONFIG.vocab_size
    with torch.no_grad():
        before, after = model(x)[0], model(changed)[0]
    assert torch.equal(before[:place], after[:place])
    assert ((before[place:] - after[place:]).abs().amax(dim=-1) > 1e-3).all()  # itself and all that come later


def test_sequences_of_a_batch_do_not_see_each_other():
    model, x = a_model(), ids(3, 12)
    with torch.no_grad():
        torch.testing.assert_close(model(x)[1], model(x[1:2])[0], atol=1e-5, rtol=0)


def test_token_order_matters():
    model, x = a_model(), ids(1, 12)
    with torch.no_grad():
        swapped = model(x[:, [1, 0, *range(2, 12)]])
        assert (model(x)[0, -1] - swapped[0, -1]).abs().max() > 1e-3


# Initialization


@pytest.fixture(scope="module")
def fresh():
    return GPT2(PRESETS["small"])


def kind(name):
    if name.endswith("bias"):
        return "bias"
    if "ln_" in name:
        return "norm"
    return "residual" if name.endswith("c_proj.weight") else "weight"


def test_weights_are_drawn_with_gpt2s_standard_deviations(fresh):
    expected = {"weight": 0.02, "residual": 0.02 / math.sqrt(2 * 4)}
    seen = set()
    for name, parameter in fresh.named_parameters():
        if kind(name) in expected:
            std, n = expected[kind(name)], parameter.numel()
            assert parameter.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * n)), name  # five sigma
            assert abs(parameter.mean().item()) < 5 * std / math.sqrt(n), name
            assert parameter.abs().max() > 3.5 * std, name  # normal, not uniform
            seen.add(name.split(".")[-2])
    assert seen == {"wte", "wpe", "c_attn", "c_proj", "c_fc"}


def test_biases_begin_at_zero_and_layer_norms_as_the_identity(fresh):
    kinds = [kind(name) for name, _ in fresh.named_parameters()]
    assert kinds.count("bias") == 4 * 6 + 1 and kinds.count("norm") == 4 * 2 + 1
    for name, parameter in fresh.named_parameters():
        assert kind(name) != "bias" or not parameter.any(), name
        assert kind(name) != "norm" or torch.equal(parameter, torch.ones_like(parameter)), name


def test_no_two_matrices_are_alike(fresh):
    corners = sorted(tuple(parameter[0, :4].tolist()) for parameter in fresh.parameters() if parameter.dim() == 2)
    assert all(a != b for a, b in pairwise(corners))


def test_lm_head_is_tied_to_wte_and_trained_by_both(fresh):
    assert fresh.lm_head.weight is fresh.transformer.wte.weight
    assert "lm_head.weight" not in dict(fresh.named_parameters())


def test_a_fresh_model_knows_nothing(fresh, tokens):
    window = torch.from_numpy(tokens[:65 * 16].astype(np.int64)).view(16, 65)
    with torch.no_grad():
        assert fresh(*split(window)).item() == pytest.approx(math.log(4096), abs=0.1)


def test_the_seed_alone_fixes_the_weights():
    torch.manual_seed(1)
    one = GPT2(CONFIG, seed=3).state_dict()
    torch.manual_seed(2)
    same, other = GPT2(CONFIG, seed=3).state_dict(), GPT2(CONFIG, seed=4).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one if kind(name) in ("weight", "residual"))


# Attention


def qkv(B=2, H=3, T=11, D=8):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, T, D, generator=generator, requires_grad=True) for _ in range(3)]


def test_attention_is_that_of_float64_arithmetic_query_by_query():
    q, k, v = (t.detach().double().numpy() for t in qkv())
    expected = np.empty_like(q)
    for b, h, t in np.ndindex(q.shape[:3]):
        weights = np.exp([np.dot(q[b, h, t], key) / math.sqrt(8) for key in k[b, h, :t + 1]])
        expected[b, h, t] = weights @ v[b, h, :t + 1] / weights.sum()
    np.testing.assert_allclose(attention(*qkv()).detach().numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("T", (1, 2, 33))
def test_attention_and_its_gradients_are_those_of_pytorchs_own(T):
    mine, theirs = qkv(T=T), qkv(T=T)
    y, expected = attention(*mine), F.scaled_dot_product_attention(*theirs, is_causal=True)
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=0)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    y.backward(upstream)
    expected.backward(upstream)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=0)


def test_attention_survives_scores_that_overflow_a_naive_softmax():
    q, k, v = (100 * t for t in qkv())
    torch.testing.assert_close(attention(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True),
                               atol=1e-3, rtol=0)


def test_another_attention_may_take_its_place_in_every_layer():
    model, shapes = a_model(), []

    def values(q, k, v):
        shapes.append((q.shape, k.shape, v.shape))
        return v

    model.attention = values
    alone = a_model()(ids(2, 10))
    assert (model(ids(2, 10)) - alone).abs().max() > 1e-3
    assert shapes == 3 * [3 * ((2, 4, 10, 8),)]
