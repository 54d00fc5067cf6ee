"""Looking a name up, and saying what was probably meant when it is not there."""

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """One sentence for an unknown name: the nearest known one, then all of them."""
    names = list(known)
    near = get_close_matches(str(name), names, n=1, cutoff=0.4)
    near = near or [known for known in names if known.startswith(str(name))]
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {name!r}: {hint}The known ones are {', '.join(names) or '(none)'}."
