"""How much memory a block needs and how much the machine has, asked before anything is allocated."""

from pathlib import Path

import torch

GIB = 1 << 30


def available_bytes(device: torch.device) -> int:
    """Free memory of the GPU, or memory of the host that can be had without swapping."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return 8 * GIB  # no portable question without a further dependency; a small laptop's worth


def fits(needed: int, device: torch.device, what: str) -> str | None:
    """None, or the reason why `needed` bytes for `what` do not fit, with the fix."""
    free = available_bytes(device)
    if needed <= free:
        return None
    return (
        f"{what} needs {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are available on {device}. "
        f"Fix: a smaller workload.batch_size or prefix_len, or workload.length_scale for a trace"
    )
