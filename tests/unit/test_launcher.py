"""What the launcher tells its children, and what it does when one does not come up."""

from __future__ import annotations

import pytest

from flashmesh.errors import WorkerLost
from flashmesh.launcher import MeshPlan, Process, running_mesh

LIMIT_S = 60.0


def environment(plan, name, tmp_path):
    return Process(name, plan, tmp_path)._env


def test_every_process_is_named_after_its_service():
    plan = MeshPlan(num_prefill=2, num_decode=1, num_kvstore=0)
    assert plan.process_names() == ["prefill-0", "prefill-1", "decode-0", "router"]


def test_settings_of_a_process_win_over_its_service_and_both_over_the_launcher(tmp_path):
    settings = {
        "mesh": {"log_level": "DEBUG"},
        "decode": {"num_slots": 4, "num_pages": 9},
        "decode-1": {"num_slots": 2, "bind": "127.0.0.1:7777"},
    }
    plan = MeshPlan(redis_url="unix:///r", num_decode=2, settings=settings)
    first = environment(plan, "decode-0", tmp_path)
    second = environment(plan, "decode-1", tmp_path)
    assert first["FLASHMESH_DECODE__NUM_SLOTS"] == "4"
    assert second["FLASHMESH_DECODE__NUM_SLOTS"] == "2"
    assert first["FLASHMESH_DECODE__BIND"] == "127.0.0.1:0"
    assert second["FLASHMESH_DECODE__BIND"] == "127.0.0.1:7777"
    assert first["FLASHMESH_DECODE__NUM_PAGES"] == second["FLASHMESH_DECODE__NUM_PAGES"] == "9"
    assert first["FLASHMESH_DECODE__ID"] == "decode-0"
    assert first["FLASHMESH_MESH__REDIS_URL"] == "unix:///r"
    assert first["FLASHMESH_MESH__LOG_LEVEL"] == "DEBUG"


def test_a_shared_redis_gets_no_fixed_names_and_no_url(tmp_path):
    names = environment(MeshPlan(name_workers=False), "decode-0", tmp_path)
    assert "FLASHMESH_DECODE__ID" not in names
    assert "FLASHMESH_MESH__REDIS_URL" not in names


def test_only_the_router_takes_the_router_port(tmp_path):
    plan = MeshPlan(router_bind="127.0.0.1:7100")
    assert environment(plan, "router", tmp_path)["FLASHMESH_ROUTER__BIND"] == "127.0.0.1:7100"
    assert environment(plan, "decode-0", tmp_path)["FLASHMESH_DECODE__BIND"] == "127.0.0.1:0"


def test_a_child_that_dies_at_the_start_shows_its_last_words(tmp_path):
    plan = MeshPlan(num_prefill=1, num_decode=0, settings={"prefill": {"num_slots": 0}})
    with (
        pytest.raises(WorkerLost, match=r"prefill-0 ended with status 1") as failed,
        running_mesh(plan, tmp_path, grace_s=LIMIT_S, timeout_s=LIMIT_S),
    ):
        pytest.fail("it came up")
    assert "prefill.num_slots = '0': allowed: 1 to 4096" in str(failed.value)
    assert not list(tmp_path.glob("*.ports.json"))
