"""Loading, Engram lookups, and how far the reference is from the golden vectors.

`model.load_gb_per_s`: bytes a second of `load_weights` into the stored form, from page cache, checks
and fingerprint included, of a model that is nine tenths FP4. `engram.rows_per_s`: random rows of a
table of the released shape, a file of holes, so this is the cost of the path and of page faults, not
of a disk. `engram.rss_anon_growth_mb`: anonymous memory that these lookups left behind; a table that
is copied anywhere shows here. `model.golden_max_rel_err.*`: largest difference of logits over the
largest logit, on rows that no rounding boundary makes sensitive, by the form of the weights; only in
a source checkout.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from flashmesh.bench.registry import Result, p50
from flashmesh.bench.sparse_checkpoint import NoSparseFilesError, write_random, write_sparse_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

NUM_LOADS = 5
LOAD_SIZES: dict[str, Any] = {
    "hidden_size": 2048,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 16,
    "dspark_n_routed_experts": 4,
}
TABLE_ROWS, TABLE_WIDTH, COLUMNS = 384_006_168, 256, 24
LOOKUP_TOKENS = 128
NUM_LOOKUPS = 20
WARM_UP_LOOKUPS = 2
QUIET = 1e-3
GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "data"
GOLDEN_FILES = {"bf16": "model", "fp8_fp4": "model_quantized"}
GOLDEN_SEQUENCES = ("s7", "s40", "s150")
GIGA, MEGA = 1e9, 1e6

num_steps = NUM_LOADS + 1 + len(GOLDEN_FILES)


def run(advance: Callable[[], None]) -> Iterator[Result]:
    """Measures in this process, below the system's folder for temporary files."""
    with tempfile.TemporaryDirectory() as name:
        yield load_rate(Path(name), advance)
    with tempfile.TemporaryDirectory() as name:
        try:
            yield from lookups(Path(name))
        except NoSparseFilesError as error:
            print(f"engram figures skipped: {error}", file=sys.stderr)
        advance()
    if not GOLDEN.is_dir():
        print(f"model.golden_max_rel_err skipped: no {GOLDEN}", file=sys.stderr)
        return
    for form, file in GOLDEN_FILES.items():
        yield golden_error(form, file)
        advance()


def load_rate(folder: Path, advance: Callable[[], None]) -> Result:
    """Loads a checkpoint that was just written, and so lies in page cache."""
    from flashmesh.kernels.config import ModelConfig
    from flashmesh.kernels.demo import demo_config
    from flashmesh.kernels.shards import SINGLE_FILE
    from flashmesh.kernels.weights import load_weights

    raw = demo_config()
    config = ModelConfig.from_dict(raw | {"text_config": raw["text_config"] | LOAD_SIZES})
    path = folder / SINGLE_FILE
    write_random(path, config)
    rates = []
    for _ in range(NUM_LOADS):
        begin = time.perf_counter()
        load_weights(folder, config, "all", expand_below_bytes=0)
        rates.append(path.stat().st_size / GIGA / (time.perf_counter() - begin))
        advance()
    return p50("model.load_gb_per_s", "GB/s", rates)


def lookups(folder: Path) -> Iterator[Result]:
    """Looks random rows up in a table of the released size.

    Raises:
        NoSparseFilesError: the file system has no room for holes.
    """
    from flashmesh.kernels.checkpoint import Place
    from flashmesh.kernels.engram_table import EngramTable
    from flashmesh.kernels.shards import SINGLE_FILE, open_shards
    from flashmesh.kernels.tensor_names import engram_table_name, scale_name

    name = engram_table_name(1)
    write_sparse_table(folder / SINGLE_FILE, name, TABLE_ROWS, TABLE_WIDTH)
    (shard,) = open_shards(folder)
    table = EngramTable.open(Place(shard, name), Place(shard, scale_name(name)))
    draw = torch.Generator().manual_seed(0)
    count = COLUMNS * LOOKUP_TOKENS
    before_bytes, seconds = 0, 0.0
    for lookup in range(WARM_UP_LOOKUPS + NUM_LOOKUPS):
        if lookup == WARM_UP_LOOKUPS:
            before_bytes = rss_anon_bytes()
        ids = torch.randint(TABLE_ROWS, (count,), generator=draw).numpy()
        begin = time.perf_counter()
        table.rows(ids)
        if lookup >= WARM_UP_LOOKUPS:
            seconds += time.perf_counter() - begin
    growth_bytes = rss_anon_bytes() - before_bytes
    yield Result("engram.rows_per_s", NUM_LOOKUPS * count / seconds, "rows/s", NUM_LOOKUPS)
    yield Result("engram.rss_anon_growth_mb", growth_bytes / MEGA, "MB", NUM_LOOKUPS)


def rss_anon_bytes() -> int:
    """Anonymous memory of this process; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), 0)


def golden_error(form: str, file: str) -> Result:
    """Compares the logits of whole sequences with the golden ones."""
    from flashmesh.kernels.door import RowRun, SessionPlan
    from flashmesh.kernels.engine import load_engine
    from flashmesh.kernels.shards import SINGLE_FILE

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("config.json", "tokenizer.json"):
            shutil.copy(GOLDEN / part, folder)
        shutil.copy(GOLDEN / f"{file}.safetensors", folder / SINGLE_FILE)
        engine = load_engine(folder, role="all", name="golden", num_pages=4, num_slots=1)
    inputs, outputs, noise = (
        load_file(GOLDEN / f"{kind}.safetensors")
        for kind in ("inputs", "outputs_fp32", "row_noise")
    )
    errors = []
    for sequence in GOLDEN_SEQUENCES:
        wanted: Tensor = outputs[f"{sequence}.logits"].float()
        tokens = inputs[sequence].tolist()
        plan = SessionPlan(first_pos=0, global_start=0, decoder_start=0, max_tokens=len(tokens))
        with engine.open(plan, []) as session:
            run = RowRun(session=session, tokens=tokens, num_logits=len(tokens), keep_logits=True)
            logits: Tensor = engine.step([run])[0].logits
        gap = (logits - wanted).abs().amax(1)[noise[f"{sequence}.row_noise"] < QUIET]
        errors.append(float(gap.max() / wanted.abs().max()))
    return Result(f"model.golden_max_rel_err.{form}", max(errors), "x", len(errors))
