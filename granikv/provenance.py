"""Where a number came from: code, environment and machine, as values that go into every record."""

import hashlib
import json
import os
import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "numpy", "hydra-core", "triton", "flashinfer-python", "sglang")


def digest(value: Any) -> str:
    """16 hex digits of sha256 over the canonical JSON of `value`."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


@cache
def code_hash() -> str:
    """Over the source of everything that can change a measurement; documents, tests and analysis are left out."""
    sha = hashlib.sha256()
    for package in ("granikv", "baselines"):
        for path in sorted((ROOT / package).rglob("*.py")):
            sha.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()[:16]


@cache
def git_state() -> dict[str, Any]:
    """sha and whether the working tree differs from it; None where there is no git checkout.

    A copy without history may be told its commit in GRANIKV_GIT_SHA.
    """

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    sha, status = git("rev-parse", "HEAD"), git("status", "--porcelain")
    if sha is None:
        return {"git_sha": os.environ.get("GRANIKV_GIT_SHA"), "dirty": None}
    return {"git_sha": sha, "dirty": None if status is None else bool(status)}


def versions() -> dict[str, str]:
    """Installed versions of the packages that compute or configure."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def cpu_name() -> str:
    """The processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def environment(device: torch.device) -> dict[str, Any]:
    """What must be equal for two runs to be comparable; its digest is part of the resume key."""
    facts: dict[str, Any] = {
        "versions": versions(),
        "cpu": cpu_name(),
        "platform": sys.platform,
        "num_threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, "driver": _driver()}
    return facts


def device_name(device: torch.device) -> str:
    """GPU or processor name, as figures show it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


@cache
def _driver() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.splitlines()[0].strip()
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return None


GPU_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active")


def gpu_state(device: torch.device) -> dict[str, str] | None:
    """Clocks, power, temperature and throttle reasons as nvidia-smi tells them now; None without a GPU."""
    if device.type != "cuda":
        return None
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return None
    index = torch.cuda.current_device()
    return dict(zip(GPU_FIELDS, (x.strip() for x in lines[index].split(",")))) if index < len(lines) else None
