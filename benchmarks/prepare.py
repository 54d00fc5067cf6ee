"""How fast `multigate prepare` is, beside the package `tokenizers` encoding the same text.

    python benchmarks/prepare.py SOURCE TOKENIZER --mb 20

SOURCE is any source of `multigate prepare`, TOKENIZER a tokenizer.json or bpe:SIZE. The package is
given all documents in memory and its default threads (`encode_batch_fast`); `prepare` also reads
the source, splits off validation documents, and writes, syncs and hashes its shards. The two take
turns; prints the median of each in MB of text a second, and their ratio.
"""

import argparse
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path

from multigate.data import PrepareConfig, prepare
from multigate.data.encode import cores
from multigate.data.sources import documents
from multigate.data.tokenizer import make_tokenizer


def first_documents(source, megabytes):
    """Until there is enough text, as `prepare` takes them with `limit_mb`."""
    texts, size = [], 0
    for text in documents(source):
        if size >= megabytes * 1e6:
            break
        texts.append(text)
        size += len(text.encode())
    return texts, size


def library(path, texts):
    """Seconds of the package alone, and the number of tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    begin = time.perf_counter()
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return time.perf_counter() - begin, sum(len(e) for e in encodings)


def ours(config):
    """Seconds of `prepare`, and the number of tokens without the ends of text."""
    begin = time.perf_counter()
    data = prepare(config, progress=lambda progress: None)
    seconds = time.perf_counter() - begin
    splits = [data.split(name) for name in data.splits()]
    return seconds, sum(s.tokens - s.documents for s in splits)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("tokenizer")
    parser.add_argument("--mb", type=float, default=20, help="MB of text")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--processes", type=int, default=0, help="of prepare; 0: all cores")
    args = parser.parse_args()
    texts, size = first_documents(args.source, args.mb)
    speeds = {"library": [], "prepare": []}
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "tokenizer.json"
        path.write_bytes(make_tokenizer(args.tokenizer, lambda: islice(texts, 2000)).to_bytes())
        for k in range(args.repeat):
            config = PrepareConfig(
                out=Path(place) / str(k),
                sources=(args.source,),
                tokenizer=str(path),
                limit_mb=args.mb,
                processes=args.processes,
            )
            results = {"library": library(path, texts), "prepare": ours(config)}
            if results["library"][1] != results["prepare"][1]:
                raise SystemExit(f"the numbers of tokens differ: {results}")
            for name, (seconds, _) in results.items():
                speeds[name].append(size / 1e6 / seconds)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    print(f"{size / 1e6:.1f} MB, {len(texts)} documents, {cores()} cores, {args.repeat} times each")
    for name, values in speeds.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"  {name:8} {medians[name]:6.2f} MB/s ({spread})")
    print(f"  prepare / library {medians['prepare'] / medians['library']:.2f}")


if __name__ == "__main__":
    main()
