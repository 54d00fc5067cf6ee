"""Where hyper-connections and their descendants start: which stream, which map, which scale."""

import pytest
import torch

import multigate as mg

DEPTH, N = 7, 3


def one_hot(k):
    return [float(j == k % N) for j in range(N)]


@pytest.mark.parametrize("static", [False, True])
def test_hc_starts_reading_one_stream_in_turn_and_writing_all(static):
    residual = mg.build_residual("hc", 5, DEPTH, N, static=static)
    for k, maps in enumerate(residual.maps):
        assert maps.pre.tolist() == one_hot(k)
        assert maps.post.tolist() == [1.0] * N
        assert torch.equal(maps.mix, torch.eye(N))
        if not static:
            for weight in (maps.w_pre, maps.w_post, maps.w_mix):
                assert not weight.any()
            assert maps.scale_in.item() == maps.scale_post.item() == pytest.approx(0.01)


@pytest.mark.parametrize("name", ["mhc", "mhc-lite"])
def test_constrained_maps_favour_one_stream_in_turn_and_the_identity(name):
    residual = mg.build_residual(name, 5, DEPTH, N)
    identity = (1 - torch.eye(N)).flatten() * -8 if name == "mhc" else torch.full((6,), -8.0)
    if name == "mhc-lite":
        identity[0] = 0
        assert torch.equal(residual.permutations[0], torch.eye(N))
        assert len({tuple(p.flatten().tolist()) for p in residual.permutations}) == 6
    for k, maps in enumerate(residual.maps):
        favoured = [2 * v - 1 for v in one_hot(k)]
        assert maps.b_pre.tolist() == maps.b_post.tolist() == favoured
        assert torch.equal(maps.b_mix, identity)
        for part in ("pre", "post", "mix"):
            assert not getattr(maps, f"w_{part}").any()
            assert getattr(maps, f"scale_{part}").item() == pytest.approx(0.01)
