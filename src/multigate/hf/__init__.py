"""multigate in Hugging Face Transformers; importing this makes its models known to AutoModel."""

from typing import Any

from .classes import register
from .run import from_gpt, from_run
from .saved import to_gpt
from .wrap import with_residual

__all__ = [
    "MultigateConfig",
    "MultigateForCausalLM",
    "from_gpt",
    "from_run",
    "to_gpt",
    "with_residual",
]

register()


def __getattr__(name: str) -> Any:
    """The classes that need Transformers, when they are first asked for."""
    if name in ("MultigateConfig", "MultigateForCausalLM"):
        from multigate.data.optional import optional

        optional("transformers", "hf", f"multigate.hf.{name}")
        from . import config, model

        return getattr(config if name == "MultigateConfig" else model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
