"""Slow references of the layers and of the model: loops over positions, units and modules in float64, made to be read.

Written from the equations alone. ``w`` holds the arrays of a layer by name, x is (B, L, d). Every function returns what
the layer returns outside training unless its name says otherwise.
"""

import math

import numpy as np


def weights_of(module):
    """The parameters of a module as float64 arrays, by name."""
    return {name: p.detach().double().numpy() for name, p in module.named_parameters()}


def under(w, prefix):
    """The weights of one part, under their names inside it."""
    return {name.removeprefix(f"{prefix}."): a for name, a in w.items() if name.startswith(f"{prefix}.")}


def each_position(function, x):
    return np.array([[function(v) for v in row] for row in x])


def softmax(z):
    e = np.exp(z - np.max(z))
    return e / e.sum()


def dense(x, w):
    return each_position(lambda v: w["weight"] @ v + w["bias"], x)


def layer_norm(x, w, eps=1e-6):
    def one(v):
        variance = ((v - v.mean()) ** 2).mean()
        return (v - v.mean()) / math.sqrt(variance + eps) * w["weight"] + w["bias"]

    return each_position(one, x)


# --- feedforward ------------------------------------------------------------------------------------------------------


def preactivation(v, w, unit):
    return w["w1"][unit] @ v + (w["b1"][unit] if "b1" in w else 0.0)


def sum_of_units(v, w, units, scale=1.0):
    y = w["b2"].copy()
    for u in units:
        y += max(0.0, scale * preactivation(v, w, u)) * w["w2"][u]
    return y


def feedforward(x, w):
    return each_position(lambda v: sum_of_units(v, w, range(len(w["w1"]))), x)


def controller_logits(v, w):
    z = (v @ w["c1"]) @ w["c2"]
    return z + w["bc"] if "bc" in w else z


def chosen_units(v, w, ff_sparsity):
    """The unit with the largest logit in every block of N."""
    z = controller_logits(v, w)
    return [max(range(x, x + ff_sparsity), key=lambda u: z[u]) for x in range(0, len(z), ff_sparsity)]


def sparse_feedforward(x, w, ff_sparsity):
    return each_position(lambda v: sum_of_units(v, w, chosen_units(v, w, ff_sparsity)), x)


def training_masks(v, w, ff_sparsity, uniform, temperature, reading):
    """(soft, hard): the two masks (d_ff,) of one token in training, from the uniform numbers of its noise."""
    soft, hard = [], []
    z = controller_logits(v, w).reshape(-1, ff_sparsity)
    for block, u in zip(z, uniform, strict=True):
        noise = -np.log(-np.log(u))
        noisy = (block + noise) / temperature if reading == "paper" else block + temperature * noise
        soft.append(softmax(noisy if reading == "paper" else block))
        hard.append(np.eye(ff_sparsity)[np.argmax(noisy)])
    return np.concatenate(soft), np.concatenate(hard)


def masked_feedforward(v, w, mask):
    """All units, each scaled by its mask: the same inside and outside the ReLU, as no mask is negative."""
    y = w["b2"].copy()
    for u in range(len(w["w1"])):
        y += mask[u] * max(0.0, preactivation(v, w, u)) * w["w2"][u]
    return y


def sparse_feedforward_training(x, w, ff_sparsity, uniform, temperature, reading, hard):
    """Every token soft, or every token hard; ``uniform`` (B, L, X, N)."""
    y = np.zeros((*x.shape[:2], len(w["b2"])))
    for b, t in np.ndindex(x.shape[:2]):
        masks = training_masks(x[b, t], w, ff_sparsity, uniform[b, t], temperature, reading)
        y[b, t] = masked_feedforward(x[b, t], w, masks[hard])
    return y


def straight_through_gradients(x, w, ff_sparsity, uniform, temperature, reading, cotangent):
    """Gradients of sum(cotangent * y) when every token is hard: the mask's gradient is given to the soft mask.

    y = b2 + sum_u h_u w2_u with h = relu(a) q (paper) or relu(a q) (reference), a = w1 x + b1, q the one-hot mask.
    """
    grad = {name: np.zeros_like(a) for name, a in w.items()} | {"x": np.zeros_like(x)}
    for b, t in np.ndindex(x.shape[:2]):
        v, g = x[b, t], cotangent[b, t]
        p, q = training_masks(v, w, ff_sparsity, uniform[b, t], temperature, reading)
        a = np.array([preactivation(v, w, u) for u in range(len(p))])
        h = np.maximum(0, a) * q
        grad_h = w["w2"] @ g
        if reading == "paper":
            grad_q, grad_a = grad_h * np.maximum(0, a), grad_h * q * (a > 0)
        else:
            open_gate = a * q > 0
            grad_q, grad_a = grad_h * open_gate * a, grad_h * open_gate * q
        grad_z = np.zeros_like(p)
        for start in range(0, len(p), ff_sparsity):  # softmax backward: p (g - sum p g), and the 1/tau of the logits
            i = slice(start, start + ff_sparsity)
            grad_z[i] = p[i] * (grad_q[i] - p[i] @ grad_q[i]) / (temperature if reading == "paper" else 1)
        grad["w2"] += np.outer(h, g)
        grad["b2"] += g
        grad["w1"] += np.outer(grad_a, v)
        grad["c2"] += np.outer(v @ w["c1"], grad_z)
        grad["c1"] += np.outer(v, w["c2"] @ grad_z)
        grad["x"][b, t] = grad_a @ w["w1"] + w["c1"] @ (w["c2"] @ grad_z)
        for name, part in (("b1", grad_a), ("bc", grad_z)):
            if name in w:
                grad[name] += part
    return grad


def expert_feedforward(x, w, n_experts, switch):
    """Expert e owns the e-th of E equal runs of hidden units; ``switch`` scales inside the ReLU by softmax(x C)_e."""
    size = len(w["w1"]) // n_experts

    def one(v):
        z = v @ w["c"]
        e = int(np.argmax(z))
        return sum_of_units(v, w, range(e * size, (e + 1) * size), softmax(z)[e] if switch else 1.0)

    return each_position(one, x)


# --- multiplicative layer, convolution --------------------------------------------------------------------------------


def multiplicative(x, w, n_modules):
    """y[s, m] = sum_i x_i D[i, s] E[i, m] + b[s, m]."""
    d_module = w["E"].shape[1]

    def one(v):
        y = np.zeros((n_modules, d_module))
        for s, m in np.ndindex(y.shape):
            y[s, m] = sum(v[i] * w["D"][i, s] * w["E"][i, m] for i in range(len(v)))
        return y.reshape(-1) + w.get("bias", 0.0)

    return each_position(one, x)


def module_conv(x, w, n_modules):
    """y[t, s, o] = b[o] + sum over taps f, j and features i of W[o, i, f, j] x[t - (F-1) + f, s + j - (k-1)/2, i]."""
    (d_out, _, length_kernel, module_kernel), (batch, length, _) = w["weight"].shape, x.shape
    modules = x.reshape(batch, length, n_modules, -1)
    y = np.zeros((batch, length, n_modules, d_out)) + w["bias"]
    for b, t, s, f, j in np.ndindex(batch, length, n_modules, length_kernel, module_kernel):
        source, neighbour = t - (length_kernel - 1) + f, s + j - (module_kernel - 1) // 2
        if source >= 0 and 0 <= neighbour < n_modules:
            y[b, t, s] += w["weight"][:, :, f, j] @ modules[b, source, neighbour]
    return y.reshape(batch, length, -1)


# --- attention --------------------------------------------------------------------------------------------------------


def sight(causal, mask=None, prefix_length=None):
    """sees(b, t, j): whether position t of row b may look at position j."""

    def sees(b, t, j):
        real = mask is None or bool(mask[b][j])
        if not causal:
            return real
        in_reach = j <= t or (prefix_length is not None and j < prefix_length[b])
        return (in_reach and real) or j == t

    return sees


def attend(q, k, v, n_heads, sees):
    """Softmax attention, head by head: (B, L, d), (B, T, d) twice -> (B, L, d)."""
    width = q.shape[2] // n_heads
    y = np.zeros_like(q)
    for b, t, h in np.ndindex(q.shape[0], q.shape[1], n_heads):
        own = slice(h * width, (h + 1) * width)
        keys = [j for j in range(k.shape[1]) if sees(b, t, j)]
        share = softmax(np.array([q[b, t, own] @ k[b, j, own] / math.sqrt(width) for j in keys]))
        y[b, t, own] = sum(p * v[b, j, own] for p, j in zip(share, keys, strict=True))
    return y


def self_attention(x, w, kind, n_heads, n_modules, sees):
    part = {name: under(w, name) for name in ("shared", "q", "k", "v", "output")}

    def mult(z, weights):
        return multiplicative(z, weights, n_modules)

    def conv(z, weights):
        return module_conv(z, weights, n_modules)

    project = {"dense": dense, "mult": mult}.get(kind, conv)
    h = mult(x, part["shared"]) if kind.startswith("mult_conv") else x
    q = project(h, part["q"])
    k = project(h, part["k"]) if part["k"] else q
    d_module = x.shape[2] // n_modules
    if kind != "dense" and "weight" in part["v"] and part["v"]["weight"].shape[1] == 2 * d_module:
        h = np.concatenate(  # V looks at h and x side by side in every module
            [z[:, :, s * d_module : (s + 1) * d_module] for s in range(n_modules) for z in (h, x)], axis=2
        )
    y = attend(q, k, project(h, part["v"]), n_heads, sees)
    if kind == "mult_conv":
        return y
    if kind == "mult_conv_output":
        return conv(mult(y, under(part["output"], "layers.0")), under(part["output"], "layers.1"))
    return project(y, part["output"])


def cross_attention(x, memory, w, n_heads, n_modules, sees):
    """Dense if the layer has an output matrix, else with the query conv(mult(x)) and no output layer."""
    sparse = not under(w, "output")
    q = (
        module_conv(multiplicative(x, under(w, "query.layers.0"), n_modules), under(w, "query.layers.1"), n_modules)
        if sparse
        else dense(x, under(w, "query"))
    )
    y = attend(q, dense(memory, under(w, "key")), dense(memory, under(w, "value")), n_heads, sees)
    return y if sparse else dense(y, under(w, "output"))


# --- recurrence -------------------------------------------------------------------------------------------------------


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def sru(x, w):
    y = np.zeros_like(x)
    for row, out in zip(x, y, strict=True):
        c = np.zeros(x.shape[-1])
        for t, v in enumerate(row):
            r, f, candidate = np.split(w["gates.weight"] @ v + w["gates.bias"], 3)
            r, f = sigmoid(r), sigmoid(f)
            c = f * c + (1 - f) * candidate
            out[t] = r * c + (1 - r) * v * math.sqrt(3)
    return y


def recurrent_branch(x, w):
    *cells, last = sorted({int(name.split(".")[1]) for name in w if name.startswith("layers.")})[1:]
    x = dense(x, under(w, "layers.0"))
    for i in cells:
        x = sru(x, under(w, f"layers.{i}"))
    return dense(x, under(w, f"layers.{last}"))


# --- attention by hashing: one head, qk and v (L, dh) -----------------------------------------------------------------


def lsh_buckets(vector, rotations, factors):
    """Bucket of one vector in every round; rotations (R, dh, half the sum of the factors)."""

    def one(u):
        bucket = start = 0
        for i, n in enumerate(factors):
            part = u[start : start + n // 2]
            bucket += int(np.argmax([*part, *-part])) * math.prod(factors[:i])
            start += n // 2
        return bucket

    return [one(vector @ rotation) for rotation in rotations]


def look(qk, v, t, found):
    """(o, lse) of position t on the positions it found; some may be there twice. None if there are none."""
    if not found:
        return None
    keys = [qk[s] / math.sqrt((qk[s] ** 2).mean() + 1e-6) for s in found]
    z = np.array([qk[t] @ k / math.sqrt(len(k)) for k in keys])
    return sum(p * v[s] for p, s in zip(softmax(z), found, strict=True)), math.log(np.exp(z).sum())


def combine_rounds(rounds, own):
    """Rounds by their sums of exp(z); its own value for who found nobody in any of them."""
    seen = [found for found in rounds if found]
    if not seen:
        return own
    o, lse = zip(*seen, strict=True)
    return sum(w * y for w, y in zip(softmax(np.array(lse)), o, strict=True))


def lsh_attention(qk, v, buckets, sizes, causal, real):
    """In chunks of the list sorted by bucket, the last of a round as short as it is; ``buckets`` (R, L)."""
    chunks, length = [], len(qk)
    for r, own in enumerate(buckets):
        order = sorted(range(length), key=lambda t, own=own: (own[t], t))
        chunks += [(r, order[i : i + sizes.chunk_len]) for i in range(0, length, sizes.chunk_len)]
    seen = {}
    for c, (r, items) in enumerate(chunks):
        beside = range(c - sizes.n_chunks_before, c + sizes.n_chunks_after + 1)[: len(chunks)]  # none twice
        near = [s for i in beside for s in chunks[i % len(chunks)][1] if real[s]]
        for t in items:
            seen[t, r] = look(qk, v, t, [s for s in near if (s < t if causal else s != t)])
    return np.array([combine_rounds([seen[t, r] for r in range(len(buckets))], v[t]) for t in range(length)])


def lsh_full(qk, v, causal, real):
    def found(t):
        return [s for s in range(len(qk)) if real[s] and (s < t if causal else s != t)]

    return np.array([combine_rounds([look(qk, v, t, found(t))], v[t]) for t in range(len(qk))])


def lsh_decoding(qk, v, buckets, window):
    """Every position on the latest ``window`` earlier ones of its bucket."""

    def round_of(t, own):
        return look(qk, v, t, [s for s in range(t) if own[s] == own[t]][-window:])

    return np.array([combine_rounds([round_of(t, own) for own in buckets], v[t]) for t in range(len(qk))])


# --- positions, whole model -------------------------------------------------------------------------------------------


def sinusoids(max_len, d_model):
    """Even features the sine, odd ones the cosine, of t / 10000^(2i / d_model) for the i-th pair."""
    table = np.zeros((max_len, d_model))
    for t, j in np.ndindex(table.shape):
        angle = t / 10000 ** (2 * (j // 2) / d_model)
        table[t, j] = math.cos(angle) if j % 2 else math.sin(angle)
    return table


def any_feedforward(x, w, config):
    if config.feedforward == "dense":
        return feedforward(x, w)
    if config.feedforward == "sparse":
        return sparse_feedforward(x, w, config.ff_sparsity)
    return expert_feedforward(x, w, config.ff_sparsity, config.feedforward == "switch")


def feed(x, w, config, norm):
    """The feedforward of x, and beside it the recurrent branch, each with its own norm."""
    y = any_feedforward(layer_norm(x, under(w, norm)), under(w, "feedforward"), config)
    if config.sru_units:
        y = y + recurrent_branch(layer_norm(x, under(w, "recurrence_norm")), under(w, "recurrence"))
    return y


def stack(x, w, config, kind, sees, memory=None, memory_mask=None):
    """Positions, pre-norm blocks, last norm."""
    table = w["positions.table"] if "positions.table" in w else sinusoids(config.max_len, config.d_model)
    x = x + table[: x.shape[1]]
    sizes = (config.n_heads, config.n_modules)
    for i in range(len({name.split(".")[1] for name in w if name.startswith("blocks.")})):
        block = under(w, f"blocks.{i}")
        z = layer_norm(x, under(block, "attention_norm"))
        x = x + self_attention(z, under(block, "attention"), kind, *sizes, sees)
        if memory is not None:
            z = layer_norm(x, under(block, "cross_norm"))
            x = x + cross_attention(z, memory, under(block, "cross"), *sizes, sight(False, memory_mask))
        x = x + feed(x, block, config, "feedforward_norm")
    return layer_norm(x, under(w, "norm"))


def transformer(w, config, tokens, target=None, mask=None, prefix_length=None):
    """Logits (B, T, vocab) of the model whose weights are ``w``, for lists of token ids."""
    embed = w["embedding.weight"]
    x = embed[np.asarray(tokens)]
    if target is None:
        sees = sight(config.architecture != "encoder", mask, prefix_length)
        x = stack(x, under(w, "stack"), config, config.attention, sees)
    else:
        kind = config.encoder_attention or config.attention
        memory = stack(x, under(w, "encoder"), config, kind, sight(False, mask))
        x = stack(embed[np.asarray(target)], under(w, "stack"), config, config.attention, sight(True), memory, mask)
    return unembed(x, w, config)


def unembed(x, w, config):
    out = under(w, "unembedding")
    return dense(x, out) if config.loss_sparsity == 1 else multiplicative(x, out, config.loss_sparsity)


def terraformer(w, config, source, target):
    """Logits (T2, vocab) for lists of token ids, one row without padding."""
    sizes = (config.n_heads, config.n_modules)
    table = sinusoids(config.max_len, config.d_model)
    embed, tables = w["embedding.weight"], [w.get(f"{side}.table", table) for side in ("source_positions", "positions")]
    e, d = (embed[ids][None] + t[: len(ids)] for ids, t in zip((source, target), tables, strict=True))
    encoder = ["attention", "feedforward"] * config.n_encoder_layers
    decoder = (["attention"] * config.n_attentions + ["feedforward"]) * config.n_layers

    def run(name, kinds, attention, sees, x1, x2, swaps):
        for i, kind in enumerate(kinds):
            half = under(w, f"{name}.halves.{i}")
            if kind == "attention":
                z = self_attention(layer_norm(x2, under(half, "norm")), under(half, kind), attention, *sizes, sees)
            else:
                z = feed(x2, half, config, "norm")
            x1, x2 = (x2, x1 + z) if swaps[kind] else (x1 + z, x2)
        return x1, x2

    swaps = {"attention": True, "feedforward": config.two_swaps}
    x1, x2 = run("encoder", encoder, config.attention_of_encoder, sight(False), e, e, swaps)
    if not config.reversible_encoder:
        x1 = x2 = layer_norm(dense((x1 + x2) / 2, under(w, "encoder_output")), under(w, "encoder_norm"))
    x1, x2 = (np.concatenate([x, d], axis=1) for x in (x1, x2))
    x1, x2 = run("decoder", decoder, config.attention, sight(True), x1, x2, dict.fromkeys(swaps, True))
    return unembed(layer_norm((x1 + x2) / 2, under(w, "norm")), w, config)[0, len(source) :]
