"""The mesh on the real engine: the same tokens alone, in a batch, in any chunks, cold, resent, offline or served."""

import threading

import pytest
from support.mesh import start_mesh
from support.prompts import mesh_answer, offline_tokens, random_prompt

from flashmesh.data import demo_folder
from flashmesh.kernels.engine import load_engine
from flashmesh.types import SamplingParams

LENGTHS = (1, 127, 128, 129, 269, 396, 400, 1000, 3000)
PARAMS = SamplingParams(max_tokens=10, temperature=0.8, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def engine():
    return load_engine(demo_folder(), role="all", name="demo", num_pages=64, num_slots=2)


@pytest.fixture(scope="module")
def expected(engine):
    """Tokens of one process with chunks of 1,024."""
    return {n: offline_tokens(engine, random_prompt(n), PARAMS) for n in LENGTHS}


@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_of_128_and_1024_give_the_same_tokens(engine, expected, length):
    assert offline_tokens(engine, random_prompt(length), PARAMS, 128) == expected[length]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    settings = {
        "prefill": {"chunk_tokens": 128},
        "decode": {"step_rows": 128, "num_slots": 8, "num_pages": 256},
    }
    with start_mesh(tmp_path_factory.mktemp("mesh"), engine="reference", overrides=settings) as it:
        yield it


@pytest.mark.parametrize("length", LENGTHS)
def test_the_mesh_gives_the_tokens_of_one_process_cold_and_resent(mesh, expected, length):
    with mesh.client() as client:
        cold, usage = mesh_answer(client, random_prompt(length), PARAMS)
        assert usage.cached_tokens == 0
        again, usage = mesh_answer(client, random_prompt(length), PARAMS)
    start = max(0, (length - 140) // 128 * 128)
    assert usage.cached_tokens == (start if start > 128 else 0)
    assert cold == again == expected[length]


def test_eight_at_once_give_what_each_gives_alone(mesh, expected):
    lengths = [n for n in LENGTHS if n != 3000]
    answers = {}

    def ask(length):
        with mesh.client() as client:
            answers[length], _ = mesh_answer(client, random_prompt(length), PARAMS)

    before = mesh.metrics("decode-0")
    threads = [threading.Thread(target=ask, args=(length,)) for length in lengths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {length: expected[length] for length in lengths}
    after = mesh.metrics("decode-0")
    tokens = after["flashmesh_decode_tokens_total"] - before["flashmesh_decode_tokens_total"]
    assert tokens == 8 * PARAMS.max_tokens
    # They shared steps: fewer steps than tokens, by far.
    assert after["flashmesh_steps_total"] - before["flashmesh_steps_total"] < tokens


def test_greedy_is_the_argmax_and_needs_no_seed(mesh, engine):
    params = SamplingParams(max_tokens=8)
    with mesh.client() as client:
        answer, _ = mesh_answer(client, random_prompt(300, seed=2), params)
    assert answer == offline_tokens(engine, random_prompt(300, seed=2), params)


def test_when_all_is_done_nothing_is_held(mesh):
    mesh.wait_idle()
    node = mesh.metrics("kvstore-0")
    assert node["flashmesh_kv_blocks"] > 0
    assert node['flashmesh_kv_bytes{state="leased",tier="memory"}'] == 0
