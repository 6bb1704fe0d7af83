#!/usr/bin/env bash
# Builds the documentation as a site: docs.sh [FOLDER], default target/docs. Needs mdBook 0.5 and
# python3.
#
# Pages keep their paths in the repository, so that links work on a code host and on the site.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-target/docs}")
command -v mdbook >/dev/null || {
  echo "docs: install mdBook (cargo install mdbook --version 0.5.4 --locked)" >&2
  exit 1
}
tools/check_docs.py
pages=$(mktemp -d)
trap 'rm -rf "$pages"' EXIT
cp docs/book/SUMMARY.md docs/book/book.toml "$pages"
cp -r --parents README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md LICENSE-* springtide.toml \
  docs examples ingest/log/proto demo/models/base/*.md python/README.md \
  "$pages"
rm -r "$pages/docs/book"
# The index page of a folder is README.md on a code host and index.html on the site.
find "$pages" -name README.md -execdir mv README.md index.md ';'
find "$pages" -name '*.md' -exec sed -Ei 's#\]\(([^()]*/)?README\.md#](\1index.md#g' {} +
mdbook build "$pages" --dest-dir "$out"

# Checks that every link of the site has a target, because mdBook does not.
python3 - "$out" <<'PY'
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

site = Path(sys.argv[1]).resolve()


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.links, self.ids = [], set()

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id":
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


pages = {}
for path in site.rglob("*.html"):
    pages[path] = Page()
    pages[path].feed(path.read_text(encoding="utf-8"))
faults = set()
for path, page in pages.items():
    if path.name in ("print.html", "404.html", "toc.html"):
        continue
    for link in page.links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not target.exists():
            faults.add(f"{path.relative_to(site)}: {link} has no target")
        elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
            faults.add(f"{path.relative_to(site)}: {link} has no such heading")
for fault in sorted(faults):
    print(f"docs: {fault}", file=sys.stderr)
sys.exit(bool(faults))
PY
echo "docs: $out/index.html"
