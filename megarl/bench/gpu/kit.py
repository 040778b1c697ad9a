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

FOLDER = os.path.dirname(os.path.abspath(__file__))
CHECKOUT = (
    os.path.dirname(os.path.dirname(os.path.dirname(FOLDER)))
    if FOLDER.endswith(os.path.join("megarl", "bench", "gpu"))
    else ""
)
KIT = os.path.join(CHECKOUT, "dist", "gpu-kit") if CHECKOUT else FOLDER
PIECES = ("wheels", "engine")  # folders of wheels; without the second, parts without an engine run
FROM_THE_MACHINE = ("torch", "triton", "numpy")
FROM_THE_KIT = ("megatron.core", "omegaconf", "yaml", "msgspec", "einops", "packaging")


def missing(wheels, rehearse):
    """The problems with this machine, one text for each thing it lacks."""
    problems = []
    for module in FROM_THE_MACHINE:
        if importlib.util.find_spec(module) is None:
            problems.append(
                f"{module} cannot be imported by {sys.executable}; name a Python that has it"
            )
    if not problems and not rehearse:
        import torch

        if torch.version.cuda is None:
            problems.append(
                f"PyTorch {torch.__version__} of {sys.executable} is built without CUDA; name a "
                "Python whose PyTorch has it"
            )
        elif not torch.cuda.is_available():
            problems.append(
                "no NVIDIA GPU can be used here: torch.cuda.is_available() is False (is "
                "nvidia-smi content?)"
            )
    if not rehearse and not (
        os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))
    ):
        problems.append(
            "no C compiler (cc, gcc or clang): Triton builds the launchers of its kernels with one"
        )
    tags = set()
    for wheel in wheels:
        tags.update(re.findall(r"-cp(\d)(\d+)-cp", os.path.basename(wheel)))
    if tags and tuple(map(str, sys.version_info[:2])) not in tags:
        python_versions = ", ".join(f"{major}.{minor}" for major, minor in sorted(tags))
        problems.append(
            f"the kit's compiled wheels are for Python {python_versions}, this is "
            f"{sys.version.split()[0]}; name another, or make the kit for it"
        )
    return problems


def main():
    arguments = sys.argv[1:]
    wheels = []
    for piece in PIECES:
        folder = os.path.join(KIT, piece)
        wheels += [os.path.join(folder, name) for name in listed(folder) if name.endswith(".whl")]
    missing_modules = []
    if CHECKOUT:
        missing_modules = [name for name in FROM_THE_KIT if not importable(name)]
    needed_wheels = wheels
    if CHECKOUT:
        needed_wheels = []
        if missing_modules or not importable("sglang"):
            needed_wheels = [wheel for wheel in wheels if not is_megarl(wheel)]
    problems = missing(needed_wheels, "--rehearse" in arguments)
    if (missing_modules or not CHECKOUT) and not needed_wheels:
        reason = "there are no wheels"
        if missing_modules:
            reason = f"{', '.join(missing_modules)} cannot be imported"
        problems.append(
            f"{reason}: `make gpu-kit`, on a machine with a network, makes {KIT}, which holds what "
            "is needed"
        )
    if problems:
        print(
            "make gpu lacks:\n" + "\n".join(f"- {problem}" for problem in problems), file=sys.stderr
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="megarl-gpu-kit-") as site:
        for wheel in needed_wheels:
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
