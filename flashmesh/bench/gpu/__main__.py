"""`python -m flashmesh.bench.gpu [FAMILY ...] [--markdown FILE]`: a line a case."""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from flashmesh.bench.gpu import FAMILIES
from flashmesh.bench.gpu.measure import ceilings_of_this_device, figures

if TYPE_CHECKING:
    from flashmesh.bench.gpu.case import Figure

HEAD = "| op.size | of ceiling | us | TB/s | TFLOP/s | peer | over peer |\n" + "| --- " * 7 + "|\n"


def main(argv: list[str]) -> int:
    """Measures; a family that fails does not cost the others. Returns how many failed."""
    parser = argparse.ArgumentParser(prog="python -m flashmesh.bench.gpu")
    parser.add_argument("families", nargs="*", metavar="FAMILY", default=FAMILIES)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write a table too")
    args = parser.parse_args(argv)
    ceilings = ceilings_of_this_device()
    print(
        f"copy {ceilings.copy / 1e12:.2f} TB/s, bf16 {ceilings.bf16 / 1e12:.0f}, "
        f"fp8 {ceilings.fp8 / 1e12:.0f} TFLOP/s"
    )
    failed, rows = 0, []
    for family in args.families:
        try:
            for figure in figures(family, ceilings):
                print(figure, flush=True)
                rows.append(_row(figure))
        except Exception:
            failed += 1
            traceback.print_exc()
    if args.markdown is not None:
        args.markdown.write_text(HEAD + "".join(rows))
    return failed


def _row(figure: Figure) -> str:
    moved = f"{figure.num_bytes / figure.took / 1e12:.2f}" if figure.num_bytes else ""
    done = f"{figure.num_flops / figure.took / 1e12:.0f}" if figure.num_flops else ""
    over = f"{figure.peer_took / figure.took:.2f}x" if figure.peer_took else ""
    return (
        f"| `{figure.name}` | {figure.bound / figure.took:.2f} | {figure.took * 1e6:.1f} | "
        f"{moved} | {done} | {figure.peer_name} | {over} |\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
