"""A small GPT, what its sublayers wrote by forward hooks, and its residual's loop by hand."""

from dataclasses import dataclass, field

import numpy as np
import torch

import multigate as mg

BLOCKS, WIDTH = 3, 16
DEPTH = 2 * BLOCKS


def small_gpt(residual, dtype=torch.float64, seed=0, **settings):
    """Random in every parameter: the zeros and ones of the start hide mistakes."""
    sizes = {"vocab_size": 32, "blocks": BLOCKS, "width": WIDTH, "heads": 2, "context": 16}
    model = mg.GPT(mg.preset("tiny", residual=residual, **{**sizes, **settings})).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.4 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
    return model


def some_tokens(samples=5, length=8, seed=3):
    return torch.randint(32, (samples, length), generator=torch.Generator().manual_seed(seed))


@dataclass
class Pass:
    """x, the outputs y of the sublayers (None: skipped), every h, and every state."""

    residual: mg.Residual
    x: torch.Tensor
    ys: list
    logits: torch.Tensor
    hs: list = field(default_factory=list)
    states: list = field(default_factory=list)

    def streams(self, place):
        """[..., m, D] before sublayer `place`, from what is known of each residual's state."""
        state, name = self.states[place], self.residual.name
        if name.startswith("attnres"):
            return None
        if state[0].ndim == self.x.ndim + 1:
            return state[0]
        if name.startswith("mgr"):
            return torch.stack(state, dim=-2)
        return state[0].unsqueeze(-2)

    def sources(self, i):
        """What attention residuals read after sublayer i: the embedding, and sums of outputs."""
        sums = [self.x]
        for j, y in enumerate(self.ys[: i + 1]):
            if j in self.residual.block_starts:
                sums.append(y)
            else:
                sums[-1] = sums[-1] + y
        return torch.stack(sums, dim=-2)


@torch.no_grad()
def hooked(model, tokens, skipped=()):
    """Embeddings and outputs by hooks, then `start` and `step` without the sublayers' norms."""
    found, stack = {}, model.stack
    handles = [
        module.register_forward_hook(lambda _, __, out, key=key: found.__setitem__(key, out))
        for key, module in [("x", model.embed), *enumerate(stack.sublayers)]
    ]
    with stack.skipping(*skipped):
        logits = model(tokens)
    for handle in handles:
        handle.remove()
    ys = [found.get(i) for i in range(len(stack.sublayers))]
    seen = Pass(stack.residual, found["x"], ys, logits)
    h, state = stack.residual.start(seen.x)
    seen.hs, seen.states = [h], [state]
    for i, y in enumerate(ys):
        ends = i == len(ys) - 1 and getattr(stack.residual, "norm_then_sum", False)
        h, state = stack.residual.step(i, y, state, stack.out_norm if ends else None)
        seen.hs.append(h)
        seen.states.append(state)
    return seen


def array(tensor):
    return tensor.detach().double().numpy()


def rms(x):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def beta_by_hand(seen, i):
    """The gate of step i [..., m], or None, by the formulas."""
    residual = seen.residual
    if residual.name == "highway":
        x = array(seen.hs[i])
        weight, bias = array(residual.weight[i]), array(residual.bias[i])
        if residual.vector:
            return sigmoid(x @ weight.T + bias)
        return sigmoid(rms(x) @ weight / WIDTH**0.5 + bias)[..., None]
    if not residual.name.startswith("mgr") or i < residual.streams - 1:
        return None
    step = residual.steps[i]
    z, bias = rms(array(seen.streams(i))) @ array(step.w1) / WIDTH**0.5, array(step.b1)
    if residual.variant == "independent":
        return sigmoid(z + bias)
    carry = np.full((*z.shape[:-1], 1), bias[0])
    return softmax(np.concatenate([carry, z + bias[1:]], axis=-1))[..., 1:]


def alpha_by_hand(seen, i):
    """The weights of what is read after sublayer i [..., m], or None, by the formulas."""
    residual = seen.residual
    if residual.name.startswith("mgr"):
        streams = array(seen.streams(i + 1))
        return softmax(rms(streams) @ array(residual.steps[i].w2) / WIDTH**0.5)
    if residual.name.startswith("attnres"):
        reader = residual.readers[i]
        return softmax(rms(array(seen.sources(i))) @ (array(reader.query) * array(reader.gain)))
    return None


def close(found, expected, tolerance=1e-12):
    """The same numbers, and NaN in the same places."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
