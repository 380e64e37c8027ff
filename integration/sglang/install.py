# SPDX-License-Identifier: Apache-2.0
"""Install SGLang for CPUs into the Python that runs this file: `python install.py 0.5.23`.

Needs pip, uv and packaging beside the standard library. SGLang is on PyPI for GPUs only and
requires gigabytes for them. Its Python files run on a CPU with the packages below and torch's CPU
build, though they pin a newer torch, and with `shims/`, which every Python of the environment
starts with.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from integration.harness.install_vllm import TORCH, install_torch_cpu, uv  # noqa: E402

_AT_START = "import sglang_on_cpu; sglang_on_cpu.start()"
SHIMS = Path(__file__).with_name("shims")
TORCHVISION = "torchvision==0.28.0"  # of torch 2.13
REQUIRED = {
    "IPython",
    "aiohttp",
    "apache-tvm-ffi",
    "compressed-tensors",
    "einops",
    "fastapi",
    "gguf",
    "msgspec",
    "numpy",
    "openai",
    "opentelemetry-exporter-otlp",
    "opentelemetry-sdk",
    "orjson",
    "partial_json_parser",
    "pillow",
    "prometheus-client",
    "psutil",
    "pybase64",
    "python-multipart",
    "pyzmq",
    "requests",
    "sentencepiece",
    "setproctitle",
    "soundfile",
    "transformers",
    "uvicorn",
    "uvloop",
    "xgrammar",
}
"""What the engine and its HTTP server import of what SGLang requires, by its names."""
EXTRAS = ("", "tracing")
"""SGLang's extras of which that is; the first stands for what it always requires."""
UNDECLARED = ["triton==3.9.0", "dill", "jsonschema", "starlette"]
"""What they import without SGLang requiring it itself."""


def main() -> int:
    """Parse the command line and install. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version", help="of SGLang, for example 0.5.23")
    version = parser.parse_args().version
    try:
        install_torch_cpu()
        uv("--no-deps", f"sglang=={version}", TORCHVISION)
        # torch is named again so that no dependency replaces the CPU build.
        uv(TORCH, *UNDECLARED, *_requirements())
    except subprocess.CalledProcessError as error:
        print(f"SGLang {version} not installed: {error}")
        return 1
    _add_shims()
    return 0


def _requirements() -> list[str]:
    """What is required of `REQUIRED`, in the versions that this SGLang asks for."""
    wanted = []
    for each in map(Requirement, metadata.requires("sglang") or []):
        marker, each.marker = each.marker, None
        applies = marker is None or any(marker.evaluate({"extra": extra}) for extra in EXTRAS)
        if applies and each.name in REQUIRED:
            wanted.append(str(each))
    return wanted


def _add_shims() -> None:
    """Have every Python of this environment find `shims/` and start with `sglang_on_cpu`."""
    path = Path(sysconfig.get_path("purelib"), "sglang_on_cpu.pth")
    path.write_text(f"{SHIMS.resolve()}\n{_AT_START}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
