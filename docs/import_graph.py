# SPDX-License-Identifier: Apache-2.0
"""The house: which module may import which, checked against the code and drawn for the docs.

Every module of our packages belongs to one room; rooms lie on floors. A module imports modules of
its own room and of rooms on lower floors. `python docs/import_graph.py` draws the picture.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = (
    "packages/flexkv/src",
    "packages/flexkv-vllm/src",
    "packages/flexkv-sglang/src",
    "kernels/python",
)
PICTURE = ROOT / "docs" / "pages" / "assets" / "imports.svg"

VLLM, SGLANG, CORE = "flexkv_vllm", "flexkv_sglang", "flexkv"
_KERNELS = "flexkv_kernels."


@dataclass(frozen=True)
class Room:
    """Modules that belong together.

    Attributes:
        name: in the picture.
        text: what the modules do.
        modules: names of modules, or of packages with all that is in them; the longest name that
            fits a module decides its room.
    """

    name: str
    text: str
    modules: tuple[str, ...]


def _of(package: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{package}.{name}" for name in names)


FLOORS: tuple[tuple[Room, ...], ...] = (
    (
        Room(
            "in-tree names",
            "what the engines' own files import",
            _of(CORE, "integration", "common"),
        ),
        Room("flexkv-vllm: plugin", "vLLM calls it first", _of(VLLM, "plugin")),
    ),
    (Room("flexkv-vllm: offloading", "the spec of OffloadingConnector", _of(VLLM, "offloading")),),
    (
        Room("flexkv-vllm", "vLLM's calls, tensors, hashes, events", (VLLM,)),
        Room("flexkv-sglang", "SGLang's calls, tensors, hashes, events", (SGLANG,)),
    ),
    (
        Room("flexkv-vllm: compat", "what differs between releases", _of(VLLM, "compat")),
        Room("cli", "flexkv stat, top, plan, ...", _of(CORE, "cli", "__main__")),
    ),
    (Room("plan", "traces, replays, sizing", _of(CORE, "plan")),),
    (
        Room("flexkv", "the public names", (CORE,)),
        Room("kernels", "native copies, index, steps", ("flexkv_kernels",)),
    ),
    (Room("library", "a cache without an engine", _of(CORE, "library")),),
    (Room("preflight", "checks of doctor and of starts", _of(CORE, "preflight")),),
    (
        Room("engine/scheduler", "follows an engine's requests", _of(CORE, "engine.scheduler")),
        Room("engine/worker", "copies of pages, rank by rank", _of(CORE, "engine.worker")),
    ),
    (
        Room(
            "engine: start",
            "makes a cache for an engine",
            _of(
                CORE,
                "engine.start",
                "engine.open_rank",
                "engine.side_figures",
            ),
        ),
    ),
    (Room("engine/choice", "whether a load is worth it", _of(CORE, "engine.choice")),),
    (Room("engine", "the boundary, orders, identity of weights", _of(CORE, "engine")),),
    (Room("service", "one cache for a node's engines", _of(CORE, "service")),),
    (Room("cache", "KVCache, the facade, and its tiers", _of(CORE, "cache", "open_tiers")),),
    (Room("transfer", "fetch, demote, copies", _of(CORE, "transfer")),),
    (Room("client", "CacheClient, the door below engines", _of(CORE, "client")),),
    (
        Room("figures", "metrics, the meter", _of(CORE, "figures")),
        Room("operators", "what people may ask of a cache", _of(CORE, "operators")),
    ),
    (
        Room("tiers/disk", "blocks on NVMe", _of(CORE, "tiers.disk")),
        Room("session", "how processes meet", _of(CORE, "session")),
    ),
    (
        Room("tiers", "the protocol, jobs, links", _of(CORE, "tiers")),
        Room("host", "the arena and its memory", _of(CORE, "host")),
    ),
    (
        Room("index", "key to slot, states, leases, pins", _of(CORE, "index")),
        Room("settings", "one field each, all sources", _of(CORE, "settings")),
    ),
    (
        Room("eviction", "one policy a file", _of(CORE, "eviction")),
        Room("layout", "where pages are, block format", _of(CORE, "layout")),
    ),
    (Room("system", "files, memory, processes, native modules", _of(CORE, "system")),),
    (Room("types", "errors, mover, presence, changes", _of(CORE, "types", "version")),),
)


_LOADERS = frozenset({"import_module", "find_spec", "__import__"})


def read_imports() -> dict[str, set[str]]:
    """Each of our modules, and those of them that it imports; also what is only imported for
    types, in a function, or by name."""
    files = {
        ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): file
        for source in map(ROOT.joinpath, SOURCES)
        for file in source.rglob("*.py")
    }
    return {name: set(_imports(file, name, files)) for name, file in files.items()}


def _imports(file: Path, own: str, files: Mapping[str, Path]) -> Iterator[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    yield from (name for name in _loaded_by_name(tree, own) if name in files and name != own)
    types = _imports_of_types(tree)
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)) if node in types and module.startswith(
                _KERNELS
            ):
                continue
            case ast.ImportFrom(module=str(module), names=names):
                found = [f"{module}.{each.name}" for each in names]
                named = [name if name in files else module for name in found]
            case ast.Import(names=names):
                named = [each.name for each in names]
            case _:
                continue
        yield from (name for name in named if name in files and name != own)


def _imports_of_types(tree: ast.Module) -> set[ast.AST]:
    """What is only imported for types. The core may take those of the kernels from their `.pyi`
    files."""
    return {
        node
        for each in ast.walk(tree)
        if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING"
        for node in each.body
    }


def _loaded_by_name(tree: ast.Module, own: str) -> Iterator[str]:
    """Names of modules that the module `own` may import by name: all its strings, if it calls a
    loader at all.

    The core runs without the kernels: it may load them by name, and only so; types apart.
    """
    if not any(map(_is_loader, ast.walk(tree))):
        return
    in_core = own.partition(".")[0] == CORE
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(name)) if not (in_core and name.startswith(_KERNELS)):
                yield name


def _is_loader(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in _LOADERS
    return False


def rooms() -> dict[str, tuple[int, Room]]:
    """Each name of the rooms' modules: its floor, counted from the top, and its room."""
    return {
        name: (number, room)
        for number, floor in enumerate(FLOORS)
        for room in floor
        for name in room.modules
    }


def room_of(module: str) -> tuple[int, Room]:
    """The floor and the room of a module.

    Raises:
        LookupError: it has none.
    """
    known = rooms()
    fitting = [name for name in known if module == name or module.startswith(name + ".")]
    # Only a package's own `__init__` has the package's name; a new module of the core needs a room.
    best = max(fitting, key=len, default="")
    if not best or (best == CORE and module != CORE):
        raise LookupError(f"{module} has no room in {Path(__file__).name}")
    return known[best]


def faults(imports: Mapping[str, set[str]]) -> list[str]:
    """What breaks the order of the house; empty if nothing does."""
    found = []
    for module, imported in sorted(imports.items()):
        floor, room = room_of(module)
        for other in sorted(imported):
            other_floor, other_room = room_of(other)
            if other_room is not room and other_floor <= floor:
                found.append(f"{module} ({room.name}) imports {other} ({other_room.name}) above it")
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        found.append("cycle of files: " + " -> ".join(error.args[1]))
    return found


_WIDTH, _HEIGHT, _GAP, _ROW = 330, 48, 40, 92


def draw(imports: Mapping[str, set[str]]) -> str:
    """The rooms floor by floor, with arrows to those that they import, as SVG."""
    centers: dict[Room, tuple[float, float]] = {}
    wide = max(map(len, FLOORS))
    total = wide * _WIDTH + (wide + 1) * _GAP
    for number, floor in enumerate(FLOORS):
        left = (total - len(floor) * _WIDTH - (len(floor) - 1) * _GAP) / 2
        for place, room in enumerate(floor):
            centers[room] = left + place * (_WIDTH + _GAP) + _WIDTH / 2, _GAP + number * _ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {len(FLOORS) * _ROW + _GAP}"'
        f' font-family="sans-serif" font-size="13">',
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#00796b"/></marker></defs>',
    ]
    for start, end in _arrows(imports):
        (x1, y1), (x2, y2) = centers[start], centers[end]
        bend = (x1 + x2) / 2 + (_WIDTH if y2 - y1 > _ROW and x1 == x2 else 0)
        parts.append(
            f'<path d="M{x1:.0f},{y1 + _HEIGHT:.0f} Q{bend:.0f},{(y1 + y2 + _HEIGHT) / 2:.0f} '
            f'{x2:.0f},{y2:.0f}" fill="none" stroke="#00796b" stroke-width="1.5" '
            f'marker-end="url(#tip)"/>'
        )
    for room, (x, y) in centers.items():
        parts.append(
            f'<rect x="{x - _WIDTH / 2:.0f}" y="{y:.0f}" width="{_WIDTH}" height="{_HEIGHT}" '
            f'rx="6" fill="#e0f2f1" stroke="#00796b"/>'
            f'<text x="{x:.0f}" y="{y + 20:.0f}" text-anchor="middle" font-weight="bold">'
            f"{room.name}</text>"
            f'<text x="{x:.0f}" y="{y + 38:.0f}" text-anchor="middle" fill="#37474f">'
            f"{room.text}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def _arrows(imports: Mapping[str, set[str]]) -> list[tuple[Room, Room]]:
    """Each room and those that it imports, except where other arrows lead there too."""
    below: dict[Room, set[Room]] = {room: set() for floor in FLOORS for room in floor}
    for module, imported in imports.items():
        room = room_of(module)[1]
        below[room] |= {room_of(other)[1] for other in imported} - {room}
    reached: dict[Room, set[Room]] = {}
    for room in reversed(below):  # the lowest floor first
        reached[room] = below[room].union(*(reached[other] for other in below[room]))
    return [
        (room, other)
        for room, others in below.items()
        for other in sorted(others, key=lambda each: each.name)
        if not any(other in reached[between] for between in others - {other})
    ]


def main() -> int:
    """Draw the picture, and say what breaks the order."""
    imports = read_imports()
    PICTURE.write_text(draw(imports), encoding="utf-8")
    found = faults(imports)
    print("\n".join(found) or f"{len(imports)} modules; the picture is {PICTURE}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
