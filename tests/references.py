"""Every residual once more, from its equations: one token, numpy float64, loops over streams.

Nothing here is shared with the package. A reference takes the residual's parameters by name, its
options, the embedding e [D] and the sublayer outputs ys (None: that sublayer is skipped), and
returns the list h_0 .. h_depth of everything that is read.
"""

import itertools
import math

import numpy as np


def _sigmoid(z):
    return 1.0 / (1.0 + math.exp(-z)) if z >= 0 else math.exp(z) / (1.0 + math.exp(z))


def _softmax(zs):
    top = max(zs)
    es = [math.exp(z - top) for z in zs]
    return [e / sum(es) for e in es]


def _rms(v, eps):
    return v / math.sqrt(sum(float(a) * float(a) for a in v) / len(v) + eps)


def _attend(sources, query, scale, eps):
    logits = [scale * float(np.dot(query, _rms(s, eps))) for s in sources]
    total = np.zeros_like(sources[0])
    for weight, source in zip(_softmax(logits), sources, strict=True):
        total = total + weight * source
    return total


def prenorm(p, o, e, ys):
    x, hs = e, [e]
    for y in ys:
        x = x if y is None else x + y
        hs.append(x)
    return hs


def highway(p, o, e, ys):
    x, hs = e.copy(), [e]
    for i, y in enumerate(ys):
        if y is not None:
            w, b = p[f"weight.{i}"], p[f"bias.{i}"]
            new = np.empty_like(x)
            for c in range(len(x)):
                if o.get("gate") == "vector":
                    g = _sigmoid(sum(w[c, k] * x[k] for k in range(len(x))) + b[c])
                else:
                    g = _sigmoid(float(np.dot(w, _rms(x, o["eps"]))) / math.sqrt(len(x)) + float(b))
                new[c] = (1 - g) * x[c] + g * y[c]
            x = new
        hs.append(x)
    return hs


def denseformer(p, o, e, ys):
    period, dilation = o.get("period", 2), o.get("dilation", 1)
    past, x, hs = [e], e, [e]
    for i, y in enumerate(ys):
        x = x if y is None else x + y
        if i % period == period - 1 or i == len(ys) - 1:
            past.append(x)
            block = len(past) - 1
            used = [j for j in range(block + 1) if (block - j) % dilation == 0]
            weights = p[f"weights.{block - 1}"]
            x = sum(weights[k] * past[j] for k, j in enumerate(used))
        hs.append(x)
    return hs


def _hyper(coefficients, o, e, ys):
    n, depth = o["streams"], len(ys)
    streams, hs = [e.copy() for _ in range(n)], []
    for layer in range(depth):
        pre, post, mix = coefficients(layer, streams)
        hs.append(sum(pre[j] * streams[j] for j in range(n)))
        y = ys[layer]
        if y is not None:
            streams = [
                post[k] * y + sum(mix[j][k] * streams[j] for j in range(n)) for k in range(n)
            ]
    hs.append(sum(streams))
    return hs


def hc(p, o, e, ys):
    n = o["streams"]

    def coefficients(layer, streams):
        def get(name):
            return p[f"maps.{layer}.{name}"]

        pre, post = list(get("pre")), list(get("post"))
        mix = [list(row) for row in get("mix")]
        if not o.get("static", False):
            s_in, s_post = float(get("scale_in")), float(get("scale_post"))
            for j in range(n):
                unit = _rms(streams[j], o["eps"])
                pre[j] += s_in * math.tanh(np.dot(unit, get("w_pre")))
                post[j] += s_post * math.tanh(np.dot(unit, get("w_post")))
                for k in range(n):
                    mix[j][k] += s_in * math.tanh(np.dot(unit, get("w_mix")[k]))
        return pre, post, mix

    return _hyper(coefficients, o, e, ys)


def _constrained(p, o, e, ys, matrix):
    n = o["streams"]

    def coefficients(layer, streams):
        unit = _rms(np.concatenate(streams), o["eps"])

        def logits(name):
            w, b = p[f"maps.{layer}.w_{name}"], p[f"maps.{layer}.b_{name}"]
            scale = float(p[f"maps.{layer}.scale_{name}"])
            return [scale * float(np.dot(w[r], unit)) + float(b[r]) for r in range(len(b))]

        pre = [_sigmoid(z) for z in logits("pre")]
        post = [2 * _sigmoid(z) for z in logits("post")]
        return pre, post, matrix(logits("mix"), n)

    return _hyper(coefficients, o, e, ys)


def mhc(p, o, e, ys):
    def matrix(logits, n, eps=1e-6):
        m = [[v + eps for v in _softmax(logits[j * n : (j + 1) * n])] for j in range(n)]

        def columns():
            for k in range(n):
                total = sum(m[j][k] for j in range(n)) + eps
                for j in range(n):
                    m[j][k] /= total

        columns()
        for _ in range(o.get("sinkhorn_steps", 20) - 1):
            for j in range(n):
                total = sum(m[j]) + eps
                m[j] = [v / total for v in m[j]]
            columns()
        return m

    return _constrained(p, o, e, ys, matrix)


def mhc_lite(p, o, e, ys):
    def matrix(logits, n):
        m = [[0.0] * n for _ in range(n)]
        orders = itertools.permutations(range(n))
        for share, order in zip(_softmax(logits), orders, strict=True):
            for j in range(n):
                m[j][order[j]] += share
        return m

    return _constrained(p, o, e, ys, matrix)


def _attnres(p, o, e, ys, boundaries):
    scale = 1 / math.sqrt(len(e)) if o.get("scaled", False) else 1.0
    closed, part, hs = [e], None, [e]
    for i, y in enumerate(ys):
        if i in boundaries and part is not None:
            closed.append(part)
            part = None
        if y is not None:
            part = y if part is None else part + y
        query = p[f"readers.{i}.query"]
        if o.get("key_gain", True):
            query = query * p[f"readers.{i}.gain"]
        hs.append(_attend(closed + ([] if part is None else [part]), query, scale, o["eps"]))
    return hs


def attnres_full(p, o, e, ys):
    return _attnres(p, o, e, ys, range(len(ys)))


def attnres_block(p, o, e, ys):
    blocks = o["streams"]
    return _attnres(p, o, e, ys, [round(k * len(ys) / blocks) for k in range(blocks)])


def _mgr(p, o, e, ys, competitive):
    n, eps, root = o["streams"], o["eps"], math.sqrt(len(e))
    streams, hs = [e], [e]
    for i, y in enumerate(ys):
        if len(streams) < n:
            streams.append(y)
        elif y is not None:
            w, b = p[f"steps.{i}.w1"], p[f"steps.{i}.b1"]
            scores = [float(np.dot(w, _rms(s, eps))) / root for s in streams]
            if competitive:
                logits = [float(b[0])] + [z + float(b[1 + k]) for k, z in enumerate(scores)]
                betas = _softmax(logits)[1:]
            else:
                betas = [_sigmoid(z + float(b[k])) for k, z in enumerate(scores)]
            streams = [(1 - g) * s + g * y for g, s in zip(betas, streams, strict=True)]
        hs.append(_attend(streams, p[f"steps.{i}.w2"], 1 / root, eps))
    return hs


def mgr_independent(p, o, e, ys):
    return _mgr(p, o, e, ys, competitive=False)


def mgr_competitive(p, o, e, ys):
    return _mgr(p, o, e, ys, competitive=True)


def reference_of(name):
    """The reference for a registered name, or one sentence that asks for it."""
    function = globals().get(name.replace("-", "_"))
    assert function is not None, (
        f"{name} has no independent reference yet: write {name.replace('-', '_')}(p, o, e, ys) "
        "in tests/references.py from its equations"
    )
    return function
