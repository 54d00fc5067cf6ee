"""The tokenizer of a run as one of Transformers, with the same ids for the same text."""

import json
import warnings
from typing import Any

from multigate.data.bpe import JsonTokenizer
from multigate.data.optional import optional
from multigate.data.ranks import RanksTokenizer
from multigate.data.shards import digest
from multigate.data.tokenizer import ByteTokenizer, Tokenizer

NEEDS = "a tokenizer of Transformers"


def to_transformers(tokenizer: Tokenizer, context: int) -> Any:
    """A `PreTrainedTokenizerFast` that encodes and decodes as `tokenizer` does.

    The end of text also begins a text and pads one, on the left. No token is added to a text, and
    the name of a special token is ordinary text where it stands in one.
    """
    hf = optional("transformers", "hf", NEEDS)
    optional("tokenizers", "train", NEEDS)
    if isinstance(tokenizer, ByteTokenizer):
        inner = of_bytes()
    elif isinstance(tokenizer, RanksTokenizer):
        inner = of_ranks(tokenizer)
    elif isinstance(tokenizer, JsonTokenizer):
        inner = of_json(tokenizer)
    else:
        raise ValueError(
            f"a {type(tokenizer).__name__} cannot be written as a tokenizer.json: take another "
            "tokenizer, or only the weights."
        )
    end = inner.id_to_token(tokenizer.eot)
    made = hf.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=end,
        bos_token=end,
        pad_token=end,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=context,
    )
    if tokenizer.eot in made(end, add_special_tokens=False)["input_ids"] and end != chr(256):
        warnings.warn(
            f"where a text contains {end!r}, the tokenizer of Transformers takes it for the end of "
            "text, which that of multigate does not.",
            stacklevel=3,
        )
    return made


def tokenizer_fingerprint(made: Any, eot: int) -> str:
    """What data has that is prepared with the tokenizer.json that `made` is saved as."""
    data = made.backend_tokenizer.to_str().encode()
    return digest([JsonTokenizer.from_bytes(data, "tokenizer.json", eot).entry()["sha256"], eot])


def of_bytes() -> Any:
    """Every byte its own token. Byte-level tokenizers write a byte as one printable character."""
    tokenizers = optional("tokenizers", "train", NEEDS)
    vocabulary = {character: byte for byte, character in byte_characters().items()}
    return byte_level(tokenizers.models.BPE(vocab=vocabulary, merges=[]), use_regex=False)


def of_ranks(tokenizer: RanksTokenizer) -> Any:
    """Merges from ranks: two tokens become one in the order of the ranks of what they become."""
    tokenizers = optional("tokenizers", "train", NEEDS)
    characters = byte_characters()
    ranks = tokenizer.ranks

    def written(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    merges = [
        (written(token[:cut]), written(token[cut:]))
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    vocabulary = {written(token): rank for token, rank in ranks.items()}
    end = tokenizer.decode([tokenizer.eot])
    # A whole word that is a token is taken as it is, whether merges lead to it or not.
    model = tokenizers.models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True)
    inner = byte_level(model, use_regex=True)
    inner.add_special_tokens([tokenizers.AddedToken(end, special=True, normalized=False)])
    return inner


def of_json(tokenizer: JsonTokenizer) -> Any:
    """The same, without what it would add around a text."""
    tokenizers = optional("tokenizers", "train", NEEDS)
    spec = json.loads(tokenizer.to_bytes())
    return tokenizers.Tokenizer.from_str(json.dumps({**spec, "post_processor": None}))


def byte_level(model: Any, use_regex: bool) -> Any:
    tokenizers = optional("tokenizers", "train", NEEDS)
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=use_regex
    )
    inner.decoder = tokenizers.decoders.ByteLevel()
    return inner


def byte_characters() -> dict[int, str]:
    """How byte-level tokenizers write each byte: as itself where Latin-1 has something to see
    there, otherwise as the next character from U+0100 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0x100)} - {0xAD}
    rest = [byte for byte in range(256) if byte not in seen]
    return {**{b: chr(b) for b in seen}, **{b: chr(256 + k) for k, b in enumerate(rest)}}
