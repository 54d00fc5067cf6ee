"""The pages of the project and the blocks in them, for the tests that run them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^( *)(`{3,}|~{3,}) *([^`\s]*)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    line: int
    indented: bool = False


def pages():
    """Every page by its path: those of the repository, and those of docs/, however deep."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return {str(f.relative_to(ROOT)): f.read_text(encoding="utf-8") for f in sorted(found)}


def fenced(text):
    """The blocks of a page; one that is not closed is an error."""
    found, opened = [], None
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if opened is None and fence:
            opened, body = (number, fence), []
        elif opened is not None and fence and fence[2] == opened[1][2] and not fence[3]:
            start, first = opened
            block = Block(first[3], "".join(f"{x}\n" for x in body), start, bool(first[1]))
            found.append(block)
            opened = None
        elif opened is not None:
            body.append(line)
    if opened is not None:
        raise ValueError(f"the block that begins in line {opened[0]} is not closed")
    return found


def blocks(text, language):
    return [block.text for block in fenced(text) if block.language == language]


def without_blocks(text):
    """What is prose, with its inline code."""
    return re.sub(r"^(`{3,}|~{3,}).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)


START = re.compile(
    r"^(?:\.venv/bin/)?(?:multigate|torchrun|python|pip|make|mkdocs|pytest|lm_eval|git|cd)\b(?! *=)"
)


def commands(text):
    """Every line of a page that is for a shell: all of bash blocks, and what looks like it in text.

    A line that ends with a backslash goes on; a comment at its end is left out.
    """
    found = []
    for block in fenced(text):
        lines = block.text.replace("\\\n", " ").splitlines()
        for line in lines:
            line = re.sub(r"\s+#.*$", "", line).strip()
            if not line or line.startswith("#"):
                continue
            if block.language == "bash" or (block.language == "text" and START.match(line)):
                found.append(" ".join(line.split()))
    return found
