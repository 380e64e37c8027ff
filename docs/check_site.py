# SPDX-License-Identifier: Apache-2.0
"""Checks the built site: it works from disk, so no page may load anything from another server.

python docs/check_site.py [FOLDER]    exit code 1 if a page does; default: site
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

SITE = Path(__file__).parents[1] / "site"


class _Loads(HTMLParser):
    """Collects the addresses that a page loads on its own; links are for readers to follow."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """As `HTMLParser` calls it."""
        loads = "src" if tag != "link" else "href"
        self.addresses += [value for name, value in attrs if name == loads and value]


def loads_from_others(page: str) -> list[str]:
    """The addresses of other servers from which a page loads scripts, styles or pictures."""
    parser = _Loads()
    parser.feed(page)
    return [each for each in parser.addresses if urlsplit(each).netloc]


def _faults(site: Path) -> Iterator[str]:
    pages = sorted(site.rglob("*.html"))
    if not pages:
        yield f"{site} has no page; allowed: the folder that mkdocs has built"
    for page in pages:
        for address in loads_from_others(page.read_text(encoding="utf-8")):
            yield f"{page.relative_to(site)} loads {address}; allowed: files of the site"
    if not (site / "search" / "search_index.js").is_file():
        yield "search/search_index.js is missing: a page from disk has no search"


def main() -> int:
    """Print the faults of a site."""
    faults = list(_faults(Path(sys.argv[1]) if len(sys.argv) > 1 else SITE))
    print("\n".join(faults) or "The site loads nothing from other servers.")
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
