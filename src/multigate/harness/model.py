"""A run as the harness's model, with a bar that shows how far it is."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.progress import Progress

from .notes import Notes, quiet
from .tasks import needed

DTYPES = {"fp32": None, "bf16": "bfloat16", "fp16": "float16"}


def harness_model(
    model: Any, tokenizer: Any, batch: int, precision: str, progress: Progress
) -> Any:
    """The harness's own adapter for models of Transformers, `HFLM`, watched while it works.

    Windows, padding, few-shot prompts, log-likelihoods and stop texts are all the harness's.
    """

    class Watched(needed("lm_eval.models.huggingface").HFLM):  # type: ignore[misc]
        def loglikelihood(
            self, requests: Sequence[Any], **options: Any
        ) -> list[tuple[float, bool]]:
            with self._bar("likelihoods of answers", len(requests)):
                answers = super().loglikelihood(requests, **options)
            check_numbers(value for value, _ in answers)
            return answers

        def loglikelihood_rolling(self, requests: Sequence[Any], **options: Any) -> list[float]:
            # How many windows the texts have is not known before they are tokenized.
            with self._bar("likelihoods of texts", None):
                values = super().loglikelihood_rolling(requests, **options)
            check_numbers(values)
            return values

        def generate_until(self, requests: Sequence[Any], **options: Any) -> list[str]:
            with self._bar("written answers", len(requests)):
                return super().generate_until(requests, **options)

        def _loglikelihood_tokens(self, requests: Sequence[Any], **options: Any) -> Any:
            longest = max((len(answer) for _, _, answer in requests), default=0)
            if longest > self.max_length:
                raise ValueError(
                    f"an answer of {longest} tokens is longer than the model's context of "
                    f"{self.max_length}: leave its task out, or train with a larger context."
                )
            # Answers that follow the same tokens share a pass, but of those with different lengths
            # lm_eval 0.4.13 reads the shorter ones from the wrong places.
            self.logits_cache = not split_in_two_ways(requests)
            return super()._loglikelihood_tokens(requests, **options)

        def _model_call(self, inps: Any, *rest: Any, **options: Any) -> Any:
            logits = super()._model_call(inps, *rest, **options)
            progress.advance(progress.task_ids[-1], len(inps))
            return logits

        def _model_generate(self, context: Any, **options: Any) -> Any:
            tokens = super()._model_generate(context, **options)
            progress.advance(progress.task_ids[-1], len(context))
            return tokens

        @contextmanager
        def _bar(self, what: str, total: int | None) -> Iterator[None]:
            bar = progress.add_task(what, total=total)
            yield
            # Answers of one token each share a pass, so that there are fewer passes than answers.
            progress.update(bar, completed=total)

    # It warns of every model that is given to it as an object.
    with quiet(Notes()):
        return Watched(
            pretrained=model,
            backend="causal",
            tokenizer=tokenizer,
            batch_size=batch,
            mixed_precision_dtype=DTYPES[precision],
            # Of bf16 logits the harness would take the softmax in bf16.
            softmax_dtype="float32",
        )


def split_in_two_ways(requests: Sequence[Any]) -> bool:
    """Whether the model would see the same tokens for answers of different lengths."""
    lengths = dict[tuple[int, ...], int]()
    return any(
        lengths.setdefault((*question, *answer[:-1]), len(answer)) != len(answer)
        for _, question, answer in requests
    )


def check_numbers(values: Iterator[float] | Sequence[float]) -> None:
    if any(math.isnan(value) for value in values):
        raise ValueError(
            "the model's log-likelihoods are not finite: the weights are damaged, or training "
            "went astray; choose another checkpoint."
        )
