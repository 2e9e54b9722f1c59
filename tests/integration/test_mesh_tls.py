"""A mesh under mutual TLS: every hop works, and nobody without a certificate gets in."""

import grpc
import pytest
import trustme
from support.mesh import start_mesh
from support.prompts import mesh_answer, offline_tokens, random_prompt

from flashmesh import cli, errors
from flashmesh.client import health_status
from flashmesh.config import MeshConfig
from flashmesh.errors import ConfigError
from flashmesh.kernels.simulated import SimulatedEngine
from flashmesh.tls import Tls
from flashmesh.types import SamplingParams

PROMPT = random_prompt(700, seed=2)
PARAMS = SamplingParams(max_tokens=5)


def certificates(folder, *names):
    """Settings that name fresh certificates of a fresh authority."""
    folder.mkdir(exist_ok=True)
    authority = trustme.CA()
    issued = authority.issue_cert(*names)
    files = {name: folder / f"{name}.pem" for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(files["ca"])
    issued.cert_chain_pems[0].write_to_path(files["cert"])
    issued.private_key_pem.write_to_path(files["key"])
    return {f"tls_{name}_file": str(path) for name, path in files.items()}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pki")
    return certificates(folder, "flashmesh") | {"tls_server_name": "flashmesh"}


@pytest.fixture(scope="module")
def tls(settings):
    return MeshConfig(**settings).tls()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory, settings, tls):
    folder = tmp_path_factory.mktemp("mesh")
    with start_mesh(folder, overrides={"mesh": settings}, tls=tls) as mesh:
        yield mesh


def test_a_prompt_takes_every_hop(mesh, tls):
    with mesh.client(tls=tls) as client:
        assert mesh_answer(client, PROMPT, PARAMS)[0] == offline_tokens(
            SimulatedEngine(), PROMPT, PARAMS
        )
        assert mesh_answer(client, PROMPT, PARAMS)[1].cached_tokens == 512
    assert mesh.metrics("prefill-0")["flashmesh_prefill_blocks_total"] == 4


@pytest.mark.parametrize("name", ["router", "prefill-0", "decode-0", "kvstore-0"])
def test_no_service_answers_in_the_clear_or_to_a_client_without_a_certificate(mesh, tls, name):
    address = mesh.address(name)
    assert health_status(address, tls=tls) == "SERVING"
    assert health_status(address).startswith("UNAVAILABLE")
    only_ca = grpc.ssl_channel_credentials(tls.ca)
    with (
        grpc.secure_channel(address, only_ca, options=tls.channel_options()) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_client_of_another_authority_is_refused(mesh, tls, tmp_path):
    stranger = MeshConfig(**certificates(tmp_path, "flashmesh")).tls()
    forged = Tls(tls.ca, stranger.cert, stranger.key, "flashmesh")
    with mesh.client(tls=forged) as client, pytest.raises(errors.WorkerLost):
        client.tokenize("hello")


def test_a_server_of_another_name_is_not_trusted(mesh, tls):
    other = Tls(tls.ca, tls.cert, tls.key, "somebody-else")
    with mesh.client(tls=other) as client, pytest.raises(errors.WorkerLost):
        client.tokenize("hello")


def test_commands_take_the_certificates_from_the_configuration(mesh, settings, tmp_path, capsys):
    path = tmp_path / "mesh.toml"
    lines = [f'{key} = "{value}"' for key, value in settings.items()]
    path.write_text("[mesh]\n" + "\n".join(lines) + "\n")
    assert cli.main(["health", mesh.address("decode-0"), "--config", str(path)]) == 0
    arguments = ["--config", str(path), "--address", mesh.router_address, "--max-tokens", "3"]
    assert cli.main(["generate", "hello", *arguments]) == 0
    assert (
        cli.main(["kv", "stat", "--config", str(path), "--address", mesh.address("kvstore-0")]) == 0
    )
    assert "SERVING" in capsys.readouterr().out


def test_files_that_do_not_go_together_are_named(settings, tmp_path):
    with pytest.raises(ConfigError, match="go together"):
        MeshConfig(tls_ca_file=settings["tls_ca_file"]).tls()
    with pytest.raises(ConfigError, match="nowhere.pem: No such file"):
        MeshConfig(**settings | {"tls_key_file": "/nowhere.pem"}).tls()
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigError, match="text is not a PEM file"):
        MeshConfig(**settings | {"tls_cert_file": str(tmp_path / "text")}).tls()
