"""The initial bias of Multi-Gate Residuals' gates."""

import math


def gate_bias_init(
    lerp_depth: int, streams: int, base_depth: int = 21, base_bias: float = -3.0
) -> float:
    """The paper's b_init for `lerp_depth` gated steps and n = `streams`:

        b = ln( sqrt(lerp_depth / base_depth) * (exp(-base_bias) + 1) - n )

    The competitive gate starts with the carry logit b_0 = b (so beta = 1 / (n + e^b), the sigmoid
    of `base_bias` scaled by sqrt(base_depth / lerp_depth)); the independent gate with all biases
    -b.
    """
    if lerp_depth < 1 or streams < 1:
        raise ValueError(
            "gate_bias_init needs at least one lerp step and one stream, got "
            f"lerp_depth={lerp_depth} and streams={streams}."
        )

    def margin(n: int, steps: int) -> float:
        return math.sqrt(steps / base_depth) * (math.exp(-base_bias) + 1) - n

    value = margin(streams, lerp_depth)
    if value <= 0:
        depth = lerp_depth + streams - 1
        allowed = [n for n in range(1, depth + 1) if margin(n, depth + 1 - n) > 0]
        largest = f"at most {allowed[-1]} streams" if allowed else "no gated step at all"
        raise ValueError(
            f"the initial gate bias has no value for {streams} streams over {depth} sublayers (the "
            f"paper's formula takes the logarithm of {value:.3g}): this depth allows {largest}, or "
            f"more than {depth} streams, where nothing is gated."
        )
    return math.log(value)
