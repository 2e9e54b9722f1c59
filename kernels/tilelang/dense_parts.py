"""What the products with F8 and with bf16 weights share: the order of tiles, and when a stage is free."""

from types import SimpleNamespace

WORKERS = 132
"""SMs of an H200, and blocks of a large-batch kernel."""

PANEL = 8
"""Tiles of tokens that go through the weight together, so that neighbours in order share rows of both in L2."""

# Indices are right by construction, and the device code synchronises itself.
PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
}


def steps(tokens: int, stages: int) -> SimpleNamespace:
    """Returns the macros, for tiles of `tokens` and a ring of `stages`."""
    import tilelang.language as T

    @T.macro
    def find_tile(index, blocks, across, height: T.Ref, tile: T.Ref, block: T.Ref):
        """Finds pair number `index` of a tile of tokens, of `across`, and a block of rows, of `blocks`."""
        height = T.min(PANEL, across - index // (PANEL * blocks) * PANEL)
        tile = index // (PANEL * blocks) * PANEL + index % (PANEL * blocks) % height  # noqa: F841 (the caller's)
        block = index % (PANEL * blocks) // height  # noqa: F841 (the caller's)

    @T.macro
    def free_before(sums, empty, i: T.Ref, pending, thread, started):
        """Waits until at most `pending` products are under way, and frees the stage before that of step `i`."""
        T.call_extern("handle", f"product::wait<{pending}, {tokens}>", T.address_of(sums[0]))
        if thread % 128 == 0 and started:
            T.barrier_arrive(empty[(i + stages - 1) % stages])

    return SimpleNamespace(find_tile=find_tile, free_before=free_before)
