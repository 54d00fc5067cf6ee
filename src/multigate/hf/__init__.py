"""multigate in Hugging Face Transformers; importing this makes its models known to AutoModel."""

from .classes import register
from .wrap import with_residual

__all__ = ["with_residual"]

register()
