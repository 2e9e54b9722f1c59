"""Several routers before the same workers: nothing that one knows is needed by another."""

import itertools

from support.mesh import start_mesh
from support.prompts import mesh_answer, offline_tokens, random_prompt
from support.waiting import wait_until

from flashmesh.client import RouterClient, prompt_request
from flashmesh.kernels.simulated import SimulatedEngine
from flashmesh.types import SamplingParams

PARAMS = SamplingParams(max_tokens=6)
LONG = SamplingParams(max_tokens=400)


def leases(mesh):
    return mesh.metrics("kvstore-0")["flashmesh_kv_leases"]


def test_routers_share_hits_and_one_that_dies_is_replaced_by_any_other(tmp_path):
    settings = {"router": {"lease_ttl_s": 2.0}, "model": {"sim_step_ms": 5.0}}
    with (
        start_mesh(tmp_path, num_routers=3, num_decode=2, overrides=settings) as mesh,
        RouterClient(mesh.address("router")) as one,
        RouterClient(mesh.address("router-1")) as two,
        RouterClient(mesh.address("router-2")) as three,
    ):
        routers = itertools.cycle((one, two, three))
        for seed in range(6):
            prompt = random_prompt(700, seed=seed)
            expected = offline_tokens(SimulatedEngine(), prompt, PARAMS)
            for _ in range(3):
                assert mesh_answer(next(routers), prompt, PARAMS)[0] == expected

        prompt = random_prompt(700, seed=77)
        mesh_answer(one, prompt, PARAMS)
        wait_until(
            lambda: mesh_answer(two, prompt, PARAMS)[1].cached_tokens == 512,
            "another router finds in the index what the first one had stored",
        )

        stream = two.generate(prompt_request(prompt, LONG, seed=1))
        next(stream)
        assert leases(mesh) == 1
        mesh.kill("router-1")
        stream.close()
        # The client's retry, on any other router.
        assert mesh_answer(three, prompt, LONG)[0] == offline_tokens(
            SimulatedEngine(), prompt, LONG
        )
        wait_until(lambda: leases(mesh) == 0, "the dead router's lease has run out")
        for name in mesh.names("decode"):
            wait_until(
                lambda name=name: not mesh.metrics(name)["flashmesh_decode_requests"],
                "its stream has ended",
            )
