"""Small studies of `multigate repro`, for its tests."""

from dataclasses import replace

from multigate.repro import queue, worker
from multigate.repro.command import repro
from multigate.repro.config import ReproConfig
from runs import prepared, quiet, write_documents

RECIPE = """
tokens_per_step = 128
eval_every = 6
save_every = 100
eval_tokens = 512
device = "cpu"
[model]
blocks = 2
width = 32
heads = 2
context = 32
"""
ROWS = ("prenorm", "attnres-full", "mgr-competitive-4", "highway")


def text(folder):
    """Prepared text with a test split."""
    test = write_documents(folder / "apart", count=20)
    return prepared(folder, test=(str(test),))


def study(data, place, **changes):
    """A table of four rows, two seeds and 12 steps of a model of two blocks."""
    place.mkdir(parents=True, exist_ok=True)
    file = place / "recipe.toml"
    file.write_text(RECIPE)
    config = ReproConfig(
        "table1",
        data=str(data),
        out=place / "kept",
        runs=place / "runs",
        seeds=(0, 1),
        rows=ROWS,
        steps=12,
        config=(file,),
    )
    return replace(config, **changes)


def here(monkeypatch):
    """Let the runs of a queue be worked on one after the other in this process."""

    def drain(self, jobs):
        for job in jobs:
            if self.clock.over():
                return
            job.write()
            try:
                assert worker.work(worker.Job.read(job.config.folder / "job.json")) == 0
                outcome = queue.Outcome(job, "finished", 0.0)
            except (ValueError, ArithmeticError) as error:
                worker.keep_failure(job, worker.sentence(error))
                outcome = queue.Outcome(job, "failed", 0.0, worker.sentence(error))
            self.ended(outcome)

    monkeypatch.setattr(queue.Queue, "drain", drain)


def reproduce(config):
    """The study quietly: what came of it, and what was shown."""
    console = quiet()
    done = repro(config, console)
    return done, console.file.getvalue()
