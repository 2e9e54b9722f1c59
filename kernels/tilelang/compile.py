"""`python -m flashmesh.kernels.tilelang.compile [NAME ...]`: builds kernels for Hopper, with or without a GPU.

Names select modules ("dense") or variants ("dense.1792x5120"); none means every kernel of V4.1-Flash.
"""

import importlib
import pkgutil
import sys
import time

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
    """Builds, a line a kernel; returns how many failed, or 1 where a name fits none."""
    chosen = [
        v for v in all_variants() if not names or v.name in names or v.name.split(".")[0] in names
    ]
    failed = 0
    for variant in chosen:
        started = time.perf_counter()
        try:
            variant.build()
        except (
            Exception
        ) as error:  # TileLang and nvcc raise many kinds; the others shall still be built
            failed += 1
            print(f"{variant.name}: {error}", file=sys.stderr, flush=True)
        else:
            print(f"{variant.name}: {time.perf_counter() - started:.1f} s", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} kernels built")
    return failed if chosen else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
