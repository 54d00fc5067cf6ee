"""Tokenizers of the package `tokenizers`: any tokenizer.json, and byte-level BPEs trained here."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from .optional import optional
from .tokenizer import Ids, Tokenizer
from .words import WordEncoder

EOT = "<|endoftext|>"
EOT_NAMES = (
    *(
        EOT,
        "<|end_of_text|>",
        "</s>",
        "<eos>",
        "<|eos|>",
        "<|im_end|>",
        "<|end|>",
        "[EOS]",
        "[SEP]",
    ),
)
SMALLEST, LARGEST = 257, 1 << 24


class JsonTokenizer(Tokenizer):
    """Any tokenizer.json, without the tokens it would add around a text.

    Its special tokens are ordinary text where they stand in a text. Should the end of text come out
    of a text all the same (a Unigram model may hold it as a word), the text is cut inside the
    token's name and the halves are encoded alone.
    """

    kind = "json"
    file = "tokenizer.json"

    def __init__(self, inner: Any, name: str, eot: str | int | None = None) -> None:
        vocabulary: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        super().__init__(name, max(vocabulary.values()) + 1, find_eot(vocabulary, name, eot))
        inner.no_padding()
        inner.no_truncation()
        inner.encode_special_tokens = True
        self._inner = inner
        self._eot_name: str = inner.id_to_token(self.eot)
        self._words = self._word_encoder()

    @classmethod
    def from_bytes(cls, data: bytes, name: str, eot: str | int | None = None) -> "JsonTokenizer":
        tokenizers = optional("tokenizers", "train", "a tokenizer.json")
        try:
            inner = tokenizers.Tokenizer.from_str(data.decode())
        # The package raises plain exceptions.
        except Exception as error:
            raise ValueError(
                f"{name} is not a tokenizer.json of the package tokenizers ({error})."
            ) from error
        return cls(inner, name, eot)

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        if self._words is None:
            return list(self._encode(texts))
        known = [self._words(text) for text in texts]
        rest = self._encode([t for t, k in zip(texts, known, strict=True) if k is None])
        return [next(rest) if k is None else self.unpack(k) for k in known]

    def decode(self, ids: Sequence[int] | Ids) -> str:
        return str(self._inner.decode([int(i) for i in ids], skip_special_tokens=False))

    def to_bytes(self) -> bytes:
        return str(self._inner.to_str()).encode()

    def _encode(self, texts: list[str]) -> Iterator[Ids]:
        encodings = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        for text, encoding in zip(texts, encodings, strict=True):
            ids = np.array(encoding.ids, dtype=np.int64)
            yield self.pack(self._without_eot(text) if (ids == self.eot).any() else ids)

    def _without_eot(self, text: str) -> list[int]:
        head, tail = self._eot_name[:1], self._eot_name[1:]
        parts = text.split(self._eot_name)
        halves = [tail * (k > 0) + p + head * (k < len(parts) - 1) for k, p in enumerate(parts)]
        encodings = self._inner.encode_batch_fast(halves, add_special_tokens=False)
        return [i for encoding in encodings for i in encoding.ids]

    def _word_encoder(self) -> WordEncoder | None:
        if not splits_like_gpt2(json.loads(self._inner.to_str())):
            return None
        tokenizers = optional("tokenizers", "train", "a tokenizer.json")
        words = tokenizers.Tokenizer.from_str(self._inner.to_str())
        words.encode_special_tokens = True
        words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )

        def encode(new: list[str]) -> list[list[int]]:
            return [e.ids for e in words.encode_batch_fast(new, add_special_tokens=False)]

        return WordEncoder(encode, self.pack)


def find_eot(vocabulary: dict[str, int], name: str, eot: str | int | None) -> int:
    if isinstance(eot, int):
        return eot
    if eot is not None:
        if eot not in vocabulary:
            raise ValueError(f"the tokenizer {name!r} has no token {eot!r} to end a text with.")
        return vocabulary[eot]
    for usual in EOT_NAMES:
        if usual in vocabulary:
            return vocabulary[usual]
    raise ValueError(
        f"the tokenizer {name!r} has none of the usual end-of-text tokens "
        f"({', '.join(EOT_NAMES)}): name its own with eot."
    )


def splits_like_gpt2(spec: dict[str, Any]) -> bool:
    """Whether a tokenizer.json is a byte-level BPE with GPT-2's pattern and nothing more."""
    before, model = spec["pre_tokenizer"] or {}, spec["model"]
    return (
        spec["normalizer"] is None
        and before.get("type") == "ByteLevel"
        and before.get("use_regex", True)
        and not before["add_prefix_space"]
        and model["type"] == "BPE"
        and not model.get("dropout")
        and all(token["special"] for token in spec["added_tokens"])
    )


def train_bpe(word: str, texts: Iterable[str]) -> JsonTokenizer:
    """A byte-level BPE of `bpe:SIZE` ids with GPT-2's pattern; the end of text is id 0."""
    size = word.removeprefix("bpe:")
    if not size.isdecimal() or not SMALLEST <= int(size) <= LARGEST:
        raise ValueError(
            f"{word!r} must be bpe: and a number of ids from {SMALLEST} to {LARGEST}, as bpe:16384."
        )
    tokenizers = optional("tokenizers", "train", "training a BPE")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    inner.pre_tokenizer = byte_level(add_prefix_space=False, use_regex=True)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=int(size),
        special_tokens=[EOT],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return JsonTokenizer(inner, word, EOT)
