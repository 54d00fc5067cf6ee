"""A trained run on the tasks of EleutherAI's evaluation harness (`lm_eval`)."""

from .command import score_tasks

__all__ = ["score_tasks"]
