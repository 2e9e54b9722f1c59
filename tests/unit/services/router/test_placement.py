"""Placement with numbers."""

from flashmesh.services.router.placement import Choice, ReplicaView, place


def test_the_least_loaded_worker_wins():
    views = [ReplicaView("a", 900, 0), ReplicaView("b", 100, 0)]
    assert place(views, 50) == Choice("b", 150)


def test_load_counts_from_the_moment_of_dispatch():
    # b has reported nothing yet, but this router has just sent it 1,000 rows.
    views = [ReplicaView("a", 900, 0), ReplicaView("b", 0, 1000)]
    assert place(views, 50) == Choice("a", 950)


def test_equal_loads_are_decided_by_name_so_that_routers_agree():
    views = [ReplicaView("b", 5, 0), ReplicaView("a", 5, 0)]
    assert place(views, 1) == Choice("a", 6)


def test_a_worker_that_failed_this_request_is_the_last_resort():
    views = [ReplicaView("a", 0, 0, avoid=True), ReplicaView("b", 1e6, 0)]
    assert place(views, 1).id == "b"
    assert place(views[:1], 1).id == "a"


def test_without_candidates_there_is_no_choice():
    assert place([], 1) is None
