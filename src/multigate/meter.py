"""How fast a run goes: tokens a second, share of the device's peak (MFU), memory."""

import time

from .device import Compute, flops_per_token, memory
from .gpt import GPT


class Meter:
    """Time between steps; what is not a step is left out with `pause`."""

    def __init__(self, model: GPT, compute: Compute, processes: int) -> None:
        self.device = compute.device
        peak = compute.peak_flops()
        flops = flops_per_token(model.config, model.parameter_count())
        self._per_token = flops / peak / processes if peak is not None else None
        self._smooth = 0.0
        self._last = time.perf_counter()

    def step(self, tokens: int) -> float:
        """A step has ended: its tokens a second."""
        now = time.perf_counter()
        speed = tokens / (now - self._last)
        self._last = now
        # The first step compiles and warms up: the second one's speed is the first to count.
        self._smooth = speed if self._smooth < 0.2 * speed else 0.9 * self._smooth + 0.1 * speed
        return speed

    def pause(self) -> None:
        """The time since the last step belongs to something else."""
        self._last = time.perf_counter()

    def shown(self) -> dict[str, str]:
        """For the progress line."""
        shown = {"tok/s": f"{self._smooth:,.0f}"}
        if self._per_token is not None:
            shown["MFU"] = f"{self._smooth * self._per_token:.0%}"
        most = memory(self.device)
        if most is not None:
            shown["mem"] = f"{most / 2**30:.1f} GiB"
        return shown
