"""The checker of golden files passes on files of other sizes: the format's formulas once more, in numpy and float64.

Letters and formulas are those of tests/golden/README.md.
"""

import json
import math
import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from sparselib.reference import check


class Generator:
    """Draws weights and inputs in float32, and hands them out as float64."""

    def __init__(self, seed):
        self.rng, self.tensors = np.random.default_rng(seed), {}

    def draw(self, key, *shape):
        self.tensors[key] = self.rng.normal(size=shape).astype(np.float32)
        return self.tensors[key].astype(float)

    def draws(self, prefix, **shapes):
        return [self.draw(prefix + name, *shape) for name, shape in shapes.items()]

    def check(self, **args):
        """Write the file and let the checker compare it."""
        arrays = {key: np.ascontiguousarray(value) for key, value in self.tensors.items()}
        stored = {key: a.astype(np.int32 if a.dtype.kind == "i" else np.float32) for key, a in arrays.items()}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.safetensors"
            save_file(stored, path, {"args": json.dumps(args)})
            outcome, text, count = check(path)
        assert outcome == "ok" and count > 0, text

    # a layer each: draws its weights and returns its function of x (B, L, d)

    def dense(self, prefix, d_in, d_out):
        W, b = self.draws(prefix, W=(d_in, d_out), b=(d_out,))
        return lambda x: x @ W + b

    def mult(self, prefix, S, d_in, d_out):
        G, P, b = self.draws(prefix, G=(S, d_in), P=(d_in, d_out // S), b=(d_out,))
        return lambda x: np.einsum("bld,nd,dm->blnm", x, G, P).reshape(*x.shape[:2], d_out) + b

    def conv(self, prefix, S, F, k, M, O):  # noqa: E741
        W, b = self.draws(prefix, W=(F, k, M, O), b=(O,))

        def apply(x):
            B, L, _ = x.shape
            y, beside = np.zeros((B, L, S, O)) + b, (k - 1) // 2
            padded = np.pad(x.reshape(B, L, S, M), ((0, 0), (F - 1, 0), (beside, beside), (0, 0)))
            for f, j in np.ndindex(F, k):
                y += padded[:, f : f + L, j : j + S] @ W[f, j]
            return y.reshape(B, L, S * O)

        return apply

    def norm(self, prefix, d):
        scale, bias = self.draws(prefix, scale=(d,), bias=(d,))

        def apply(x):
            centred = x - x.mean(-1, keepdims=True)
            return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * scale + bias

        return apply

    def dense_attention(self, prefix, d, H):
        q, k, v, o = (self.dense(f"{prefix}{name}.", d, d) for name in "qkvo")
        return lambda x: o(attend(q(x), k(x), v(x), H))

    def sparse_attention(self, prefix, d, H, S, F, share_qk=False, output="none", concat="none"):
        M, middle = d // S, {}
        mult = self.mult(prefix + "mult.", S, d, d)
        q = self.conv(prefix + ("conv_qk." if share_qk else "conv_q."), S, F, 3, M, M)
        k = q if share_qk else self.conv(prefix + "conv_k.", S, F, 3, M, M)
        v = self.conv(prefix + "conv_v.", S, F, 1, 2 * M if concat == "fixed" else M, M)
        outputs = [self.mult(prefix + "out_mult.", S, d, d)] if "mult" in output else []
        outputs += [self.conv(prefix + "out_conv.", S, F, 3, M, M)] if "conv" in output else []

        def apply(x):
            B, L, _ = x.shape
            h = into_v = mult(x)
            if concat == "fixed":
                into_v = np.concatenate([h.reshape(B, L, S, M), x.reshape(B, L, S, M)], -1).reshape(B, L, 2 * d)
            middle.update(h=h, q=q(h), k=k(h), v=v(into_v))
            y = attend(middle["q"], middle["k"], middle["v"], H)
            for layer in outputs:
                y = layer(y)
            return y

        apply.middle = middle
        return apply

    def feed_forward(self, prefix, d, f):
        W1, b1, W2, b2 = self.draws(prefix, W1=(d, f), b1=(f,), W2=(f, d), b2=(d,))
        return lambda x: np.maximum(x @ W1 + b1, 0) @ W2 + b2

    def sparse_ff(self, prefix, d, X, N, r):
        shapes = dict(m1=(d, r), m2=(r, X, N), mb=(X, N), w1=(d, X, N), w2=(N, X, d), b2=(d,))
        weights = dict(zip(shapes, self.draws(prefix, **shapes), strict=True))

        def apply(x):
            z, y = controller(x, weights), np.zeros(x.shape) + weights["b2"]
            for b, at, block in np.ndindex(*x.shape[:2], X):
                n = z[b, at, block].argmax()
                y[b, at] += max(x[b, at] @ weights["w1"][:, block, n], 0) * weights["w2"][n, block]
            return y

        apply.weights = weights
        return apply


def controller(x, weights):
    return np.einsum("bld,dr,rxn->blxn", x, weights["m1"], weights["m2"]) + weights["mb"]


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attend(q, k, v, H):
    B, L, d = q.shape
    y = np.zeros((B, L, d))
    for b, at, head in np.ndindex(B, L, H):
        own = slice(head * (d // H), (head + 1) * (d // H))
        z = k[b, : at + 1, own] @ q[b, at, own] / math.sqrt(d // H)
        y[b, at, own] = softmax(z) @ v[b, : at + 1, own]
    return y


def sparse_ff_training(x, weights, cotangent, q=None):
    """Value and gradients by autograd on the plain formula; a given one-hot ``q`` is straight-through."""
    leaves = {"x": torch.tensor(x), **{name: torch.tensor(w) for name, w in weights.items()}}
    for leaf in leaves.values():
        leaf.requires_grad_()
    x, w1, w2, b2, m1, m2, mb = (leaves[name] for name in ("x", "w1", "w2", "b2", "m1", "m2", "mb"))
    p = (torch.einsum("bld,dr,rxn->blxn", x, m1, m2) + mb).softmax(-1)
    q = p if q is None else (p - p.detach()) + torch.tensor(q)
    a = torch.einsum("bld,dxn->blxn", x, w1)
    y = torch.einsum("blxn,nxd->bld", torch.relu(a * q), w2) + b2
    (y * torch.tensor(cotangent)).sum().backward()
    return y.detach().numpy(), {name: leaf.grad.numpy() for name, leaf in leaves.items()}


size = st.integers(1, 4)
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=10)


@few
@given(case=st.sampled_from(["factored_dense", "sparse_loss"]), S=size, m=size, d=size, B=size, L=size, seed=seeds)
def test_other_multiplicative(case, S, m, d, B, L, seed):
    g = Generator(seed)
    g.tensors["out.y"] = g.mult("w.", S, d, S * m)(g.draw("in.x", B, L, d))
    g.check(case=case, n_modules=S, d_in=d, d_out=S * m)


@few
@given(S=size, F=size, k=st.sampled_from([1, 3, 5]), M=size, O=size, B=size, L=size, seed=seeds)
def test_other_conv(S, F, k, M, O, B, L, seed):  # noqa: E741
    g = Generator(seed)
    x = g.draw("in.x", B, L, S * M)
    g.tensors["out.y"] = g.tensors["predict.y"] = g.conv("w.", S, F, k, M, O)(x)
    state = g.tensors["predict.final_state"] = np.zeros((B, F - 1, S + k - 1, M))
    for i in range(F - 1):
        position = L - (F - 1) + i
        if position >= 0:
            state[:, i, (k - 1) // 2 : (k - 1) // 2 + S] = x[:, position].reshape(B, S, M)
    g.check(case="local_conv", n_modules=S, n_units=O, kernel_size=k, length_kernel_size=F)


@few
@given(H=size, dh=size, B=size, L=size, seed=seeds)
def test_other_dense_attention(H, dh, B, L, seed):
    g = Generator(seed)
    g.tensors["out.y"] = g.tensors["predict.y"] = g.dense_attention("w.", H * dh, H)(g.draw("in.x", B, L, H * dh))
    g.check(case="causal_attention", d_feature=H * dh, n_heads=H)


@settings(max_examples=25)
@given(
    H=size,
    S=size,
    m=size,
    F=size,
    B=size,
    L=size,
    seed=seeds,
    full=st.booleans(),
    share_qk=st.booleans(),
    output=st.sampled_from(["none", "mult", "conv", "multconv"]),
    concat=st.sampled_from(["none", "fixed"]),
)
def test_other_sparse_attention(H, S, m, F, B, L, seed, full, share_qk, output, concat):
    g, d = Generator(seed), math.lcm(H, S) * m
    sizes = dict(d_feature=d, n_heads=H, sparsity=S, length_kernel_size=F)
    options = (share_qk, output, concat) if full else ()
    layer = g.sparse_attention("w.", d, H, S, F, *options)
    g.tensors["out.y"] = g.tensors["predict.y"] = layer(g.draw("in.x", B, L, d))
    if not full:
        g.tensors |= {f"mid.{name}": value for name, value in layer.middle.items()}
        return g.check(case="mult_conv_attention", **sizes)
    g.check(case="mult_conv_attention_full", **sizes, share_qk=share_qk, output_layer_type=output, v_concat_type=concat)


@few
@given(d=size, X=size, N=size, r=size, B=size, L=size, temperature=st.floats(0, 3), seed=seeds)
def test_other_sparse_feedforward(d, X, N, r, B, L, temperature, seed):
    g = Generator(seed)
    layer = g.sparse_ff("w.", d, X, N, r)
    x, cotangent = g.draw("in.x", B, L, d), g.draw("in.cotangent", B, L, d)
    z = controller(x, layer.weights)
    rows = (B * L, X, N)
    u = g.tensors["noisy.u"] = g.rng.uniform(1e-6, 1 - 1e-6, rows).astype(np.float32)
    noise = -np.log(-np.log(u.astype(float))).reshape(z.shape)
    noisy = (np.log(softmax(z)) + temperature * noise).argmax(-1)
    g.tensors |= {"mid.logits": z.reshape(rows), "mid.probs": softmax(z).reshape(rows)}
    g.tensors |= {"mid.index": z.argmax(-1).reshape(-1, X), "noisy.index": noisy.reshape(-1, X)}
    g.tensors["out.y"] = g.tensors["predict.y"] = layer(x)
    masks = {"train_soft": None, "train_hard": np.eye(N)[z.argmax(-1)], "noisy": np.eye(N)[noisy]}
    for mode, mask in masks.items():
        g.tensors[f"{mode}.y"], gradients = sparse_ff_training(x, layer.weights, cotangent, mask)
        kept = ("x", "mb") if mode == "noisy" else gradients
        g.tensors |= {f"{mode}.grad.{name}": gradients[name] for name in kept}
    g.check(case="sparse_ff", d_ff=X * N, n_elements_in_block=N, d_lowrank=r, noisy_temperature=temperature)


@few
@given(switch=st.booleans(), d=size, E=size, width=size, B=size, L=size, seed=seeds)
def test_other_experts(switch, d, E, width, B, L, seed):
    g, f = Generator(seed), E * width
    m1, w1, w2, b2 = g.draws("w.", m1=(d, E), w1=(d, f), w2=(f, d), b2=(d,))
    x = g.draw("in.x", B, L, d)
    expert, p, y = (x @ m1).argmax(-1), softmax(x @ m1), np.zeros((B, L, d))
    for b, at in np.ndindex(B, L):
        e = expert[b, at]
        own = slice(e * width, (e + 1) * width)
        scale = p[b, at, e] if switch else 1
        y[b, at] = np.maximum(scale * (x[b, at] @ w1[:, own]), 0) @ w2[own] + b2
    g.tensors |= {"out.y": y, "predict.y": y, "mid.expert": expert}
    g.check(case="switch_sparse_ff" if switch else "block_sparse_ff", d_ff=f, n_experts=E)


@settings(max_examples=20)
@given(
    H=size,
    m=size,
    S=st.none() | size,
    F=size,
    block=st.none() | st.tuples(st.integers(2, 4), size),
    loss=st.integers(0, 3),
    n_layers=st.integers(1, 3),
    B=size,
    L=size,
    seed=seeds,
)
def test_other_models(H, m, S, F, block, loss, n_layers, B, L, seed):
    g, d, max_len = Generator(seed), math.lcm(H, S or 1) * m, L + seed % 3
    vocab = 4 * (loss or 1)
    N, r = block or (1, None)
    embed, pos = g.draw("w.embed", vocab, d), g.draw("w.pos", max_len, d)
    tokens = g.tensors["in.tokens"] = g.rng.integers(1, vocab, (B, L))
    x = embed[np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]] + pos[:L]
    for i in range(n_layers):
        attention, ffn = f"w.block{i}.attn.", f"w.block{i}.ffn."
        norm = g.norm(attention + "ln.", d)
        layer = g.sparse_attention(attention, d, H, S, F) if S else g.dense_attention(attention, d, H)
        x = x + layer(norm(x))
        norm = g.norm(ffn + "ln.", d)
        x = x + (g.sparse_ff(ffn + "ff.", d, 3, N, r) if block else g.feed_forward(ffn + "ff.", d, 3))(norm(x))
    x = g.norm("w.final_ln.", d)(x)
    logits = g.mult("w.logits.", loss, d, vocab) if loss else g.dense("w.logits.", d, vocab)
    g.tensors["out.logits"] = g.tensors["predict.logits"] = logits(x)
    sizes = dict(vocab_size=vocab, d_model=d, d_ff=3 * N, n_layers=n_layers, n_heads=H, max_len=max_len)
    sparse = dict(qkv_sparsity=S, length_kernel_size=F if S else None, ff_sparsity=block, loss_sparsity=loss)
    g.check(case="lm", **sizes, attention="mult_conv" if S else "dense", **sparse, sru_units=0, sru_layers=0)
