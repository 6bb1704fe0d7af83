#!/usr/bin/env python3
"""Counts lines of Rust code by crate: neither blank nor comment, outside test files and `#[cfg(test)]` items.

`size.py --check` fails if a crate has more lines than tools/size.txt allows. A commit that raises a ceiling says what
for. Standard library only; takes less than a second.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CEILINGS = ROOT / "tools/size.txt"
TESTS = re.compile(r"tests?\.rs$|/tests/|^tests/|benches|/fuzz|^fuzz|examples/")


def code_lines(text):
    count = depth = 0
    in_comment = is_test = False
    for line in map(str.strip, text.split("\n")):
        opened = line.count("{") - line.count("}")
        if in_comment or line.startswith("/*"):
            in_comment = "*/" not in line
        elif not line or line.startswith("//"):
            pass
        elif depth:
            depth += opened
        elif re.match(r"#\[cfg\((all\()?test", line):
            is_test = True
        elif is_test:
            # other attributes may stand between it and the item
            if not line.startswith("#["):
                is_test, depth = False, max(opened, 0)
        else:
            count += 1
    return count


def crate(path):
    folder = path.parent
    while folder != Path(".") and not (ROOT / folder / "Cargo.toml").exists():
        folder = folder.parent
    return "src" if folder == Path(".") else str(folder)


def main():
    listed = subprocess.run(["git", "ls-files", "*.rs"], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = Counter()
    for name in listed.stdout.split():
        if not TESTS.search(name) and (ROOT / name).exists():
            lines[crate(Path(name))] += code_lines((ROOT / name).read_text(encoding="utf-8"))
    rows = [row.split() for row in CEILINGS.read_text(encoding="utf-8").splitlines() if not row.startswith("#")]
    ceilings = {name: int(most) for most, name in rows}
    over = [name for name, count in lines.items() if count > ceilings.get(name, 0)]
    if "--check" not in sys.argv:
        for name, count in lines.most_common():
            print(f"{count:7} of {ceilings.get(name, 0):5} {name}")
        print(f"{lines.total():7} in all")
    for name in over:
        print(f"size: {name} has {lines[name]} lines of code, and tools/size.txt allows {ceilings.get(name, 0)}", file=sys.stderr)
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
