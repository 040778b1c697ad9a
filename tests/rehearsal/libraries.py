"""The system libraries that vendor packages link, besides glibc and the C++ runtime, by `readelf
-d` over an environment.

    python tests/rehearsal/libraries.py [SITE-PACKAGES]

Prints a row for each system library: its package of Debian 12, and the Python packages that need
it. Exit status 1 if a library is not listed here, or there are none. Needs readelf.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

GLIBC_AND_CXX = (
    "libc libm libmvec libdl libpthread librt libutil libresolv ld-linux-x86-64 libgcc_s libstdc++"
)
ALWAYS = tuple(f"{name}.so." for name in GLIBC_AND_CXX.split())
SYSTEM = {  # library → where it comes from
    "libcuda.so.1": "NVIDIA's driver",
    "libibverbs.so.1": "libibverbs1",
    "libmlx5.so.1": "ibverbs-providers",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
    "libz.so.1": "zlib1g",
}
UNUSED = {  # files that MegaRL never loads → how the names of the libraries that they need begin
    "NVSHMEM's other transports": (
        "libfabric.",
        "libmpi.",
        "liboshmem.",
        "libpmix.",
        "librdmacm.",
        "libucp.",
        "libucs.",
    ),
    "videos": ("libav", "libsw", "libheif."),
    "torch_memory_saver for CUDA 12": ("libcudart.so.12",),
    "other pools of Numba's threads": ("libgomp.", "libtbb."),
}


def main(folder: Path) -> int:
    if shutil.which("readelf") is None:
        print("there is no readelf: install binutils", file=sys.stderr)
        return 2
    needed = defaultdict(set)
    provided = set()
    files = [
        str(path) for path in folder.rglob("*.so*") if path.is_file() and not path.is_symlink()
    ]
    provided |= {path.name for path in folder.rglob("*.so*")}
    for path, name, library in entries(files):
        if name == "SONAME":
            provided.add(library)
        elif not library.startswith(ALWAYS):
            needed[library].add(Path(path).relative_to(folder).parts[0].split(".")[0])
    failed = 0
    unused = tuple(beginning for beginnings in UNUSED.values() for beginning in beginnings)
    for library in sorted(
        library for library in needed.keys() - provided if not library.startswith(unused)
    ):
        failed |= library not in SYSTEM
        print(
            f"{library:24s} {SYSTEM.get(library, 'not listed'):20s} "
            f"{', '.join(sorted(needed[library]))}"
        )
    print(f"{len(files)} libraries in {folder}")
    return int(failed or not files)


def entries(files: list[str]) -> Iterator[tuple[str, str, str]]:
    """(file, "NEEDED" or "SONAME", the library)."""
    for begin in range(0, len(files), 500):
        batch = files[begin : begin + 500]
        # some are texts, not libraries
        listing = subprocess.run(["readelf", "-dW", *batch], capture_output=True, text=True).stdout
        path = batch[0]
        for line in listing.splitlines():
            if line.startswith("File: "):
                path = line.removeprefix("File: ")
            for name in ("NEEDED", "SONAME"):
                if f"({name})" in line:
                    yield path, name, line.rpartition("[")[2].rstrip("]")


if __name__ == "__main__":
    sys.exit(
        main(Path(sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_path("purelib")).resolve())
    )
