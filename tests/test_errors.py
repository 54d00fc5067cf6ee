"""Bad input: one clear sentence that says what is wrong and what to do."""

import re

import pytest
import torch

import multigate as mg

SENTENCES = {
    "unknown residual": (
        lambda: mg.build_residual("mgr-competetive", 8, 4),
        "unknown residual 'mgr-competetive': did you mean 'mgr-competitive'?",
    ),
    "unknown residual in Stack": (
        lambda: mg.Stack([abs], residual="prenom", dim=8),
        "unknown residual 'prenom': did you mean 'prenorm'?",
    ),
    "unknown residual in GPT": (
        lambda: mg.GPT(mg.preset("tiny", residual="atnres-full")),
        "did you mean 'attnres-full'?",
    ),
    "unknown preset": (lambda: mg.preset("tinny"), "unknown preset 'tinny': did you mean 'tiny'?"),
    "unknown setting": (
        lambda: mg.preset("s", contxt=3),
        "unknown GPT setting 'contxt': did you mean 'context'?",
    ),
    "unknown option": (
        lambda: mg.build_residual("highway", 8, 4, gates="vector"),
        "unknown option of highway 'gates': did you mean 'gate'?",
    ),
    "unknown value": (
        lambda: mg.build_residual("highway", 8, 4, gate="vectr"),
        "unknown highway gate 'vectr': did you mean 'vector'?",
    ),
    "unknown bias": (
        lambda: mg.build_residual("mgr-independent", 8, 9, 2, bias_init="calibrate"),
        "unknown bias_init 'calibrate': did you mean 'calibrated'?",
    ),
    "unknown variant": (
        lambda: mg.MultiGateResidual(8, 2, "competetive"),
        "unknown gate variant 'competetive': did you mean 'competitive'?",
    ),
    "unknown attention": (lambda: mg.preset("s", attention="mod"), "did you mean 'moda'?"),
    "unknown stream dtype": (lambda: mg.preset("s", stream_dtype="bf16"), "unknown stream_dtype"),
    "no streams": (
        lambda: mg.build_residual("mgr-competitive", 8, 4, streams=0),
        "mgr-competitive: streams must be a whole number of at least 1, got 0.",
    ),
    "no streams in hc": (lambda: mg.build_residual("hc", 8, 4, streams=-1), "at least 1, got -1"),
    "no streams in mhc-lite": (
        lambda: mg.build_residual("mhc-lite", 8, 4, streams=0),
        "at least 1, got 0",
    ),
    "no streams in mhc": (lambda: mg.build_residual("mhc", 8, 4, streams=0), "at least 1, got 0"),
    "no blocks": (
        lambda: mg.build_residual("attnres-block", 8, 4, streams=0),
        "streams must be a whole number of at least 1",
    ),
    "streams in the listing": (lambda: mg.MultiGateResidual(8, 0), "n_stream=0"),
    "half a stream": (lambda: mg.build_residual("hc", 8, 4, streams=1.5), "whole number"),
    "no depth": (lambda: mg.Stack([], "prenorm", dim=8), "depth must be a whole number"),
    "streams of a single-stream residual": (
        lambda: mg.build_residual("prenorm", 8, 4, streams=2),
        "prenorm takes no number of streams: leave streams=2 out.",
    ),
    "too many permutations": (
        lambda: mg.build_residual("mhc-lite", 8, 4, streams=8),
        "8! = 40,320 of them are too many: use at most 5 streams, or mhc",
    ),
    "too many blocks": (
        lambda: mg.build_residual("attnres-block", 8, 4, streams=5),
        "cannot cut 4 sublayers into 5 blocks",
    ),
    "bias without a value": (
        lambda: mg.build_residual("mgr-competitive", 8, 24, streams=16),
        "at most 14 streams, or more than 24 streams, where nothing is gated.",
    ),
    "period": (
        lambda: mg.build_residual("denseformer", 8, 4, period=0),
        "period must be at least 1",
    ),
    "no dim": (lambda: mg.Stack([abs], "prenorm"), "Stack needs dim"),
    "residual of another depth": (
        lambda: mg.Stack([abs], mg.build_residual("prenorm", 8, 4)),
        "built for 4 sublayers, got 1",
    ),
    "width of x": (
        lambda: mg.build_residual("prenorm", 8, 4).start(torch.zeros(3, 7)),
        "prenorm: x must have 8 numbers in its last dimension, got shape (3, 7).",
    ),
    "x without dimensions": (
        lambda: mg.build_residual("prenorm", 8, 4).start(torch.tensor(1.0)),
        "got shape ()",
    ),
    "width of y": (
        lambda: step(mg.build_residual("hc", 8, 4), torch.zeros(3, 7)),
        "hc: the output of sublayer 0 must have 8 numbers in its last dimension",
    ),
    "shape of y": (
        lambda: mg.Stack([lambda h: h[:1]], "prenorm", 8)(torch.zeros(3, 8)),
        "sublayer 0 turned shape (3, 8) into (1, 8)",
    ),
    "tokens instead of embeddings": (
        lambda: mg.build_residual("prenorm", 8, 4).start(torch.zeros(3, 8, dtype=torch.long)),
        "x must be floating point, got torch.int64: embed tokens first.",
    ),
    "integer y": (
        lambda: step(mg.build_residual("prenorm", 8, 4), torch.zeros(3, 8, dtype=torch.int)),
        "the output of sublayer 0 must be floating point",
    ),
    "x on another device than the residual": (
        lambda: mg.build_residual("hc", 8, 4).start(torch.zeros(3, 8, device="meta")),
        "hc: x is on meta but the residual is on cpu: move one of them with .to(device).",
    ),
    "y on another device than the state": (
        lambda: step(mg.build_residual("prenorm", 8, 4), torch.zeros(3, 8, device="meta")),
        "the output of sublayer 0 is on meta but the state is on cpu",
    ),
    "step that is not there": (
        lambda: step(mg.build_residual("prenorm", 8, 4), torch.zeros(3, 8), i=4),
        "step 4 does not exist, there are steps 0 to 3.",
    ),
    "skipping a growth step": (
        lambda: step(mg.build_residual("mgr-competitive", 8, 4, 3), None),
        "sublayer 0 cannot be skipped, its output becomes a stream itself.",
    ),
    "gate_pool bias": (
        lambda: pool(bias=torch.zeros(3)),
        "with 3 streams of width 8 and the competitive gate needs bias of shape (4,), got (3,).",
    ),
    "gate_pool y": (lambda: pool(y=torch.zeros(2, 9)), "needs y of shape (2, 8), got (2, 9)."),
    "gate_pool streams": (
        lambda: pool(streams=torch.zeros(8)),
        "needs streams of shape [..., n, D], got (8,).",
    ),
    "depth_pool without sources": (
        lambda: mg.ops.depth_pool([], torch.zeros(8)),
        "needs at least one source",
    ),
    "depth_pool sources of two shapes": (
        lambda: mg.ops.depth_pool([torch.zeros(2, 8), torch.zeros(3, 8)], torch.zeros(8)),
        "sources of one shape, got (2, 8) and (3, 8).",
    ),
    "depth_pool query": (
        lambda: mg.ops.depth_pool([torch.zeros(2, 8)], torch.zeros(7)),
        "needs a query of 8 numbers, got (7,).",
    ),
    "GPT heads": (lambda: mg.preset("s", heads=7), "width 768 cannot be 7 heads of even size"),
    "GPT size": (lambda: mg.preset("s", blocks=0), "blocks must be at least 1, got 0"),
    "GPT input": (
        lambda: mg.GPT(mg.preset("tiny"))(torch.zeros(1, 4)),
        "GPT needs token ids of shape [batch, positions], got torch.float32",
    ),
    "GPT context": (
        lambda: mg.GPT(mg.preset("tiny"))(torch.zeros(1, 257, dtype=torch.long)),
        "257 tokens are more than this model's context of 256",
    ),
}


def step(residual, y, i=0):
    _, state = residual.start(torch.zeros(3, 8))
    return residual.step(i, y, state)


def pool(**changes):
    arguments = {
        "y": torch.zeros(2, 8),
        "streams": torch.zeros(2, 3, 8),
        "w_gate": torch.zeros(8),
        "w_pool": torch.zeros(8),
        "bias": torch.zeros(4),
    }
    return mg.ops.gate_pool(**{**arguments, **changes})


@pytest.mark.parametrize("what", SENTENCES)
def test_one_clear_sentence(what):
    provoke, sentence = SENTENCES[what]
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        provoke()
    assert "\n" not in str(error.value)
