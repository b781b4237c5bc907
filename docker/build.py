"""Build an image of docker/ with Docker, Podman or Buildah, and run a short demo in the CPU image.

    python docker/build.py [cpu|cuda|sglang|vllm] [--build-arg NAME=VALUE] [--no-demo] [--debootstrap]

Docker is used if its daemon answers, otherwise Podman, otherwise Buildah, which needs no daemon. Podman and
Buildah use this machine's pip settings during the build: the files are mounted while commands run, and are
not part of the image. Docker has no such mounts and does not use these settings.

If Buildah cannot reach a registry of images, root on Debian gets a replacement for the official base image
under the same name: Debian with its own Python, made by debootstrap (`--debootstrap` forces this). If
PyTorch's own index cannot be reached, torch comes from pip's configured index.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEBIAN = "bookworm"
OFFICIAL = f"python:3.11-slim-{DEBIAN}"
PACKAGES = "ca-certificates,python3,python3-pip,python3-venv"
SHORT = (
    "from tandem.cli.main import main; from tandem.demo import program; program.SFT_STEPS = 20; exit(main())"
)
DEMO = ("env", "OMP_NUM_THREADS=1", "python", "-c", SHORT, "demo", "--out", "/tmp/demo")
DEMO += ("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
DEMO += ("trainer.total_training_steps=4",)
# Settings for Buildah without a daemon: no namespaces, no overlay file system.
PLAIN = {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"}
CONTAINER = "tandem-build"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
REACH_S, PULL_S = 10, 600


def run(*words: str, **environment: str) -> None:
    """Run a command to its end; exit if it fails."""
    print("+", " ".join(words), flush=True)
    if status := subprocess.run(words, cwd=ROOT, env=os.environ | environment, check=False).returncode:
        sys.exit(f"{words[0]} {words[1]} ended with status {status}")


def builder() -> str:
    """Return the program that builds images on this machine."""
    if shutil.which("docker"):
        answer = subprocess.run(["docker", "info"], capture_output=True, timeout=60, check=False)
        if answer.returncode == 0:
            return "docker"
    for name in ("podman", "buildah"):
        if shutil.which(name):
            return name
    sys.exit("no program to build images was found: start Docker's daemon, or install podman or buildah")


def base_of(dockerfile: Path, given: Sequence[str]) -> str:
    """Return the base image of a Dockerfile, with its arguments filled in."""
    text = dockerfile.read_text(encoding="utf-8")
    values = dict(re.findall(r"^ARG (\w+)=(\S*)$", text, re.MULTILINE)) | dict(
        pair.split("=", 1) for pair in given
    )
    (image,) = re.findall(r"^FROM (\S+)$", text, re.MULTILINE)
    return re.sub(r"\$\{(\w+)\}", lambda found: values[found[1]], image)


def reaches(url: str) -> bool:
    """Return whether this machine gets an answer from a URL."""
    try:
        with urllib.request.urlopen(url, timeout=REACH_S):
            return True
    except (OSError, ValueError):
        return False


def has_base(image: str) -> bool:
    """Return whether Buildah has the base image or can pull it."""
    for command in (["inspect", "--type", "image", image], ["pull", "--quiet", image]):
        try:
            done = subprocess.run(
                ["buildah", *command],
                env=os.environ | PLAIN,
                capture_output=True,
                timeout=PULL_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        if done.returncode == 0:
            return True
    return False


def make_base(name: str, folder: Path) -> None:
    """Make a replacement for the official Python image, and store it under the same name."""
    if name != OFFICIAL:
        sys.exit(f"--debootstrap can only make {OFFICIAL}, because {DEBIAN} has that Python; got {name}")
    root = folder / "root"
    run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", DEBIAN, str(root))
    (root / "usr/bin/python").symlink_to("python3")
    for marker in root.glob("usr/lib/python3.*/EXTERNALLY-MANAGED"):
        marker.unlink()  # as in the official image, pip may install into the system Python
    run("buildah", "from", "--name", f"{CONTAINER}-base", "scratch", **PLAIN)
    try:
        run("buildah", "copy", "--quiet", f"{CONTAINER}-base", str(root), "/", **PLAIN)
        run("buildah", "commit", "--quiet", f"{CONTAINER}-base", f"docker.io/library/{name}", **PLAIN)
    finally:
        run("buildah", "rm", f"{CONTAINER}-base", **PLAIN)


def pip_settings() -> dict[str, str]:
    """Return the settings that `pip config list` shows; variables override files, as in pip."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    pairs = [line.partition("=") for line in listed.stdout.splitlines()]
    pairs.sort(key=lambda pair: pair[0].startswith(":env:"))
    return {name.rpartition(".")[2]: ast.literal_eval(value) for name, _, value in pairs}


def mounts(folder: Path, settings: Mapping[str, str]) -> Iterator[str]:
    """Yield options that mount pip's settings, and the files that they name, while commands run."""
    file = folder / "pip.conf"
    lines = (f"{name} = " + value.replace("\n", "\n    ") for name, value in settings.items())
    file.write_text("\n".join(["[global]", *lines]) + "\n", encoding="utf-8")
    yield f"--volume={file}:/etc/pip.conf:ro"
    words = {word.removeprefix("file://") for value in settings.values() for word in value.split()}
    for path in sorted(Path(word) for word in words if word.startswith("/")):
        # an index of files may refer to other files next to it, so its folder is mounted too
        held = path.parent if path.is_dir() and path.name == "simple" else path
        if held.exists():
            yield f"--volume={held}:{held}:ro"


def build(program: str, dockerfile: Path, tag: str, options: argparse.Namespace) -> None:
    """Build the image with one of the three programs."""
    arguments = [word for pair in options.build_arg for word in ("--build-arg", pair)]
    common = ["--file", str(dockerfile), "--tag", tag, *arguments]
    with tempfile.TemporaryDirectory(prefix="tandem-image-") as name:
        if program == "docker":
            run("docker", "build", *common, ".")
        elif program == "podman":
            run("podman", "build", *common, "--network", "host", *mounts(Path(name), pip_settings()), ".")
        else:
            base = base_of(dockerfile, options.build_arg)
            if options.debootstrap or not has_base(base):
                print(f"making {base} from Debian's packages", flush=True)
                make_base(base, Path(name))
            common += ["--network", "host", *mounts(Path(name), pip_settings())]
            run("buildah", "bud", "--pull-never", *common, ".", **PLAIN)


def demo(program: str, tag: str) -> None:
    """Run a short demo in the image, as the image's user."""
    if program != "buildah":
        run(program, "run", "--rm", "--shm-size=8g", tag, *DEMO)
        return
    run("buildah", "from", "--pull-never", "--name", CONTAINER, tag, **PLAIN)
    try:
        run("buildah", "run", CONTAINER, "--", *DEMO, **PLAIN)
    finally:
        run("buildah", "rm", CONTAINER, **PLAIN)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = sorted(path.suffix[1:] for path in (ROOT / "docker").glob("Dockerfile.*"))
    parser.add_argument("kind", nargs="?", default="cpu", choices=kinds)
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--no-demo", action="store_true", help="build only")
    parser.add_argument(
        "--debootstrap", action="store_true", help="make the base image from Debian's packages"
    )
    options = parser.parse_args()
    program = "buildah" if options.debootstrap else builder()
    given = [pair.partition("=")[0] for pair in options.build_arg]
    if options.kind == "cpu" and "TORCH_FROM" not in given and not reaches(TORCH_INDEX):
        print(f"{TORCH_INDEX} cannot be reached; using pip's default index for torch", flush=True)
        options.build_arg.append("TORCH_FROM=")
    began, tag = time.monotonic(), f"localhost/tandem:{options.kind}"
    build(program, ROOT / "docker" / f"Dockerfile.{options.kind}", tag, options)
    print(f"{tag} was built by {program} in {time.monotonic() - began:.0f} s", flush=True)
    environment = PLAIN if program == "buildah" else {}
    run(program, "images", tag, **environment)
    if options.kind == "cpu" and not options.no_demo:
        demo(program, tag)


if __name__ == "__main__":
    main()
