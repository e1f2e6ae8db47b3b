"""GPT-2: a decoder-only Transformer that predicts the next token, with GPT-2's own parameter names.

Pre-layer-norm, tanh-GELU, learned positions, biases, no dropout, `lm_head` tied to `wte`.

    B batch, T tokens, C width, H heads, D = C / H head width, V vocabulary, L layers

Sources   https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
          https://github.com/openai/gpt-2/blob/master/src/model.py
"""

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class Config(NamedTuple):
    n_layer: int     # L
    n_head: int      # H
    n_embd: int      # C
    block_size: int  # T, the longest context
    vocab_size: int  # V


PRESETS = {
    "small": Config(n_layer=4, n_head=6, n_embd=384, block_size=64, vocab_size=4096),
    "gpt2": Config(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304),  # 50,257 padded to 64s
    "tiny": Config(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=4096),
}


def attention(q, k, v):
    """softmax(q k^T / sqrt(D)) v, where no token sees a later one. Written out: every line reads and writes memory.

    `q`, `k`, `v` and the result are (B, H, T, D). A script may put another function of q, k and v in its place.
    """
    T, D = q.shape[-2:]
    scores = q @ k.transpose(-2, -1)                                             # (B, H, T, T)
    scores = scores / math.sqrt(D)                                               # (B, H, T, T)
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)         # (T, T)
    scores = scores.masked_fill(future, -math.inf)                               # (B, H, T, T)
    weights = scores.softmax(dim=-1)                                             # (B, H, T, T)
    return weights @ v                                                           # (B, H, T, D)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, attention):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=-1)                                # (B, T, C) each
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in (q, k, v))  # (B, H, T, D) each
        y = attention(q, k, v)                                                   # (B, H, T, D)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))                   # (B, T, C)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))             # (B, T, C)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, attention):
        x = x + self.attn(self.ln_1(x), attention)                               # (B, T, C)
        return x + self.mlp(self.ln_2(x))                                        # (B, T, C)


class GPT2(nn.Module):
    """`config` fixes the shape; `seed` alone fixes the weights, which are drawn on the CPU and so equal everywhere."""

    def __init__(self, config, seed=0):
        super().__init__()
        self.config = config
        self.attention = attention
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            "ln_f": nn.LayerNorm(config.n_embd),
        })
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self._initialize(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _initialize(self, generator):
        """Weights from N(0, 0.02), biases zero; what feeds the residual stream is scaled down by sqrt(2 L)."""
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                parameter.normal_(0, 0.02 / math.sqrt(2 * self.config.n_layer), generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
            elif "ln_" not in name:
                parameter.normal_(0, 0.02, generator=generator)

    def forward(self, x, y=None):
        """Logits (B, T, V) of the token ids `x` (B, T); or, given the next ids `y` (B, T), the mean cross-entropy.

        Training asks for the loss alone: a compiled graph that also returns logits adds a zero gradient of their size.
        """
        h = self.transformer.wte(x) + self.transformer.wpe.weight[:x.shape[1]]   # (B, T, C)
        for block in self.transformer.h:
            h = block(h, self.attention)                                         # (B, T, C)
        logits = self.lm_head(self.transformer.ln_f(h))                          # (B, T, V)
        if y is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())                # ()

    @property
    def n_parameters(self):
        """How many numbers are trained; the tied matrix counts once."""
        return sum(parameter.numel() for parameter in self.parameters())
