import subprocess

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """Yield a file system with room for 2 MB; skip the test if this user may not mount one."""
    folder = tmp_path / "small_disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
