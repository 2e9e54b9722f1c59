"""A model of the demo's shape with strong random weights, and the same one as a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer

from flashmesh.kernels.config import ModelConfig
from flashmesh.kernels.engine import load_engine
from flashmesh.kernels.engram import token_map
from flashmesh.kernels.maker import built_in_tokenizer
from tools.train_demo.export import export
from tools.train_demo.network import Network
from tools.train_demo.packing import Hasher
from tools.train_demo.parameters import BALANCED, initial, kinds, rounded
from tools.train_demo.sizes import trained_config


def random_masters(config, seed):
    """Fills every tensor with values that leave no mechanism idle."""
    draw = torch.Generator().manual_seed(seed)
    masters = {}
    for name, value in initial(config, seed=0).items():
        noise = torch.randn(value.shape, generator=draw)
        if name.endswith(("norm.weight", "q_weight", "k_weight")):
            masters[name] = 1 + 0.1 * noise
        elif name.endswith("_scale"):
            masters[name] = 0.5 + 0.05 * noise
        elif name.endswith(("_base", "sink", *BALANCED)):
            masters[name] = 0.2 * noise
        elif name == "embed.weight" or "engram.embed" in name or "markov" in name:
            masters[name] = noise
        else:
            masters[name] = noise * value.shape[-1] ** -0.5 * (3 if name == "head.weight" else 1)
    for name in masters:
        if name.endswith("gate.bias_vl"):  # export routes image tokens as text
            masters[name] = masters[name.removesuffix("_vl")]
    return masters


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Masters, rounded weights, network, hasher, and an engine on the exported checkpoint."""
    text = built_in_tokenizer()
    tokenizer = Tokenizer.from_str(text)
    raw = trained_config(tokenizer, index_topk=32, candidate_topk_blocks=10, engram_vocab_size=300)
    config = ModelConfig.from_dict(raw)
    table = token_map(tokenizer, config.vocab_size)
    masters = random_masters(config, seed=3)
    folder = tmp_path_factory.mktemp("random") / "checkpoint"
    export(folder, raw, text, masters)
    return SimpleNamespace(
        config=config,
        folder=folder,
        weights=rounded(masters, kinds(config), weights=True),
        net=Network(config, product=torch.float32, device="cpu"),
        table=table,
        hasher=Hasher(config, table),
        engine=load_engine(folder, role="all", name="random", num_pages=4, num_slots=1),
    )
