"""GPT-2's tokenizer and others like it, from ranks of byte strings, through `tiktoken`."""

import base64
from collections.abc import Sequence

from .optional import optional
from .tokenizer import Ids, Tokenizer
from .words import WordEncoder

EOT = "<|endoftext|>"
PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


class RanksTokenizer(Tokenizer):
    """Byte-level BPE with GPT-2's pattern from the rank of every token; the end of text is last."""

    kind = "tiktoken"
    file = "tokenizer.tiktoken"

    def __init__(self, ranks: dict[bytes, int], name: str) -> None:
        check_ranks(ranks, name)
        super().__init__(name, len(ranks) + 1, len(ranks))
        self.ranks = ranks
        tiktoken = optional("tiktoken", "data", f"the tokenizer {name!r}")
        self._inner = tiktoken.Encoding(
            name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={EOT: self.eot}
        )
        encode = self._inner.encode_ordinary
        self._words = WordEncoder(lambda words: [encode(w) for w in words], self.pack)

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> "RanksTokenizer":
        ranks = {}
        for number, line in enumerate(data.splitlines(), 1):
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError as error:
                raise ValueError(
                    f"{name} line {number} is not a token in base64 and its rank."
                ) from error
        return cls(ranks, name)

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        known = ((text, self._words(text)) for text in texts)
        return [
            self.pack(self._inner.encode_ordinary(text)) if ids is None else self.unpack(ids)
            for text, ids in known
        ]

    def decode(self, ids: Sequence[int] | Ids) -> str:
        return str(self._inner.decode([int(i) for i in ids]))

    def to_bytes(self) -> bytes:
        by_rank = sorted(self.ranks.items(), key=lambda item: item[1])
        lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in by_rank)
        return b"".join(lines)


def check_ranks(ranks: dict[bytes, int], name: str) -> None:
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"the ranks of {name} must be the numbers from 0 on, each once.")
    missing = [i for i in range(256) if bytes([i]) not in ranks]
    if missing:
        raise ValueError(
            f"{name} has no rank for the byte {missing[0]}: it cannot encode any text."
        )


def download_gpt2() -> dict[bytes, int]:
    tiktoken = optional("tiktoken", "data", "the tokenizer 'gpt2'")
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except OSError as error:
        raise OSError(
            "the ranks of the tokenizer gpt2 are fetched from the network the first time, and it "
            "cannot be reached: give a .tiktoken or tokenizer.json file instead, or set "
            "TIKTOKEN_CACHE_DIR to a folder that holds them."
        ) from error
    return dict(encoding._mergeable_ranks)
