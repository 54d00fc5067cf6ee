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
    "minus one stream": (lambda: mg.build_residual("mhc", 8, 4, streams=-1), "got -1."),
    "half a permutation": (lambda: mg.build_residual("mhc-lite", 8, 4, streams=1.5), "got 1.5."),
    "blocks as text": (lambda: mg.build_residual("attnres-block", 8, 4, streams="4"), "got '4'."),
    "half a depth": (lambda: mg.build_residual("attnres-full", 8, 1.5), "depth must be a whole"),
    "no Sinkhorn step": (
        lambda: mg.build_residual("mhc", 8, 4, sinkhorn_steps=0),
        "sinkhorn_steps must be at least 1, got 0.",
    ),
    "misspelt bias without a gate": (
        lambda: mg.build_residual("mgr-competitive", 8, 4, 9, bias_init="papper"),
        "did you mean 'paper'?",
    ),
    "options of a residual that is built": (
        lambda: mg.Stack([abs], mg.build_residual("prenorm", 8, 1), streams=9),
        "Stack was given a residual that is built already",
    ),
    "a name that is taken": (
        lambda: mg.register_residual("prenorm"),
        "the residual 'prenorm' exists already: choose another name.",
    ),
    "norm_then_sum without a norm": (
        lambda: mg.Stack([torch.tanh], "hc", 8, norm_then_sum=True)(torch.zeros(3, 8)),
        "hand it to the last step, or to Stack as out_norm.",
    ),
    "a sublayer that returns nothing": (
        lambda: mg.Stack([lambda h: None], "prenorm", 8)(torch.zeros(3, 8)),
        "sublayer 0 returned NoneType",
    ),
    "another batch": (
        lambda: step(mg.build_residual("prenorm", 8, 4), torch.zeros(5, 3, 8)),
        "must have the shape of x, (3, 8), got (5, 3, 8).",
    ),
    "another batch in the streams": (
        lambda: step(mg.build_residual("hc", 8, 4), torch.zeros(1, 8)),
        "must have the shape of x, (3, 8), got (1, 8).",
    ),
    "another batch in the gates": (
        lambda: step(mg.build_residual("mgr-competitive", 8, 4, 1), torch.zeros(8)),
        "must have the shape of x, (3, 8), got (8,).",
    ),
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
        "the output of sublayer 0 must have the shape of x, (3, 8), got (1, 8).",
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
    "gate_pool norm": (lambda: pool(norm_weight=torch.zeros(7)), "norm_weight of shape (8,)"),
    "gate_pool integers": (
        lambda: pool(y=torch.zeros(2, 8, dtype=torch.long)),
        "gate_pool: y must be floating point, got torch.int64.",
    ),
    "gate_pool devices": (
        lambda: pool(w_pool=torch.zeros(8, device="meta")),
        "gate_pool: w_pool is on meta but streams is on cpu",
    ),
    "gate_pool streams": (
        lambda: pool(streams=torch.zeros(8)),
        "needs streams of shape [..., n, D], got (8,).",
    ),
    "gate_pool no streams": (
        lambda: pool(streams=torch.zeros(2, 0, 8), bias=torch.zeros(1)),
        "gate_pool needs streams with numbers, got (2, 0, 8).",
    ),
    "depth_pool without a width": (
        lambda: mg.ops.depth_pool([torch.zeros(2, 0)], torch.zeros(0)),
        "depth_pool needs sources of shape [..., D], got (2, 0).",
    ),
    "depth_pool scalars": (
        lambda: mg.ops.depth_pool([torch.tensor(1.0)], torch.zeros(1)),
        "depth_pool needs sources of shape [..., D], got ().",
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
        "depth_pool: the query must have 8 numbers, got (7,).",
    ),
    "depth_pool norm": (
        lambda: mg.ops.depth_pool(
            [torch.zeros(2, 8)], torch.zeros(8), norm_weight=torch.zeros(2, 8)
        ),
        "depth_pool: norm_weight must have 8 numbers",
    ),
    "depth_pool integers": (
        lambda: mg.ops.depth_pool([torch.zeros(2, 8, dtype=torch.int)], torch.zeros(8)),
        "depth_pool: source 0 must be floating point",
    ),
    "depth_pool devices": (
        lambda: mg.ops.depth_pool([torch.zeros(2, 8)], torch.zeros(8, device="meta")),
        "depth_pool: the query is on meta but source 0 is on cpu",
    ),
    "GPT half a block": (lambda: mg.preset("s", blocks=2.5), "got 2.5."),
    "GPT devices": (
        lambda: mg.GPT(mg.preset("tiny"))(torch.zeros(1, 4, dtype=torch.long, device="meta")),
        "the token ids are on meta but the GPT is on cpu: move one of them with .to(device).",
    ),
    "GPT targets": (
        lambda: mg.GPT(mg.preset("tiny"))(
            torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long)
        ),
        "GPT needs a target for every token, got (1, 3) targets for (1, 4) tokens.",
    ),
    "GPT heads": (lambda: mg.preset("s", heads=7), "width 768 cannot be 7 heads of even size"),
    "GPT size": (
        lambda: mg.preset("s", blocks=0),
        "blocks must be a whole number of at least 1, got 0",
    ),
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
