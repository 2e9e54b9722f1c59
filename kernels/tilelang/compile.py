"""`python -m flashmesh.kernels.tilelang.compile [NAME ...]`: builds kernels for Hopper, with or without a GPU.

Names select modules ("dense") or variants ("dense.1792x5120"); none means every kernel of V4.1-Flash. A process a core
builds, since TileLang's parser does not bear threads; what is in its cache on disk is not built again.
"""

import importlib
import multiprocessing
import os
import pkgutil
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import flashmesh.kernels.tilelang as package
from flashmesh.kernels.tilelang.build import Variant


def all_variants() -> list[Variant]:
    """Returns every kernel that V4.1-Flash runs, module by module."""
    variants: list[Variant] = []
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        if hasattr(module, "variants"):
            variants += module.variants()
    return variants


def main(names: list[str]) -> int:
    """Builds, a line a kernel; returns how many failed, or 1 where a name fits none or there is no compiler."""
    if not (shutil.which("nvcc") or os.environ.get("CUDA_HOME")):
        print(
            "nvcc is not on the path: install CUDA (these are built with 13.0) or set CUDA_HOME",
            file=sys.stderr,
        )
        return 1
    chosen = [
        variant.name
        for variant in all_variants()
        if not names or variant.name in names or variant.name.split(".")[0] in names
    ]
    failed = 0
    workers = max(1, min(os.cpu_count() or 1, len(chosen)))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for name, (took, error) in zip(chosen, pool.map(_build, chosen), strict=True):
            failed += bool(error)
            if error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
            else:
                print(f"{name}: {took:.1f} s", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} kernels built")
    return failed if chosen else 1


def _build(name: str) -> tuple[float, str]:
    """Builds a kernel; returns seconds, and what went wrong or nothing."""
    (variant,) = (variant for variant in all_variants() if variant.name == name)
    started = time.perf_counter()
    try:
        variant.build()
    except (
        Exception
    ) as error:  # TileLang and nvcc raise many kinds; the others shall still be built
        return 0.0, str(error) or repr(error)
    return time.perf_counter() - started, ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
