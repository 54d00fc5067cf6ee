"""The tables and the script of docs/pipeline.md."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import multigate as mg
from multigate.pipeline import boundary_table, state_before

DOCUMENT = Path(__file__).parent.parent / "docs" / "pipeline.md"


def test_the_table_of_the_document_is_what_the_code_prints():
    names = mg.residual_names()[:10]
    table = boundary_table(names)
    assert table in DOCUMENT.read_text()
    command = [sys.executable, "-m", "multigate.pipeline"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kept = [line for line in printed.splitlines() if not is_row_of(line, mg.residual_names()[10:])]
    assert kept == table.splitlines()


def is_row_of(line, names):
    return any(line.startswith(f"| `{name}` |") for name in names)


@pytest.mark.parametrize("scale", ["s", "l"])
def test_the_table_counts_what_would_be_sent(scale):
    """The bytes of one token at half the depth, from tensors of the real width and dtype."""
    config, names = mg.preset(scale), mg.residual_names()[:10]
    _, *parts = boundary_table(names).split("Scale ")
    (part,) = (part for part in parts if part.startswith(scale.upper()))
    rows = dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", part, re.MULTILINE))
    assert list(rows) == names
    for name, row in rows.items():
        with torch.device("meta"):
            residual = mg.build_residual(name, config.width, 2 * config.blocks)
            x = torch.zeros(1, 1, config.width, dtype=torch.bfloat16)
        sent = residual.handover(config.blocks, *state_before(residual, config.blocks, x))
        size = sum(t.numel() * t.element_size() for t in sent)
        cells = row.split(" | ")
        assert (cells[1], cells[4]) == (f"{size:,}", f"{size * 32 * 1024 / 1e6:,.1f}")


@pytest.mark.slow
def test_the_script_of_the_document_trains_as_one_process_does(tmp_path):
    text = DOCUMENT.read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (command,) = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "train_pipeline.py").write_text(script)
    torchrun, *arguments = command.split()
    assert torchrun == "torchrun"
    run = [sys.executable, "-m", "torch.distributed.run", *arguments]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = dict(line.split() for line in done.stdout.splitlines())
    torch.manual_seed(0)
    model = mg.GPT(mg.preset("tiny", residual="mgr-competitive"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        tokens = torch.randint(256, (8, 65))
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert float(found[str(step)]) == pytest.approx(loss.item(), rel=1e-5)
