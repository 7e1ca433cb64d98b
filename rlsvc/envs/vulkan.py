"""Whether ManiSkill's renderer finds a Vulkan device, tried in a process of its own: a broken driver crashes."""

from __future__ import annotations

import os
import subprocess
import sys

from rlsvc.core.errors import UserError

# ManiSkill's renderer on a GPU where there is one, else on the processor, as ManiSkill chooses.
PROBE = """
import sapien
try:
    device = sapien.Device("cuda")
except RuntimeError:
    device = sapien.Device("cpu")
sapien.render.RenderSystem(device)
print("ManiSkill renders on", device)
"""
MEND = (
    "apt install libvulkan1 and mesa-vulkan-drivers 25 or newer (Debian 12: from bookworm-backports), and where other "
    "drivers are in its way set VK_ICD_FILENAMES=/usr/share/vulkan/icd.d/lvp_icd.json; with a GPU NVIDIA's driver and "
    "its Vulkan file (in a container NVIDIA_DRIVER_CAPABILITIES=all)"
)
TIMEOUT_S = 120
# Set once a probe has gone well, so that a worker's other processes need not probe again.
PROBED = "RLSVC_VULKAN_PROBED"


def require_vulkan() -> None:
    """Refuse to go on without a Vulkan device.

    Raises:
        UserError: none is found, with the reason and what to install.
    """
    if os.environ.get(PROBED) == _drivers():
        return
    try:
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"ManiSkill's renderer gives no answer within {TIMEOUT_S} s: {MEND}") from error
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [""]
        reason = last[0] if done.returncode > 0 else f"the probe crashed with signal {-done.returncode}"
        raise UserError(f"ManiSkill needs a Vulkan device, also for state observations ({reason}): {MEND}")
    os.environ[PROBED] = _drivers()


def _drivers() -> str:
    """What decides which drivers are found; never empty."""
    return f"VK_ICD_FILENAMES={os.environ.get('VK_ICD_FILENAMES')}"
