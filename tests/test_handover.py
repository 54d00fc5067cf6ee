"""Handing a state over: what a residual without verbs of its own for it sends, and bad input."""

import pytest
import torch

import multigate as mg
from cases import Case, Own, random_inputs, run
from multigate.norm import RMSNorm
from multigate.residuals import flatten_state


def test_a_residual_of_ones_own_needs_no_handover():
    """Each tensor of h and the state once: h, new, the ys and x; nothing is recorded on the way."""
    residual = Own(6, 7).double()
    with torch.no_grad():
        residual.gain += 0.5
    x, ys = random_inputs(2, 3)
    hs, states = run(residual, x, ys)
    for i in range(1, 7):
        with residual.recording() as steps:
            sent = residual.handover(i, hs[i], states[i])
            h, state = residual.resume(i, sent)
            assert not steps
            residual.step(i, ys[i], state)
        assert list(steps) == [i]
        assert len(sent) == 3 + i
        assert residual.handover_size(i) == 6 * (3 + i)
        found, expected = (h, *flatten_state(state)), (hs[i], *flatten_state(states[i]))
        assert all(a is b for a, b in zip(found, expected, strict=True))
        assert [len(part) if isinstance(part, tuple) else 1 for part in state] == [1 + i, 1, 1]
    with pytest.raises(ValueError, match="not made up as it is when every sublayer has written"):
        residual.handover(3, *residual.step(2, None, states[2]))


@pytest.mark.parametrize("name", ["mgr-independent", "mgr-competitive"])
@pytest.mark.parametrize("norm", [None, RMSNorm(64), torch.nn.LayerNorm(64)], ids=str)
def test_multigate_reads_the_streams_again_as_a_skipped_sublayer_would(name, norm):
    """In bfloat16, where the order of norm and rounding shows; growing streams are read exactly."""
    residual = Case(name, {"streams": 4}).build(dim=64, dtype=torch.float32)
    x, ys = random_inputs(50, dim=64, dtype=torch.bfloat16)
    norm = norm and norm.bfloat16()
    hs, states = run(residual, x, ys, [norm] * 8)
    for i in range(1, 7):
        h, _ = residual.resume(i, residual.handover(i, hs[i], states[i]), norm)
        expected = hs[i] if i <= 3 else residual.step(i - 1, None, states[i], norm)[0]
        assert torch.equal(h, expected)


@pytest.mark.parametrize("i", [-1, 0, 7, 8])
def test_there_is_a_handover_only_between_sublayers(i):
    residual = mg.build_residual("prenorm", 6, 7)
    h, state = residual.start(torch.ones(6))
    for call in (lambda: residual.handover(i, h, state), lambda: residual.resume(i, [h])):
        with pytest.raises(ValueError, match=f"no handover at sublayer {i}, only at 1 to 6"):
            call()


def test_nothing_cannot_be_resumed():
    with pytest.raises(ValueError, match="nothing to resume sublayer 3 from"):
        mg.build_residual("prenorm", 6, 7).resume(3, [])
    with pytest.raises(ValueError, match="handed over is on cpu but the residual is on meta"):
        mg.build_residual("highway", 6, 7).to("meta").resume(3, [torch.ones(6)])
