# SPDX-License-Identifier: Apache-2.0
"""Writes pages/reference/settings.md from the settings in the code, or checks it.

`python docs/settings_page.py --write` or `--check`; needs the distribution flexkv. `nox -s docs`
checks, `nox -s docs -- --write` writes.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from flexkv.settings import CONFIG_PATH_VARIABLE, SETTINGS
from flexkv.settings.setting import Setting

PAGE = Path(__file__).with_name("pages") / "reference" / "settings.md"

HEAD = f"""\
<!-- Written by docs/settings_page.py from the code: change it there, then run
     `nox -s docs -- --write`. -->

# Settings

All settings of FlexKV, which needs none of them. A setting can come from four places; if several
give it, the first of these wins:

1. `kv_connector_extra_config` in vLLM's `--kv-transfer-config`, for example
   `'{{"kv_connector":"FlexKVConnectorV1","kv_role":"kv_both","kv_connector_extra_config":{{"cpu_cache_gb":64}}}}'`
2. the YAML or JSON file named by `{CONFIG_PATH_VARIABLE}`, for example with the line
   `cpu_cache_gb: 64`
3. the environment, for example `FLEXKV_CPU_CACHE_GB=64`
4. the default

In the first two places a setting has its own name. Its variable is `FLEXKV_` and the name in
capitals; only that of `enable` is `ENABLE_FLEXKV`.

- An unknown name, or a value that is not allowed, stops the start with an error. An empty variable
  counts as not set.
- The log names settings without effect, such as `ssd_admission` without a disk, and the variables
  that Kubernetes sets for a Service named `flexkv` (`FLEXKV_SERVICE_HOST`, ...), which FlexKV
  ignores.

| setting | variable | unit | default |
|---|---|---|---|
"""


_OF_SERVER = (
    "With SGLang's `--dp-size`, [each engine has an equal "
    "part](../start/sglang.md#data-parallelism)."
)
ENGINES = {
    "cpu_cache_gb": f"{_OF_SERVER} The default's bounds are divided in the same way.",
    "ssd_cache_gb": _OF_SERVER,
    "ssd_write_gb_per_day": _OF_SERVER,
    "mooncake_segment_gb": _OF_SERVER,
    "ssd_in_use": (
        "vLLM's data-parallel engines need `own`. Under SGLang's linker, the engines of one "
        "server (`--dp-size`) count as one engine: each has a folder with either value."
    ),
    "eviction_policy": (
        "FlexKV follows whole requests under vLLM's connectors, for models with one KV cache "
        "group, and under SGLang's linker."
    ),
    "load_mode": (
        "With vLLM, layerwise loads need `--no-async-scheduling`, and make vLLM use PIECEWISE CUDA "
        "graphs. Under OffloadingConnector all loads are asynchronous. SGLang's linker always "
        "loads layer by layer."
    ),
}
"""What a setting means for single engines, which the core does not know."""

COMPUTED = "Default: "
"""Precedes the default in the help text of a setting whose default is worked out at start."""


def page() -> str:
    """The whole page as Markdown."""
    rows = [
        f"| [`{each.name}`](#{each.name}) | `{each.variable}` | "
        f"{each.kind.unit} | {_plain_default(each) or f'[below](#{each.name})'} |\n"
        for each in SETTINGS.values()
    ]
    return HEAD + "".join(rows) + "".join(map(_section, SETTINGS.values()))


def _section(setting: Setting) -> str:
    text, _, computed = setting.help.partition(COMPUTED)
    default = _plain_default(setting) or computed
    if not default:
        raise ValueError(
            f"setting {setting.name!r} has no default; allowed: a plain default, or a help text "
            f"that contains {COMPUTED!r}"
        )
    return (
        f"\n## {setting.name}\n\n"
        f"{text.strip()}\n\n"
        + (f"{ENGINES[setting.name]}\n\n" if setting.name in ENGINES else "")
        + f"- Allowed: {setting.allowed}\n"
        + (f"- Needs: `{setting.acts_with}`\n" if setting.acts_with else "")
        + f"- Default: {default}\n"
    )


def _plain_default(setting: Setting) -> str:
    """The default as written in a variable, or "" if it is worked out at start."""
    written = setting.written(setting.default)
    return f"`{written}`" if written else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write the page")
    action.add_argument("--check", action="store_true", help="fail if the page is out of date")
    options = parser.parse_args(arguments)
    wanted = page()
    if options.write:
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    found = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    if found == wanted:
        return 0
    difference = difflib.unified_diff(
        found.splitlines(), wanted.splitlines(), "the page", "the code", lineterm=""
    )
    print("\n".join(difference))
    print(f"{PAGE.name} is out of date; `nox -s docs -- --write` rewrites it")
    return 1


if __name__ == "__main__":
    sys.exit(main())
