#!/usr/bin/env python3
"""Checks the documentation against the tree. Standard library only; takes less than a second.

Fails if a page has
- a relative link or an image without a target, or a link to a heading that does not exist;
- a repository path in backticks that does not exist, or the name of a source file that does not;
- a `make` target that the Makefile does not have, a `make KIND NAME=…` without its script in tools/, or a name `springtide_…` that no source has;
- a placeholder `@@` for a figure that is not measured yet;
- a line of prose beyond 100 characters (tables, links and model cards excepted);
- no entry in the table of contents of the site, docs/book/SUMMARY.md.
"""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINE_MAX = 100
SUMMARY = ROOT / "docs/book/SUMMARY.md"
SOURCES = (".rs", ".sql", ".sh", ".py", ".cu", ".proto", ".dot", ".mts")
# The changelog may name files that no longer exist.
HISTORY = {ROOT / "CHANGELOG.md"}

LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
CODE = re.compile(r"`([^`]+)`")
MAKE = re.compile(r"\bmake ([a-z][a-z0-9-]*)\b(?: NAME=([a-z0-9-]+))?")
NAME = re.compile(r"\bspringtide_[a-z_]+")


def pages():
    for pattern in ("*.md", "docs/**/*.md", "demo/models/*/*.md", "examples/*.md", "python/*.md", "tests/**/*.md"):
        yield from sorted(ROOT.glob(pattern))


def tree():
    """The top-level folders, the names of source files, and the names `springtide_…` in Rust code.

    Hidden folders and build outputs are left out.
    """
    folders, names, spoken = set(), set(), set()
    for folder, below, files in os.walk(ROOT):
        below[:] = [name for name in below if not name.startswith(".") and name not in ("target", "node_modules")]
        if Path(folder) == ROOT:
            folders.update(below)
        names.update(name for name in files if name.endswith(SOURCES))
        for name in files:
            if name.endswith(".rs"):
                spoken.update(NAME.findall((Path(folder) / name).read_text(encoding="utf-8")))
    return folders, names, spoken


def slug(heading):
    """The anchor that GitHub and mdBook give to a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def split(text):
    """Each line with its number and whether it lies in a block of code."""
    fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        fence = line.lstrip().startswith("```")
        yield number, line, fenced or fence
        fenced ^= fence


def anchors(text):
    seen = {}
    for _, line, code in split(text):
        if not code and re.match(r"#{1,6} ", line):
            name = slug(line.lstrip("#"))
            count = seen[name] = seen.get(name, -1) + 1
            yield f"{name}-{count}" if count else name


def missing_path(words, folders, names):
    """Whether `words` is a path in the repository, or a source file, that does not exist."""
    if re.search(r"[\s{}<>$=|\"']", words) or words.startswith(("-", "/", "http")):
        return False
    words = words.split("::")[0].rstrip(".,:")
    first, _, rest = words.partition("/")
    if rest or words.endswith("/"):
        return first in folders and not any(ROOT.glob(words.rstrip("/").replace("…", "*")))
    return words.endswith(SOURCES) and "*" not in words and "…" not in words and words not in names


def check_lines(page, content, folders, names, spoken, targets):
    """Faults of single lines, with their line numbers."""
    for number, line, code in split(content):
        if "@@" in line:
            yield number, "a figure is missing"
        free = code or line.startswith("|") or "](" in line or "models" in page.parts
        if len(line) > LINE_MAX and not free:
            yield number, f"{len(line)} characters; break the line before {LINE_MAX}"
        if page in HISTORY:
            continue
        spans = [line] if code else CODE.findall(line)
        if not code or line.startswith("make "):
            for target, name in (found for words in spans for found in MAKE.findall(words)):
                if target not in targets:
                    yield number, f"the Makefile has no target {target!r}"
                if name and not (ROOT / "tools" / target / f"{name}.sh").exists():
                    yield number, f"there is no tools/{target}/{name}.sh"
        for name in NAME.findall(line):
            if name not in spoken:
                yield number, f"no source has the name {name}"
        for words in () if code else spans:
            if missing_path(words, folders, names):
                yield number, f"`{words}` does not exist"


def check_links(page, content, headings):
    """Faults of links. The text of a link may span several lines."""
    # The table of contents is copied to the root of the site before it is built.
    base = ROOT if page == SUMMARY else page.parent
    prose = "\n".join("" if code else line for _, line, code in split(content))
    for match in LINK.finditer(prose):
        if re.match(r"[a-z]+:", match[1]):
            continue
        path, _, anchor = match[1].partition("#")
        target = (base / path).resolve() if path else page
        number = prose.count("\n", 0, match.start()) + 1
        if not target.exists():
            yield number, f"{path} does not exist"
        elif anchor and target in headings and anchor not in headings[target]:
            yield number, f"{path or page.name} has no heading #{anchor}"


def main():
    text = {page: page.read_text(encoding="utf-8") for page in pages()}
    headings = {page: set(anchors(content)) for page, content in text.items()}
    folders, names, spoken = tree()
    rules = re.findall(r"^([a-z][a-z0-9 -]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    targets = {name for rule in rules for name in rule.split()}
    listed = {(ROOT / link).resolve() for link in LINK.findall(text[SUMMARY])}

    faults = 0
    for page, content in text.items():
        found = [*check_lines(page, content, folders, names, spoken, targets), *check_links(page, content, headings)]
        if page != SUMMARY and page not in listed and "models" not in page.parts:
            found.append((1, f"not in {SUMMARY.relative_to(ROOT)}"))
        for number, fault in sorted(found):
            print(f"docs: {page.relative_to(ROOT)}:{number}: {fault}", file=sys.stderr)
        faults += len(found)
    if not faults:
        print(f"docs: {len(text)} pages in order")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
