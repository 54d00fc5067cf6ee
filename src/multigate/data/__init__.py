"""Text to tokens on disk (`prepare`), and tokens on disk to batches (`open_data`, `Loader`)."""

from .loader import Loader
from .prepare import PrepareConfig, prepare
from .shards import Split, TokenData, open_data

__all__ = ["Loader", "PrepareConfig", "Split", "TokenData", "open_data", "prepare"]
