"""`multigate eval --tasks`: the harness's scores are those of the model, computed by hand."""

import io
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
from rich.console import Console

import multigate as mg
from multigate.__main__ import main
from multigate.checkpoint import checkpoints, open_run
from multigate.data import open_data
from multigate.evaluate import EvalConfig, load_model
from runs import quiet, run, small

lm_eval = pytest.importorskip("lm_eval", reason="eval --tasks needs the package lm_eval")
pytest.importorskip("accelerate", reason="eval --tasks needs the package accelerate")
import datasets  # noqa: E402

from multigate.harness import score_tasks  # noqa: E402
from multigate.harness.notes import Notes  # noqa: E402
from multigate.harness.notes import quiet as hushed  # noqa: E402
from multigate.harness.scores import as_json  # noqa: E402

CHOICES = ["norm", "the old", "stream reads it", "s"]
QUESTIONS = [
    "the gate opens",
    "a deep network grows with every layer that writes into it",
    "norms",
    "attention reads the stream and keeps",
    "x",
]
TEXTS = ["a gate", "the residual stream of a deep network " * 3, "norms stay bounded while " * 2]
PROMPTS = ["the gate", "a", "the residual stream of a deep network grows with every layer"]
WRITTEN = 8


def write_task(folder, name, documents, lines):
    """A task as its author would write it: a .yaml file, and the data beside it."""
    folder.mkdir(exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    head = f"task: {name}\ndataset_path: json\ntest_split: test\n"
    head += f"dataset_kwargs:\n  data_files:\n    test: {data}\n"
    (folder / f"{name}.yaml").write_text(head + lines)


def write_tasks(folder):
    write_task(
        folder,
        "choose",
        [{"q": q, "options": CHOICES, "answer": n % 4} for n, q in enumerate(QUESTIONS)],
        'output_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: "{{options}}"\n'
        "doc_to_target: answer\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n",
    )
    write_task(
        folder,
        "read",
        [{"text": text} for text in TEXTS],
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list:\n  - metric: bits_per_byte\n  - metric: byte_perplexity\n",
    )
    write_task(
        folder,
        "write",
        [{"q": prompt, "a": "e"} for prompt in PROMPTS],
        'output_type: generate_until\ndoc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\n'
        f'generation_kwargs:\n  until: ["t"]\n  max_gen_toks: {WRITTEN}\n'
        "metric_list:\n  - metric: exact_match\n",
    )
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """What `datasets` keeps goes with the test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("eval") / "tasks")


@pytest.fixture(scope="module")
def bytes_run(data, tmp_path_factory):
    """Over bytes, with a context of 32; trained well enough not to be indifferent."""
    config = small(data, tmp_path_factory.mktemp("runs"), name="bytes", steps=40, save_every=20)
    run(config)
    return config.folder


@pytest.fixture
def trained(request):
    return request.getfixturevalue(request.param)


both = pytest.mark.parametrize("trained", ["bytes_run", "bpe_run"], indirect=True)


def scored(folder, tasks, *names, **options):
    """The record, and what was asked and answered: for each task a list of documents."""
    settings = {"device": "cpu", "task_folder": tasks, "samples": True, **options}
    record = score_tasks(EvalConfig(folder, tasks=names, **settings), quiet())
    newest = max((folder / "evals").glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
    assert json.loads(newest.read_text())["results"] == record["results"]
    answers = {}
    for name in names if options.get("samples", True) else ():
        lines = newest.with_name(f"{newest.stem}-{name}.jsonl").read_text().splitlines()
        answers[name] = [json.loads(line) for line in lines]
    return record, answers


class ByHand:
    """The GPT of a run and its own tokenizer, one prefix at a time."""

    def __init__(self, folder):
        path, state = open_run(folder)
        self.model, self.context = load_model(path, state).eval(), state["model"]["context"]
        self.tokenizer = open_data(Path(state["data"])).tokenizer()

    def ids(self, text):
        return self.tokenizer.encode_batch([text])[0].tolist()

    @torch.no_grad()
    def log_probability(self, before, token):
        before = torch.tensor([before[-self.context :]])
        return self.model(before)[0, -1].log_softmax(-1)[token].item()

    def answer(self, question, answer):
        """Of the tokens that the answer adds; what does not fit is cut off on the left, once."""
        whole, begin = self.ids(question + answer), len(self.ids(question))
        whole, cut = whole[-self.context - 1 :], max(0, len(whole) - self.context - 1)
        places = range(begin - cut, len(whole))
        return sum(self.log_probability(whole[:place], whole[place]) for place in places)

    def text(self, text):
        """Every token once, in windows that see a full context from the second on."""
        ids, total, done = self.ids(text), 0.0, 0
        while done < len(ids):
            end = min(done + self.context, len(ids))
            begin = max(0, end - self.context - 1)
            for place in range(done, end):
                before = ids[begin:place] if done else [self.tokenizer.eot, *ids[:place]]
                total += self.log_probability(before, ids[place])
            done = end
        return total

    def written(self, prompt, count, stop):
        ids = self.ids(prompt)[-(self.context - count) :]
        (row,) = mg.generate(self.model, [ids], count, temperature=0, stop=[self.tokenizer.eot])
        new = [token for token in row.tolist()[len(ids) :] if token != self.tokenizer.eot]
        return self.tokenizer.decode(new).split(stop)[0]


@both
@pytest.mark.parametrize("batch", [1, 3])
def test_choices_are_those_of_the_model(trained, batch, tasks):
    hand = ByHand(trained)
    record, answers = scored(trained, tasks, "choose", batch=batch)
    right, right_by_length = 0, 0
    for number, (question, asked) in enumerate(zip(QUESTIONS, answers["choose"], strict=True)):
        values = [hand.answer(question, f" {choice}") for choice in CHOICES]
        assert [pair[0] for ((pair,),) in zip(asked["resps"], strict=True)] == pytest.approx(
            values, abs=1e-4
        )
        right += max(range(4), key=values.__getitem__) == number % 4
        by_length = [v / len(choice) for v, choice in zip(values, CHOICES, strict=True)]
        right_by_length += max(range(4), key=by_length.__getitem__) == number % 4
    assert record["results"]["choose"]["acc,none"] == pytest.approx(right / 5)
    assert record["results"]["choose"]["acc_norm,none"] == pytest.approx(right_by_length / 5)
    longest = len(hand.ids(f"{QUESTIONS[1]} {CHOICES[2]}"))
    assert (longest > hand.context + 1) == bool(record["notes"])


@both
def test_texts_are_read_in_windows(trained, tasks):
    hand = ByHand(trained)
    record, answers = scored(trained, tasks, "read", batch=2)
    values = [hand.text(text) for text in TEXTS]
    assert len(hand.ids(TEXTS[1])) > hand.context
    assert [asked["resps"][0][0] for asked in answers["read"]] == pytest.approx(values, abs=1e-3)
    size = sum(len(text.encode()) for text in TEXTS)
    expected = -sum(values) / size / math.log(2)
    assert record["results"]["read"]["bits_per_byte,none"] == pytest.approx(expected, abs=1e-5)


def test_the_same_text_split_in_two_ways(bytes_run, tmp_path):
    """Where answers of different lengths follow the same tokens, each is still its own."""
    write_task(
        tmp_path,
        "split",
        [{"q": "a gate", "options": [" a", " reads"]}, {"q": "a gate rea", "options": ["ds", "x"]}],
        'output_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: "{{options}}"\n'
        'doc_to_target: 0\ntarget_delimiter: ""\n',
    )
    repeated = "the residual stream " * 6
    write_task(
        tmp_path,
        "repeated",
        [{"text": repeated}],
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n',
    )
    hand = ByHand(bytes_run)
    _, answers = scored(bytes_run, tmp_path, "split", "repeated", batch=64)
    for asked in answers["split"]:
        for pair, ((value, _),) in zip(asked["arguments"], asked["resps"], strict=True):
            assert value == pytest.approx(hand.answer(*pair), abs=1e-4)
    value = answers["repeated"][0]["resps"][0][0]
    assert value == pytest.approx(hand.text(repeated), abs=1e-3)


@both
def test_what_is_written_is_what_generate_writes(trained, tasks):
    hand = ByHand(trained)
    _, answers = scored(trained, tasks, "write", batch=3)
    expected = [hand.written(prompt, WRITTEN, "t") for prompt in PROMPTS]
    assert [asked["resps"][0][0] for asked in answers["write"]] == expected
    assert any(expected)
    _, answers = scored(trained, tasks, "write", new_tokens=3)
    expected = [hand.written(prompt, 3, "t") for prompt in PROMPTS]
    assert [asked["resps"][0][0] for asked in answers["write"]] == expected


def test_examples_are_shown_before_the_question(bytes_run, tasks):
    """By the rules and the seed of the harness's own command."""
    record, answers = scored(bytes_run, tasks, "choose", shots=2, limit=2)
    assert record["n-shot"] == {"choose": 2}
    assert record["n-samples"]["choose"] == {"original": 5, "effective": 2}
    hand = ByHand(bytes_run)
    for asked in answers["choose"]:
        prompt = asked["arguments"][0][0]
        assert prompt.count("\n\n") == 2
        assert prompt.endswith(asked["doc"]["q"])
        assert asked["resps"][0][0][0] == pytest.approx(hand.answer(prompt, " norm"), abs=1e-4)
    assert len(record["notes"]) == 1
    assert "exceeds model's maximum length (32)" in record["notes"][0]
    assert "(and 7 more like this)" in record["notes"][0]


def harness_alone(folder, tasks, names, **options):
    """The harness on a folder of Transformers, as its own command would."""
    from lm_eval.tasks import TaskManager

    import multigate.hf  # noqa: F401

    with hushed(Notes()):
        return lm_eval.simple_evaluate(
            "hf",
            model_args={"pretrained": str(folder), "device": "cpu"},
            tasks=list(names),
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            **options,
        )


@both
def test_the_scores_are_those_of_the_harness_on_the_saved_model(trained, tasks, tmp_path):
    from multigate.hf import from_run

    for part in from_run(trained, "best"):
        part.save_pretrained(tmp_path)
    names = ("choose", "read", "write")
    options = {"batch_size": 2, "num_fewshot": 1, "limit": 4}
    expected = harness_alone(tmp_path, tasks, names, **options)
    record, answers = scored(trained, tasks, *names, batch=2, shots=1, limit=4)
    assert record["results"] == expected["results"]
    for name in names:
        for ours, theirs in zip(answers[name], expected["samples"][name], strict=True):
            assert ours["prompt_hash"] == theirs["prompt_hash"]
            assert ours["resps"] == json.loads(json.dumps(theirs["resps"]))


def test_every_residual(every, tasks):
    for name in mg.residual_names():
        _, answers = scored(every / name, tasks, "choose", limit=1)
        value = ByHand(every / name).answer(QUESTIONS[0], f" {CHOICES[2]}")
        assert answers["choose"][0]["resps"][2][0][0] == pytest.approx(value, abs=1e-4)


def test_lower_precision_is_near(bytes_run, tasks, tmp_path):
    """Logits may be of bf16, but not their softmax."""
    exact, _ = scored(bytes_run, tasks, "read")
    rough, _ = scored(bytes_run, tasks, "read", precision="bf16")
    one, other = (r["results"]["read"]["bits_per_byte,none"] for r in (exact, rough))
    assert one != other
    assert one == pytest.approx(other, rel=1e-2)
    assert (exact["settings"]["precision"], rough["settings"]["precision"]) == ("fp32", "bf16")
    letters = [{"q": "a gat", "options": list("abcdefgh")}]
    write_task(
        tmp_path,
        "letters",
        letters,
        'output_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: "{{options}}"\n'
        'doc_to_target: 4\ntarget_delimiter: ""\n',
    )
    _, answers = scored(bytes_run, tmp_path, "letters", precision="bf16")
    values = torch.tensor([value for ((value, _),) in answers["letters"][0]["resps"]])
    assert (values.bfloat16().float() != values).any()


def test_which_checkpoint(bytes_run, tasks, tmp_path):
    copy = shutil.copytree(bytes_run, tmp_path / "run", ignore=shutil.ignore_patterns("evals"))
    for path, loss in zip(checkpoints(copy), (1.0, 2.0), strict=True):
        state = json.loads((path / "state.json").read_text())
        (path / "state.json").write_text(json.dumps({**state, "val_loss": loss}))
    steps = [
        scored(copy, tasks, "read", samples=False, **chosen)[0]["step"]
        for chosen in ({}, {"checkpoint": "last"})
    ]
    assert steps[0] < steps[1] == state["step"]
    record, _ = scored(copy, tasks, "read", samples=False, checkpoint="last")
    again = score_tasks(EvalConfig(path, tasks=("read",), task_folder=tasks, device="cpu"), quiet())
    assert again["results"] == record["results"]
    assert len(list((copy / "evals").iterdir())) == 4


def test_examples_that_a_task_wants_itself(bytes_run, tasks, tmp_path):
    """A number in the task gives way to the flag, but not a zero."""
    mine = shutil.copytree(tasks, tmp_path / "tasks")
    for name, number in (("none", 0), ("three", 3)):
        lines = f"include: choose.yaml\ntask: {name}\nnum_fewshot: {number}\n"
        (mine / f"{name}.yaml").write_text(lines)
    names = ("none", "three", "choose")
    for shots, expected in ((None, (0, 3, 0)), (1, (0, 1, 1)), (0, (0, 0, 0))):
        record, answers = scored(bytes_run, mine, *names, shots=shots, limit=1)
        for name, count in zip(names, expected, strict=True):
            assert record["n-shot"][name] == count
            assert answers[name][0]["arguments"][0][0].count("\n\n") == count


def test_groups_tags_and_patterns(bytes_run, tasks, tmp_path):
    mine = shutil.copytree(tasks, tmp_path / "tasks")
    for name in ("choose", "read"):
        file = mine / f"{name}.yaml"
        file.write_text(file.read_text() + "tag: plain\n")
    (mine / "both.yaml").write_text(
        "group: both\ntask:\n  - choose\n  - write\naggregate_metric_list:\n"
        "  - metric: acc\n    filter_list: none\n    weight_by_size: true\n"
    )
    single, _ = scored(bytes_run, mine, "choose", samples=False)
    record, _ = scored(bytes_run, mine, "both", samples=False)
    assert set(record["results"]) == {"both", "choose", "write"}
    accuracy = single["results"]["choose"]["acc,none"]
    assert record["groups"]["both"]["acc,none"] == pytest.approx(accuracy)
    record, _ = scored(bytes_run, mine, "plain", samples=False)
    assert set(record["results"]) == {"choose", "read"}
    record, _ = scored(bytes_run, mine, "*e*", "write", samples=False, limit=1)
    assert record["settings"]["tasks"] == ["choose", "read", "write"]


def test_the_command_shows_a_table_and_keeps_a_file(bytes_run, tasks, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    flags = ["--tasks", "choose", "read", "--task-folder", str(tasks), "--device", "cpu"]
    before = set((bytes_run / "evals").glob("*"))
    assert main(["eval", str(bytes_run), *flags, "--batch", "2"]) == 0
    shown = capsys.readouterr()
    (file,) = set((bytes_run / "evals").glob("*")) - before
    record = json.loads(file.read_text())
    assert shown.out.splitlines()[-1] == f"Kept in {file}"
    assert shown.err == ""
    for word in ("choose", "acc_norm", "bits_per_byte", "\u2191", "\u2193", "documents"):
        assert word in shown.out
    assert f"{record['results']['choose']['acc,none']:.4f}" in shown.out
    assert f"{record['results']['read']['bits_per_byte,none']:.4f}" in shown.out
    path, state = open_run(bytes_run)
    assert record["checkpoint"] == str(path)
    assert file.name.startswith(path.name)
    assert (record["step"], record["model"]) == (state["step"], state["model"])
    assert record["settings"] == {
        **{"tasks": ["choose", "read"], "shots": None, "limit": None, "new_tokens": None},
        **{"batch": 2, "device": "cpu", "precision": "fp32", "context": 32},
    }
    assert record["versions"]["lm_eval"] == lm_eval.__version__
    assert record["versions"]["multigate"] == mg.__version__
    assert record["configs"]["choose"]["output_type"] == "multiple_choice"
    assert record["higher_is_better"]["read"]["bits_per_byte"] is False


def test_one_line_of_json(bytes_run, tasks, capsys):
    flags = ["--task-folder", str(tasks), "--device", "cpu", "--json", "True", "--limit", "1"]
    assert main(["eval", str(bytes_run), "--tasks", "write", *flags]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 1
    assert shown.err == ""
    line = json.loads(shown.out)
    assert json.loads(Path(line["file"]).read_text())["results"] == line["results"]


def test_what_json_does_not_know_is_written_all_the_same():
    """A metric may return numbers of numpy, and a task's settings hold functions."""
    content = {"a": np.int64(3), "b": np.bool_(True), "c": {2, 1}, "d": len, "e": np.float32(0.5)}
    read = json.loads(as_json(content))
    assert read.pop("d") == str(len)
    assert read == {"a": 3, "b": True, "c": [1, 2], "e": 0.5}


def test_no_evaluation_takes_the_place_of_another(bytes_run, tasks, tmp_path):
    """Also in the same second, and of a checkpoint that stands alone."""
    path, _ = open_run(bytes_run, "last")
    alone = shutil.copytree(path, tmp_path / "alone")
    for count in (1, 2, 3):
        scored(alone, tasks, "write", limit=1, samples=False)
        assert len(list((alone / "evals").glob("alone-*.json"))) == count


def test_a_bar_on_a_terminal(bytes_run, tasks):
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=120)
    config = EvalConfig(bytes_run, tasks=("choose", "write"), task_folder=tasks, device="cpu")
    score_tasks(config, terminal)
    assert "likelihoods of answers" in out.getvalue()
    assert "20/20" in out.getvalue()
    assert "written answers" in out.getvalue()


def said(capsys, *arguments, status=1):
    try:
        returned = main(["eval", *map(str, arguments)])
    except SystemExit as stopped:
        returned = stopped.code
    shown = capsys.readouterr()
    assert returned == status
    assert shown.out == ""
    assert "Traceback" not in shown.err
    if status == 1:
        assert shown.err.count("\n") == 1
    return " ".join(shown.err.replace("\u2502", "").split())


@pytest.mark.parametrize(
    ("flags", "status", "sentence"),
    [
        (["--tasks"], 2, "--tasks needs the name of a task."),
        (["--shots", "2"], 2, "--shots is for tasks: name some with --tasks."),
        (["--task-folder", "."], 2, "--task-folder is for tasks: name some with --tasks."),
        (["--tasks", "a", "--tokens", "9"], 2, "--tokens is for held-out text, not with --tasks."),
        (["--tasks", "a", "--split", "test"], 2, "--split is for held-out text, not with --tasks."),
        (["--tasks", "a", "--limit", "0"], 2, "limit must be at least 1, got 0."),
        (["--tasks", "a", "--shots", "-1"], 2, "shots must be at least 0, got -1."),
        (["--tasks", "a", "--new-tokens", "0"], 2, "new_tokens must be at least 1, got 0."),
        (["--tasks", "a", "--task-folder", "gone"], 1, "there is no folder gone to take tasks"),
        (["--tasks", "write", "--new-tokens", "32"], 1, "the task write lets the model write 32"),
        (["--tasks", "choose", "--shots", "9"], 1, "has fewer examples to show than asked for"),
        (["--tasks", "write", "--data", "gone"], 1, "gone holds no prepared data"),
        (["--tasks", "write", "--device", "cuda"], 1, "this machine has no cuda device"),
    ],
)
def test_what_is_wrong_with_the_flags(flags, status, sentence, bytes_run, tasks, capsys):
    if flags[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("it has one")
    folder = ["--task-folder", tasks] if status == 1 and "--task-folder" not in flags else []
    assert sentence in said(capsys, bytes_run, *flags, *folder, status=status)


BROKEN = {
    "unreadable": ("{", "unknown task 'broken'"),
    "no data": (
        "task: broken\ndataset_path: json\ntest_split: test\ndataset_kwargs:\n"
        "  data_files: {test: nowhere.jsonl}\n",
        "the task broken cannot be loaded (FileNotFoundError: Unable to find",
    ),
    "hub": (
        "task: broken\ndataset_path: somebody/something\ntest_split: test\n",
        "the task broken needs its dataset from the Hugging Face Hub, which cannot be reached",
    ),
    "no such split": ("include: choose.yaml\ntask: broken\ntest_split: none\n", "KeyError"),
    "no such field": (
        'include: choose.yaml\ntask: broken\ndoc_to_text: "{{nothing}}"\n',
        "UndefinedError: 'nothing' is undefined",
    ),
    "code": ("include: write.yaml\ntask: broken\nunsafe_code: true\n", "runs code that the model"),
    "no length": (
        "include: write.yaml\ntask: broken\ngeneration_kwargs: {until: [x]}\n",
        "the task broken lets the model write 256 tokens, which leaves no room",
    ),
    "long answer": (
        f'include: choose.yaml\ntask: broken\ndoc_to_choice: ["a", "{"long " * 9}"]\n',
        "an answer of 46 tokens is longer than the model's context of 32",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_wrong_with_a_task(kind, bytes_run, tasks, tmp_path, capsys, monkeypatch):
    lines, sentence = BROKEN[kind]
    mine = shutil.copytree(tasks, tmp_path / "tasks")
    (mine / "broken.yaml").write_text(lines)
    before = sorted((bytes_run / "evals").glob("*"))
    if kind == "unreadable":
        stand_in_for_the_defaults(monkeypatch)
    error = said(capsys, bytes_run, "--tasks", "broken", "--task-folder", mine, "--device", "cpu")
    assert sentence in error
    if kind == "unreadable":
        assert f"{mine} has choose, read, write (not understood: broken.yaml)." in error
    assert sorted((bytes_run / "evals").glob("*")) == before


def stand_in_for_the_defaults(monkeypatch):
    """Looking through all tasks of the harness takes ten seconds: let it have three."""
    from lm_eval.tasks import TaskManager

    def make(manager, include_path=None, include_defaults=True):
        original(manager, include_path=include_path, include_defaults=False)
        if include_defaults:
            manager._all_tasks = sorted([*manager._all_tasks, "hellaswag", "lambada", "piqa"])

    original = TaskManager.__init__
    monkeypatch.setattr(TaskManager, "__init__", make)


def test_an_unknown_task(bytes_run, tasks, tmp_path, capsys, monkeypatch):
    stand_in_for_the_defaults(monkeypatch)
    error = said(capsys, bytes_run, "--tasks", "helaswag")
    assert "unknown task 'helaswag': did you mean hellaswag? `lm_eval ls tasks` lists" in error
    error = said(capsys, bytes_run, "--tasks", "choose", "zzz", "--task-folder", tasks)
    assert (
        f"unknown task 'zzz': `lm_eval ls tasks` lists those of the harness; {tasks} has" in error
    )
    (tmp_path / "notes.yaml").write_text("a: b\n")
    error = said(capsys, bytes_run, "--tasks", "a", "--task-folder", tmp_path)
    assert f"{tmp_path} holds no task" in error
    assert "(not understood: notes.yaml)" in error


def test_a_group_may_name_tasks_of_the_harness(tasks, tmp_path, monkeypatch):
    """Then those are looked through; otherwise the folder is enough."""
    from multigate.harness.tasks import find_tasks

    stand_in_for_the_defaults(monkeypatch)
    mine = shutil.copytree(tasks, tmp_path / "tasks")
    assert "hellaswag" not in find_tasks(["choose"], mine)[0].all_tasks
    (mine / "both.yaml").write_text("group: both\ntask: [choose, hellaswag]\n")
    assert "hellaswag" in find_tasks(["both"], mine)[0].all_tasks


@pytest.mark.slow
def test_tasks_of_the_harness_need_the_hub(bytes_run, capsys):
    error = said(capsys, bytes_run, "--tasks", "hellaswag", "--device", "cpu")
    assert "the task hellaswag needs its dataset from the Hugging Face Hub" in error
    assert "Rowan/hellaswag" in error


@pytest.mark.parametrize("package", ["lm_eval", "accelerate", "transformers"])
def test_without_the_packages(package, bytes_run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    error = said(capsys, bytes_run, "--tasks", "choose")
    assert error == (
        f"multigate: multigate eval --tasks needs the package {package}: "
        "pip install 'multigate[eval]'."
    )


def test_a_tokenizer_that_is_not_the_runs(bytes_run, bpe_run, tasks, capsys):
    other = open_run(bpe_run)[1]["data"]
    flags = ["--tasks", "choose", "--task-folder", tasks, "--data", other, "--device", "cpu"]
    assert "was trained with another tokenizer" in said(capsys, bytes_run, *flags)


def test_weights_that_are_not_finite(bytes_run, tasks, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    path, _ = open_run(shutil.copytree(bytes_run, tmp_path / "run"), "last")
    weights = load_file(path / "model.safetensors")
    weights["embed.weight"][:] = float("nan")
    save_file(weights, path / "model.safetensors")
    for name in ("choose", "read"):
        flags = ["--tasks", name, "--task-folder", tasks, "--device", "cpu"]
        assert "the model's log-likelihoods are not finite" in said(capsys, path, *flags)


def test_scores_that_cannot_be_kept(bytes_run, tasks, tmp_path, capsys, monkeypatch):
    path, _ = open_run(bytes_run, "last")
    alone = shutil.copytree(path, tmp_path / "alone")
    flags = ["--tasks", "choose", "--task-folder", str(tasks), "--device", "cpu"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        assert "the scores cannot be kept in" in said(capsys, alone, *flags)
    (alone / "evals").touch()
    assert main(["eval", str(alone), *flags]) == 1
    shown = capsys.readouterr()
    assert "acc_norm" in shown.out
    assert shown.err.startswith("multigate: the scores could not be kept in")


def test_the_harness_is_quiet_only_while_it_works():
    notes, log = Notes(), logging.getLogger("lm_eval.models.huggingface")
    before = log.handlers, log.propagate, sys.stdout, sys.stderr

    def work():
        print("out")
        print("error", file=sys.stderr)
        for count in range(3):
            log.warning("cut %s", count)
        log.info("detail")
        logging.getLogger("lm_eval.api.task").warning("a default")
        raise KeyError

    with pytest.raises(KeyError), hushed(notes):
        work()
    assert notes.lines() == ["cut 0 (and 2 more like this)"]
    assert (log.handlers, log.propagate, sys.stdout, sys.stderr) == before
    assert logging.getLogger("lm_eval").handlers != [notes]


@pytest.mark.slow
def test_only_the_flag_needs_the_harness(bytes_run):
    """Held-out text is measured where no harness is."""
    code = f"""
import sys
for name in ("lm_eval", "transformers", "accelerate", "datasets"):
    sys.modules[name] = None
import multigate.harness
from multigate.__main__ import main
raise SystemExit(main(["eval", {str(bytes_run)!r}, "--device", "cpu", "--tokens", "64"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "bits per byte" in done.stdout


@pytest.mark.slow
def test_the_harness_s_own_command_on_the_exported_folder(bytes_run, tasks, tmp_path):
    """In a process of its own, where the exported folder brings its own code."""
    place, names = tmp_path / "out", ["choose", "read", "write"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "home")}
    assert main(["export", str(bytes_run), str(place)]) == 0
    flags = ["--model_args", f"pretrained={place}", "--trust_remote_code", "--device", "cpu"]
    flags += ["--tasks", ",".join(names), "--include_path", tasks, "--batch_size", "2"]
    flags += ["--num_fewshot", "1", "--output_path", tmp_path / "scores.json"]
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", *map(str, flags)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    flags = ["--tasks", *names, "--task-folder", str(tasks), "--batch", "2", "--shots", "1"]
    assert main(["eval", str(bytes_run), *flags, "--device", "cpu"]) == 0
    (file,) = tmp_path.glob("scores*.json")
    expected = json.loads(file.read_text())["results"]
    newest = max((bytes_run / "evals").glob("*.json"), key=lambda f: f.stat().st_mtime_ns)
    assert json.loads(newest.read_text())["results"] == expected
    assert len(expected) == 3


def test_the_tasks_of_the_page(bytes_run, tmp_path, monkeypatch, capsys):
    """docs/evaluation.md: its files are written where it says, its command is given."""
    page = (Path(__file__).parent.parent / "docs" / "evaluation.md").read_text()
    files = dict(re.findall(r"`(tasks/\S+)`:\n\n```text\n(.*?)^```", page, re.M | re.S))
    assert set(files) == {"tasks/idioms.yaml", "tasks/idioms.jsonl"}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    (command,) = re.findall(r"^multigate (eval runs/first .*--task-folder.*)$", page, re.M)
    words = command.replace("runs/first", str(bytes_run)).split()
    assert main([*words, "--device", "cpu"]) == 0
    assert "idioms" in capsys.readouterr().out
    _, answers = scored(bytes_run, Path("tasks"), "idioms")
    hand = ByHand(bytes_run)
    asked = answers["idioms"][1]
    assert asked["doc"]["ends"][asked["target"]] == ' "__main__":'
    value = hand.answer("if __name__ ==", ' "__main__":')
    assert asked["resps"][1][0][0] == pytest.approx(value, abs=1e-4)
    for flag in re.findall(r"^\| `(--[a-z-]+)", page, re.M):
        assert flag.removeprefix("--").replace("-", "_") in EvalConfig.__dataclass_fields__
