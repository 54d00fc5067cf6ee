"""Hugging Face datasets, streamed through the package `datasets`."""

from collections.abc import Iterator
from typing import Any

from multigate.names import unknown

from .optional import optional
from .readers import checked, first_line

BATCH = 1000


class HubPart:
    """The training split of one dataset on the hub, or of a folder laid out like one."""

    size = None

    def __init__(self, path: str, subset: str | None, key: str = "text") -> None:
        self.path, self.subset, self.key = path, subset, key
        self._mark: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return self.path if self.subset is None else f"{self.path}:{self.subset}"

    def stamp(self) -> str:
        return self.name

    def mark(self) -> dict[str, Any] | None:
        """A place shortly before the document read last, which `read` reaches without reading."""
        return self._mark

    def read(self, skip: int = 0, mark: dict[str, Any] | None = None) -> Iterator[str]:
        """The documents after the first `skip`; the `mark` of an earlier reading saves time."""
        dataset = self._load()
        count = 0
        if mark is not None:
            dataset.load_state_dict(mark["state"])
            count = mark["documents"]
        elif skip:
            dataset, count = dataset.skip(skip), skip
        skip -= count
        state = dataset.state_dict()
        for batch in self._batches(dataset):
            self._mark = {"documents": count, "state": state}
            state = dataset.state_dict()
            count += len(batch)
            for text in batch[skip:]:
                yield checked(text, self.name, self.key)
            skip = max(0, skip - len(batch))

    def _load(self) -> Any:
        datasets = optional("datasets", "data", f"the dataset {self.name!r}")
        try:
            dataset = datasets.load_dataset(self.path, self.subset, split="train", streaming=True)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the Hugging Face dataset {self.name!r} cannot be opened "
                f"({first_line(error)}): check its name, its subset and the network, or give the "
                "path of a file or folder that exists."
            ) from error
        columns = dataset.column_names
        if columns is not None and self.key not in columns:
            raise ValueError(f"{self.name}: {unknown('column', self.key, columns)}")
        # Whole Arrow batches: one example at a time takes longer than encoding it.
        return dataset.select_columns([self.key]).with_format("arrow")

    def _batches(self, dataset: Any) -> Iterator[list[Any]]:
        try:
            for table in dataset.iter(batch_size=BATCH):
                yield table[self.key].to_pylist()
        except OSError as error:
            raise OSError(
                f"reading the dataset {self.name!r} failed ({first_line(error)}): what is finished "
                "is kept, run the same command again to go on."
            ) from error
