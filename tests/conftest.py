import os
import shutil
from collections import Counter

import pytest
import torch

# Without a GPU the Triton kernels run in Triton's interpreter, if it is asked for before they are
# defined.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The tensors of the tests are small: one thread is as fast, and `-n auto` has the other cores.
torch.set_num_threads(1)


BROWSER_FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        # What runs in Triton's interpreter elsewhere belongs to `-m gpu` here.
        for item in items:
            if getattr(item.module, "DEVICE", None) == "cuda":
                item.add_marker("gpu")
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter):
    """Say what was skipped and why, a line for each reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.items():
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.fixture(scope="module")
def browser():
    """The machine's Chromium, without a window."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    missing = "" if found else "no Chromium was found: install the package chromium"
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        missing = missing or "playwright is missing: pip install playwright"
    if missing and os.environ.get("MULTIGATE_NEEDS_BROWSER"):
        pytest.fail(f"The page was not opened: {missing}.")
    if missing:
        pytest.skip(f"The page was not opened: {missing}.")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=BROWSER_FLAGS)
        new_context = opened.new_context

        def patient(**options):
            # On a busy machine a page takes longer than the half minute that is usual.
            context = new_context(**options)
            context.set_default_timeout(120_000)
            return context

        opened.new_context = patient
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Prepared text as bytes."""
    from runs import prepared

    return prepared(tmp_path_factory.mktemp("prose"))


@pytest.fixture(scope="session")
def every(data, tmp_path_factory):
    """A folder with a short run of every residual."""
    import multigate as mg
    from runs import run, small

    out = tmp_path_factory.mktemp("every")
    for name in mg.residual_names():
        run(small(data, out, name=name, residual=name, steps=2, model={"blocks": 3}))
    return out


@pytest.fixture(scope="module")
def bpe_run(tmp_path_factory):
    """The folder of a run over a BPE whose 300 ids are fewer than the rows of the embedding."""
    from runs import prepared, run, small

    folder = tmp_path_factory.mktemp("bpe")
    config = small(prepared(folder, "bpe:300"), folder / "runs", name="bpe", residual="hc")
    run(config)
    return config.folder
