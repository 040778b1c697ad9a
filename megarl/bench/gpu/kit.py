"""The program of `make gpu`; as run.py it is also the program of the kit.

It needs only Python, no network, and says what is missing.

    python3 run.py [--output DIR] [--parts NAME,…] [--rehearse]

The kit is this file beside folders of wheels, which are unpacked to a temporary folder: nothing is
installed. In a checkout, megarl comes from the checkout. Packages that this Python lacks come from
the wheels in dist/gpu-kit, if that exists.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
CHECKOUT = (
    os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
    if HERE.endswith(os.path.join("megarl", "bench", "gpu"))
    else ""
)
KIT = os.path.join(CHECKOUT, "dist", "gpu-kit") if CHECKOUT else HERE
PIECES = ("wheels", "engine")  # folders of wheels; without the second, parts without an engine run
FROM_THE_MACHINE = ("torch", "triton", "numpy")
FROM_THE_KIT = ("megatron.core", "omegaconf", "yaml", "msgspec", "einops", "packaging")


def missing(wheels, rehearse):
    """The problems with this machine, one text for each thing it lacks."""
    found = []
    for module in FROM_THE_MACHINE:
        if importlib.util.find_spec(module) is None:
            found.append(
                f"{module} cannot be imported by {sys.executable}; name a Python that has it"
            )
    if not found and not rehearse:
        import torch

        if torch.version.cuda is None:
            found.append(
                f"PyTorch {torch.__version__} of {sys.executable} is built without CUDA; name a "
                "Python whose PyTorch has it"
            )
        elif not torch.cuda.is_available():
            found.append(
                "no NVIDIA GPU can be used here: torch.cuda.is_available() is False (is "
                "nvidia-smi content?)"
            )
    if not rehearse and not (
        os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))
    ):
        found.append(
            "no C compiler (cc, gcc or clang): Triton builds the launchers of its kernels with one"
        )
    tags = {
        tag for wheel in wheels for tag in re.findall(r"-cp(\d)(\d+)-cp", os.path.basename(wheel))
    }
    if tags and tuple(map(str, sys.version_info[:2])) not in tags:
        wanted = ", ".join(f"{major}.{minor}" for major, minor in sorted(tags))
        found.append(
            f"the kit's compiled wheels are for Python {wanted}, this is "
            f"{sys.version.split()[0]}; name another, or make the kit for it"
        )
    return found


def main():
    arguments = sys.argv[1:]
    wheels = [
        os.path.join(KIT, piece, name)
        for piece in PIECES
        for name in listed(os.path.join(KIT, piece))
        if name.endswith(".whl")
    ]
    lacking = [] if not CHECKOUT else [name for name in FROM_THE_KIT if not importable(name)]
    wanted = wheels
    if CHECKOUT:
        wanted = (
            [wheel for wheel in wheels if not is_megarl(wheel)]
            if lacking or not importable("sglang")
            else []
        )
    problems = missing(wanted, "--rehearse" in arguments)
    if (lacking if CHECKOUT else True) and not wanted:
        what = f"{', '.join(lacking)} cannot be imported" if lacking else "there are no wheels"
        problems.append(
            f"{what}: `make gpu-kit`, on a machine with a network, makes {KIT}, which holds what "
            "is needed"
        )
    if problems:
        print(
            "make gpu lacks:\n" + "\n".join(f"- {problem}" for problem in problems), file=sys.stderr
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="megarl-gpu-kit-") as site:
        for wheel in wanted:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        path = [*([CHECKOUT] if CHECKOUT else []), site, os.environ.get("PYTHONPATH", "")]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, path)))
        if not CHECKOUT and os.path.exists(os.path.join(KIT, "commit")):
            with open(os.path.join(KIT, "commit"), encoding="utf-8") as file:
                environment["MEGARL_COMMIT"] = file.read().strip()
        return subprocess.call(
            [sys.executable, "-P", "-m", "megarl.bench.gpu", *arguments], env=environment
        )


def listed(folder):
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def is_megarl(wheel):
    return os.path.basename(wheel).startswith("megarl-")


def importable(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


if __name__ == "__main__":
    sys.exit(main())
