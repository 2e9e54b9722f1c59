"""Macros of what the CTAs of a cluster send each other while they draw."""

from types import SimpleNamespace
from typing import Any

from flashmesh.kernels.tilelang.sampler_device import BINS, COPIES, RANKS, WARPS

READS = RANKS * WARPS // 32


def messages() -> Any:
    """Returns the macros of what CTAs send: `links` are barriers, one for each kind of message."""
    import tilelang.language as T

    @T.macro
    def make_links(links):
        """By one thread. Links 0 to 2 bring maxima, 3 what rank 0 needs in the end, 4 and 5 histograms."""
        for i in T.unroll(6):
            T.call_extern("handle", "make_barrier", T.address_of(links[i]))
        T.call_extern("handle", "tl::fence_barrier_init")
        for i in T.unroll(3):
            T.call_extern("handle", "expect", T.address_of(links[i]), 4 * RANKS * WARPS)
        T.call_extern("handle", "expect", T.address_of(links[3]), 20 * RANKS)
        for i in T.unroll(2):
            T.call_extern("handle", "expect", T.address_of(links[4 + i]), 8 * RANKS * BINS)

    @T.macro
    def cluster_max(mail, links, link, rank, lane, warp, value):
        """Largest value of the cluster's threads."""
        of_warp = T.warp_reduce_max(value)
        if lane < RANKS:
            T.call_extern(
                "handle",
                "send_word",
                T.address_of(mail[link % 2, rank * WARPS + warp]),
                lane,
                T.reinterpret(of_warp, "uint32"),
                T.address_of(links[link]),
            )
        T.call_extern("handle", "await", T.address_of(links[link]), 0)
        most = T.alloc_var("float32")
        most = -T.infinity("float32")
        for i in T.unroll(READS):
            most = T.max(most, T.reinterpret(mail[link % 2, i * 32 + lane], "float32"))
        return T.warp_reduce_max(most)

    @T.macro
    def send_histogram(bins, sums, links, turn, tx):
        """Adds a CTA's bins to the sums of all CTAs, empties them, and waits for what the others add."""
        total = T.alloc_var("uint64")
        total = T.uint64(0)
        if tx < BINS:
            for i in T.unroll(COPIES):
                total += T.Cast("uint64", bins[i, tx])
                bins[i, tx] = T.uint32(0)
            for i in T.unroll(RANKS):
                T.call_extern(
                    "handle",
                    "send_sum",
                    T.address_of(sums[turn % 2, tx]),
                    i,
                    total,
                    T.address_of(links[4 + turn % 2]),
                )
        T.call_extern("handle", "await", T.address_of(links[4 + turn % 2]), turn // 2 % 2)
        if tx == 0:
            T.call_extern("handle", "expect", T.address_of(links[4 + turn % 2]), 8 * RANKS * BINS)

    return SimpleNamespace(
        make_links=make_links,
        cluster_max=cluster_max,
        send_histogram=send_histogram,
    )
