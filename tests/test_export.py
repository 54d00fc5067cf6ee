"""`multigate export` and the way back: a run in Transformers, with and without multigate."""

import ast
import base64
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

import multigate as mg
from multigate.__main__ import main
from multigate.checkpoint import open_run
from multigate.data.bpe import JsonTokenizer
from multigate.data.ranks import RanksTokenizer
from multigate.data.tokenizer import ByteTokenizer, Tokenizer, make_tokenizer
from multigate.evaluate import load_model
from multigate.log import read_log
from plain import by_autograd
from runs import document, losses, prepared, run, small

hf = pytest.importorskip("transformers", reason="multigate.hf needs the package transformers")
from transformers import dynamic_module_utils  # noqa: E402

from multigate.hf import MultigateForCausalLM, from_gpt, from_run, to_gpt  # noqa: E402
from multigate.hf.bundle import MARK, bundle  # noqa: E402
from multigate.hf.tokenizer import to_transformers  # noqa: E402

hf.utils.logging.disable_progress_bar()
TEXTS = [
    "the gate decides, don't it?\n\n   And\tthen   ",
    "na\u00efve \u20ac5, \u65e5\u672c\u8a9e, \U0001d11e and e\u0301 \u0100\u0120\u00ad\u00a0",
    "deci",
    "ends <|endoftext|> early </s> <unk>",
    "\x00\x01\x7f\r\n\u2028 12345 '' 're ",
    "x = {'a': [1, 2.5e-3]}  # aaaaaaaaaaaaaaaaaaaa",
]
FILES = {
    *("README.md", "config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json"),
}


def ranks():
    """A tokenizer of tiktoken's kind: bytes, then merges as they would be learnt."""
    words = ["th", "the", " t", " the", "ga", "gat", "gate", " g", "aa", "aaa", "aaaa", "  ", "   "]
    words += ["\n\n", " re", "re", "res", "'t", "don", "\u00e6", "\u65e5", "deci", "cid"]
    tokens = [bytes([i]) for i in range(256)]
    tokens += [t for t in dict.fromkeys(word.encode() for word in words) if t not in tokens]
    lines = (base64.b64encode(t) + b" %d\n" % rank for rank, t in enumerate(tokens))
    return RanksTokenizer.from_bytes(b"".join(lines), "small.tiktoken")


def bpe():
    return make_tokenizer("bpe:300", lambda: [document(n) for n in range(1, 20)])


def with_beginning():
    """A tokenizer.json that would put a token before every text."""
    spec = json.loads(bpe().to_bytes())
    inner = tokenizers.Tokenizer.from_str(json.dumps(spec))
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
    )
    return JsonTokenizer(inner, "with <s>", "</s>")


def metaspace():
    words = {"<eos>": 0, "\u2581one": 1, "\u2581two": 2, "\u2581three": 3, "s": 4}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="s"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    inner.decoder = tokenizers.decoders.Metaspace()
    return JsonTokenizer(inner, "words")


@pytest.mark.parametrize("make", [ByteTokenizer, bpe, ranks, with_beginning, metaspace])
def test_a_tokenizer_gives_the_same_ids_and_the_same_text(make, tmp_path):
    ours = make()
    to_transformers(ours, 64).save_pretrained(tmp_path)
    theirs = hf.AutoTokenizer.from_pretrained(tmp_path)
    generator = random.Random(0)
    letters = "the gatd'n\n  1\u00e9\u20ac\u0100"
    mixed = ["".join(generator.choices(letters, k=generator.randint(1, 30))) for _ in range(200)]
    for text in (*TEXTS, *mixed, document(3)):
        expected = ours.encode_batch([text])[0].tolist()
        assert theirs(text)["input_ids"] == expected, repr(text)
        assert theirs.decode(expected) == ours.decode(expected)
    special = {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    for _ in range(300):
        ids = [generator.randrange(ours.vocab_size) for _ in range(generator.randint(1, 12))]
        assert theirs.decode(ids) == ours.decode(ids)
        assert theirs.decode([*ids, ours.eot], skip_special_tokens=True) == ours.decode(
            [i for i in ids if i not in special]
        )
    assert theirs.eos_token_id == theirs.bos_token_id == theirs.pad_token_id == ours.eot
    assert theirs.model_max_length == 64
    batch = theirs([document(1, 3), document(2, 9)], padding=True, return_tensors="pt")
    assert batch["attention_mask"][0, 0] == 0, "padding is not on the left"


def test_a_tokenizer_that_cannot_be_expressed_is_one_sentence():
    with pytest.raises(ValueError, match="a Tokenizer cannot be written as a tokenizer.json"):
        to_transformers(Tokenizer("other", 4, 0), 8)


def test_an_end_of_text_that_is_a_word_is_warned_of():
    words = [("<eos>", 0.0), ("\u2581", -1.0), ("a", -1.0), ("<", -5.0), (">", -5.0)]
    words += [(c, -5.0) for c in "eos"]
    inner = tokenizers.Tokenizer(tokenizers.models.Unigram(words, unk_id=1))
    with pytest.warns(UserWarning, match="where a text contains '<eos>'"):
        to_transformers(JsonTokenizer(inner, "unigram"), 8)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The folder of a run over bytes, with a context of 32."""
    config = small(data, tmp_path_factory.mktemp("runs"), name="bytes", keep=5)
    run(config)
    return config.folder


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "model"
    assert main(["export", str(trained), str(out)]) == 0
    return out


def test_export_says_one_line(trained, tmp_path, capsys):
    """And shows no bars of Transformers, which has them again afterwards."""
    hf.utils.logging.enable_progress_bar()
    try:
        assert main(["export", str(trained), str(tmp_path / "out")]) == 0
        assert hf.utils.logging.is_progress_bar_enabled()
    finally:
        hf.utils.logging.disable_progress_bar()
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.count("\n") == 1


def tokens(count=2, length=20):
    return torch.randint(1, 256, (count, length), generator=torch.Generator().manual_seed(0))


def test_a_run_as_a_model_and_a_tokenizer(trained, data):
    model, tokenizer = from_run(trained, "last")
    assert type(model) is MultigateForCausalLM
    assert not model.training
    path, state = open_run(trained, "last")
    assert torch.equal(model(tokens()).logits, load_model(path, state).eval()(tokens()))
    assert tokenizer("the")["input_ids"] == [116, 104, 101]
    first = sorted((trained / "checkpoints").iterdir())[0]
    assert not torch.equal(from_run(str(first))[0](tokens()).logits, model(tokens()).logits)
    assert torch.equal(
        from_run(trained, data=data)[0](tokens()).logits, load_model(*open_run(trained))(tokens())
    )
    with pytest.raises(ValueError, match="which must be best or last, got 'newest'"):
        from_run(trained, "newest")
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        from_run(data)


def test_an_exported_folder_holds_this(exported, trained):
    code = {f.name for f in exported.glob("*.py")}
    assert {f.name for f in exported.iterdir()} == FILES | code
    assert code == set(bundle(mg.build_residual("mgr-competitive", 8, 4)))
    modes = {f.stat().st_mode for f in exported.iterdir()}
    assert len(modes) == 1, "some files can be read by fewer people than others"
    card = (exported / "README.md").read_text()
    state = open_run(trained)[1]
    (val,) = [r for r in read_log(trained, "val") if r["step"] == state["step"]]
    for said in (
        "residual | mgr-competitive, streams 4",
        "| parameters | 33,093 |",
        f"| val loss | {val['loss']:.4f} nats a token, at step {val['step']} |",
        f"| val bits per byte | {val['bits_per_byte']:.4f} |",
        f"| trained for | {state['step']} steps, {state['step'] * 128:,} tokens of data |",
        "bytes, 256 ids of a vocabulary of 256",
    ):
        assert said in card
    assert str(trained.parent) not in card, "where it was trained is nobody's business"
    generation = json.loads((exported / "generation_config.json").read_text())
    assert generation["eos_token_id"] == generation["pad_token_id"] == 0


def test_the_card_says_how_to_use_it(exported, monkeypatch):
    """With multigate; without, see below."""
    monkeypatch.chdir(exported.parent)
    with_multigate = (exported / "README.md").read_text().split("```python\n")[2].split("```")[0]
    names = {}
    exec(with_multigate, names)
    assert type(names["model"]) is MultigateForCausalLM
    assert names["tokenizer"].decode([116]) == "t"


def test_the_page_on_transformers(trained, data, tmp_path, monkeypatch):
    """Every block of it in turn; the commands on a smaller model."""
    page = (Path(__file__).parent.parent / "docs/transformers.md").read_text()
    found = re.findall(r"^```(bash|python)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in found] == ["bash", *["python"] * 5, "bash"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    shutil.copytree(trained, tmp_path / "runs/first")
    shutil.copytree(data, tmp_path / "data/python")
    sizes = "--model.blocks 2 --model.width 32 --model.heads 2 --model.context 32 --steps 1"
    names = {}
    for kind, text in found:
        if kind == "python":
            exec(text, names)
            continue
        words = text.split()
        assert words.pop(0) == "multigate"
        more = f"{sizes} --tokens-per-step 128 --device cpu" if words[0] == "train" else ""
        assert main([*words, *more.split()]) == 0
    assert len(names["text"]) == 2
    files = {row.split("`")[1] for row in re.findall(r"^\| `.*", page, re.MULTILINE)[:6]}
    assert files <= {f.name for f in (tmp_path / "first").iterdir()}
    assert (tmp_path / "runs/second/checkpoints/step-00000001").exists()
    counts = [len(bundle(mg.build_residual(name, 8, 6))) for name in mg.residual_names()]
    assert f"({min(counts)} to {max(counts)} of them" in page


def test_with_multigate_no_code_of_the_folder_runs(exported, trained, tmp_path):
    shutil.copytree(exported, tmp_path / "model")
    for file in (tmp_path / "model").glob("*.py"):
        file.write_text("raise SystemExit('code of the folder was run')")
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(model) is MultigateForCausalLM
    assert torch.equal(model(tokens()).logits, to_gpt(exported).eval()(tokens()))
    writer = hf.pipeline("text-generation", model=str(tmp_path / "model"))
    ours = mg.generate(model.model, [[116, 104, 101]], 8, temperature=0)[0]
    text = writer("the", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    assert text == ByteTokenizer().decode(ours.tolist())
    # Saved again, it does not promise code that is not there.
    model.save_pretrained(tmp_path / "again")
    assert "auto_map" not in json.loads((tmp_path / "again/config.json").read_text())


WITHOUT = """
import os
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("multigate", "tyro"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
root = Path(sys.argv[1])
ids = load_file(root / "ids.safetensors")["ids"]
found = {}
for folder in sorted(p for p in root.iterdir() if p.is_dir()):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    found[folder.name] = model(ids).logits.detach()
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    found[folder.name + " loss"] = loss.detach()
    model.eval().save_pretrained(root / folder.name / "again")
writer = pipeline("text-generation", model=str(root / "mgr-competitive"), trust_remote_code=True)
print(writer("the", max_new_tokens=8, do_sample=False)[0]["generated_text"].encode())
print([len(t[0]["generated_text"].encode()) > 32 for t in writer(["the gate", "a"], batch_size=2)])
again = AutoModelForCausalLM.from_pretrained(
    root / "mgr-competitive" / "again", trust_remote_code=True
)
assert torch.equal(again(ids).logits, found["mgr-competitive"])
os.chdir(root)
exec((root / "mgr-competitive" / "README.md").read_text().split("```python\\n")[1].split("```")[0])
save_file(found, root / "found.safetensors")
"""


@pytest.fixture(scope="module")
def code_cache(tmp_path_factory):
    """Where Transformers copies the code of models to."""
    folder = str(tmp_path_factory.mktemp("code"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", folder)
        patch.syspath_prepend(folder)
        yield folder


@pytest.mark.parametrize("residual", mg.residual_names())
def test_the_code_of_the_folder_computes_the_same(residual, tmp_path, code_cache):
    """The code that travels, run in this process: logits and gradients to the bit, where ours are
    autograd's as its are."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "blocks": 2, "width": 16, "heads": 2, "context": 32}
    ours = from_gpt(mg.GPT(mg.GPTConfig(**sizes, residual=residual, attention="moda-ffn")))
    with torch.no_grad():
        for p in ours.parameters():
            p += 0.1 * torch.randn_like(p)
    ours.save_pretrained(tmp_path)
    for name, text in bundle(ours.model.stack.residual).items():
        (tmp_path / name).write_text(text)
    found = dynamic_module_utils.get_class_from_dynamic_module(
        "modeling_multigate.MultigateForCausalLM", str(tmp_path)
    )
    assert found is not MultigateForCausalLM
    theirs = found.from_pretrained(tmp_path)
    assert not any(
        k.startswith("multigate.") for k in (type(m).__module__ for m in theirs.modules())
    )
    ids = tokens()
    with by_autograd():
        for model in (ours, theirs):
            model.train()(ids, labels=ids).loss.backward()
    assert torch.equal(theirs(ids).logits, ours(ids).logits)
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.slow
def test_every_residual_without_multigate(every, tmp_path):
    """Trained, exported, loaded where multigate cannot be imported: the same logits to the bit."""
    for name in mg.residual_names():
        assert main(["export", str(every / name), str(tmp_path / name)]) == 0
    ids = tokens(2, 20)
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    environment = {**os.environ, "HF_HOME": str(tmp_path.parent / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = load_file(tmp_path / "found.safetensors")
    for name in mg.residual_names():
        model = load_model(*open_run(every / name))
        assert torch.equal(found[name], model(ids)), name
        loss = model(ids[:, :-1], ids[:, 1:]).item()
        assert found[f"{name} loss"].item() == pytest.approx(loss, rel=1e-6)
    model = load_model(*open_run(every / "mgr-competitive")).eval()
    text = ByteTokenizer().decode(mg.generate(model, [list(b"the")], 8, temperature=0)[0].tolist())
    assert done.stdout.splitlines()[0] == str(text.encode())


@pytest.mark.parametrize("residual", mg.residual_names())
def test_transformers_finds_every_file_of_the_code(residual, tmp_path):
    files = bundle(mg.build_residual(residual, 8, 6))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        assert text.startswith(MARK)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 1 or node.module.split(".")[0] != "multigate"
                assert node.level <= 1
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("multigate") for alias in node.names)
    model = tmp_path / "modeling_multigate.py"
    found = {
        *map(os.path.basename, dynamic_module_utils.get_relative_import_files(model)),
        model.name,
    }
    assert found == set(files)
    # Other residuals stay at home.
    assert len([f for f in files if f.startswith("residuals_")]) <= 6
    assert not any("triton" in f or "cuda" in f for f in files)


def test_a_residual_from_elsewhere_is_one_sentence():
    class Other(mg.Residual):
        name = "other"

    with pytest.raises(ValueError, match="the residual 'other' is defined in test_export, outside"):
        bundle(Other(4, 2))


def test_ids_that_pad_the_vocabulary_are_never_written(bpe_run, tmp_path):
    out = tmp_path / "bpe"
    assert main(["export", str(bpe_run), str(out)]) == 0
    model = hf.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = hf.AutoTokenizer.from_pretrained(out)
    assert (len(tokenizer), model.config.vocab_size) == (300, 384)
    with torch.no_grad():
        # Every id that pads becomes far likelier than any other.
        normed = model.model.stack(
            model.model.embed(torch.tensor([[5]])),
            (model.model.rope_cos[:1], model.model.rope_sin[:1]),
        )
        model.model.embed.weight[300:] = 50 * normed[0, 0].sign()
        assert model(torch.tensor([[5]])).logits[0, -1].argmax() >= 300
    start = torch.tensor([[5], [9]])
    for settings in (
        {"do_sample": False},
        {"do_sample": True},
        {"num_beams": 3},
        {"generation_config": hf.GenerationConfig(do_sample=True, top_k=5)},
    ):
        torch.manual_seed(0)
        text = model.generate(start, max_new_tokens=12, **settings)
        assert text.max() < 300, settings


def test_save_and_go_on_training_by_the_trainers_own_command(trained, exported, data, tmp_path):
    """Export -> AutoModel -> save_pretrained -> `multigate train --init`, to the bit."""
    model = hf.AutoModelForCausalLM.from_pretrained(exported)
    assert torch.equal(model(tokens()).logits, from_run(trained, "best")[0](tokens()).logits)
    model.save_pretrained(tmp_path / "saved", max_shard_size="50KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    with torch.no_grad():
        model.model.embed.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "changed")
    flags = [
        *("--data", data, "--out", tmp_path / "runs", "--device", "cpu", "--steps", 3),
        *("--tokens-per-step", 128, "--eval-every", 3, "--eval-tokens", 512),
        *("--model.blocks", 2, "--model.width", 32, "--model.heads", 2, "--model.context", 32),
        *("--optim.warmup", 3, "--resume", "never"),
    ]
    logs = {}
    for name, init in {
        "new": [],
        "run": ["--init", trained],
        "exported": ["--init", exported],
        "saved": ["--init", tmp_path / "saved"],
        "changed": ["--init", tmp_path / "changed"],
    }.items():
        assert main(list(map(str, ["train", *flags, *init, "--name", name]))) == 0
        logs[name] = [r["loss"] for r in read_log(tmp_path / "runs" / name)]
    assert logs["exported"] == logs["saved"] == logs["run"]
    assert logs["run"][0] < logs["new"][0] - 0.5
    assert logs["changed"][0] != logs["run"][0]


def test_weights_for_another_model_or_tokenizer_are_one_sentence(exported, data, tmp_path):
    other = prepared(tmp_path / "bpe", "bpe:300", count=10)
    with pytest.raises(ValueError, match="trained with another tokenizer"):
        run(small(other, tmp_path / "runs", init=exported))
    with pytest.raises(ValueError, match="another architecture .residual mgr-competitive -> hc"):
        run(small(data, tmp_path / "runs", init=exported, residual="hc"))
    broken = tmp_path / "broken"
    shutil.copytree(exported, broken)
    table = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**table, "blocks": "two"}))
    with pytest.raises(ValueError, match="config.json: the setting blocks .* got 'two'"):
        run(small(data, tmp_path / "runs", init=broken))


def test_data_prepared_with_an_exported_tokenizer_fits(bpe_run, tmp_path):
    """Who has nothing but the exported folder can train on."""
    out = tmp_path / "bpe"
    assert main(["export", str(bpe_run), str(out)]) == 0
    again = prepared(tmp_path / "again", str(out / "tokenizer.json"), count=20)
    config = small(again, tmp_path / "runs", residual="hc", init=out, steps=1)
    first = losses(config)[0]
    new = losses(small(again, tmp_path / "runs", name="new", residual="hc", steps=1))[0]
    assert first < new - 0.5


@pytest.mark.slow
def test_a_new_run_does_not_wait_for_transformers(data, tmp_path):
    """It takes seconds to import, and only `--init` may need it."""
    code = """
import sys
from multigate.__main__ import main
assert main(sys.argv[1:]) == 0
assert "multigate.session" in sys.modules
assert "transformers" not in sys.modules
"""
    flags = ["--data", data, "--out", tmp_path, "--device", "cpu", "--steps", 1]
    flags += ["--tokens-per-step", 256, "--eval-tokens", 256, "--model.blocks", 1]
    done = subprocess.run(
        [sys.executable, "-c", code, "train", *map(str, flags)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_damaged_weights_are_one_sentence_for_the_trainer(exported, data, tmp_path):
    shutil.copytree(exported, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(ValueError, match="are damaged: copy or export them once more"):
        run(small(data, tmp_path / "runs", init=tmp_path / "model"))


def names(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_a_folder_that_is_not_empty_is_left_alone(trained, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    command = ["export", str(trained), str(out)]
    assert main(command) == 1
    assert "is not empty: name another folder" in capsys.readouterr().err
    assert main([*command, "--overwrite", "True"]) == 1
    assert "holds no earlier export to overwrite" in capsys.readouterr().err
    assert names(tmp_path) == ["out", "out/mine.txt"]
    (out / "mine.txt").unlink()
    assert main(command) == 0
    whole = names(tmp_path)
    (out / "residuals_old.py").write_text(f"{MARK} from an older version.\n")
    assert main(command) == 1
    assert main([*command, "--overwrite", "True"]) == 0
    assert names(tmp_path) == whole
    (out / "notes.py").write_text("# mine\n")
    assert main([*command, "--overwrite", "True"]) == 1
    assert "holds notes.py, which this export would not write" in capsys.readouterr().err
    assert names(tmp_path) == sorted([*whole, "out/notes.py"])
    assert main(["export", str(trained), str(out / "config.json")]) == 1
    assert "is a file: name a folder" in capsys.readouterr().err


def test_nothing_is_left_of_an_export_that_fails(trained, exported, tmp_path, monkeypatch, capsys):
    full = OSError(28, "No space left on device")

    def fails(*_, **__):
        raise full

    out = tmp_path / "deep" / "out"
    shutil.copytree(exported, tmp_path / "old")
    before = {f.name: f.read_bytes() for f in (tmp_path / "old").iterdir()}
    monkeypatch.setattr(hf.PreTrainedTokenizerFast, "save_pretrained", fails)
    assert main(["export", str(trained), str(out)]) == 1
    assert "cannot be written (No space left on device)" in capsys.readouterr().err
    assert names(tmp_path / "deep") == []
    assert main(["export", str(trained), str(tmp_path / "old"), "--overwrite", "True"]) == 1
    monkeypatch.undo()
    # And where the last step of all fails.
    rename = type(out).rename

    def not_into_place(path, target):
        if ".new-" in path.name:
            raise full
        return rename(path, target)

    monkeypatch.setattr(type(out), "rename", not_into_place)
    assert main(["export", str(trained), str(tmp_path / "old"), "--overwrite", "True"]) == 1
    assert {f.name: f.read_bytes() for f in (tmp_path / "old").iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "old"]


def test_an_interrupted_export_leaves_nothing(trained, tmp_path, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(hf.PreTrainedTokenizerFast, "save_pretrained", stopped)
    assert main(["export", str(trained), str(tmp_path / "out")]) == 130
    assert names(tmp_path) == []


def test_a_tokenizer_beyond_the_vocabulary_is_one_sentence(trained, tmp_path):
    path, state = open_run(trained)
    torch.manual_seed(0)
    small_model = mg.GPT(mg.GPTConfig(**{**state["model"], "vocab_size": 128}))
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    save_file(small_model.state_dict(), folder / "model.safetensors")
    changed = {**state, "model": {**state["model"], "vocab_size": 128}}
    (folder / "state.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="has 256 ids, more than the vocabulary of 128"):
        from_run(folder)


def test_what_cannot_be_exported_is_one_sentence(data, tmp_path, capsys, monkeypatch):
    assert main(["export", str(data), str(tmp_path / "out")]) == 1
    assert "holds no checkpoint" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["export", str(data), str(tmp_path / "out")]) == 1
    assert "needs the package transformers: pip install 'multigate[hf]'" in capsys.readouterr().err
    assert names(tmp_path) == []
