import pytest
import torch
from conftest import make_kernel, make_layout, spec_of
from torch import distributed, multiprocessing

from granikv.step.context import Prompts
from granikv.step.decoder import Decoder, DecoderSpec
from granikv.step.session import Session
from granikv.step.tensor_parallel import TensorParallel
from granikv.tree import two_level

WHOLE = DecoderSpec(spec_of(8, 2, 16, torch.float64), 2, 32, 48, 89, True, 10000.0, 1e-6)
TREE = two_level([(30, [4, 2]), (0, [6])])


def decoded(decoder):
    """Greedy tokens of 12 steps over slabs."""
    session = Session(decoder, make_layout("slab_token"), Prompts(decoder, TREE, seed=2), headroom=12)
    return session.decode(make_kernel("hydragen"), 12)


def run_rank(rank, size, folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    decoder = Decoder(WHOLE, seed=0, parallel=TensorParallel(rank, size))
    assert decoder.spec.attention.num_kv_heads == 1
    torch.save(decoded(decoder), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def test_two_ranks_emit_the_tokens_of_one(tmp_path):
    multiprocessing.spawn(run_rank, args=(2, str(tmp_path)), nprocs=2)
    alone = decoded(Decoder(WHOLE, seed=0))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert ranks[0] == ranks[1] == alone
    assert len({tuple(row) for row in zip(*alone)}) == 3


def test_ranks_hold_disjoint_shares_of_the_whole():
    whole = Decoder(WHOLE, seed=0).layers[0]
    parts = [TensorParallel(rank, 2).shard(whole, WHOLE) for rank in range(2)]
    assert torch.equal(torch.cat([part.out for part in parts], dim=1), whole.out)
    assert torch.equal(torch.cat([part.down for part in parts], dim=1), whole.down)
    queries = [part.qkv[: 4 * 16] for part in parts]
    assert torch.equal(torch.cat(queries), whole.qkv[: 8 * 16])
    assert sum(part.gate_up.numel() for part in parts) == whole.gate_up.numel()


@pytest.mark.parametrize(("size", "name"), [(4, "num_kv_heads=2"), (3, "num_qo_heads=8")])
def test_a_size_that_does_not_divide_the_model_is_refused_with_the_fix(size, name):
    with pytest.raises(ValueError, match=rf"model.{name} does not divide by it\. Fix"):
        TensorParallel(0, size).local(WHOLE)
    with pytest.raises(ValueError, match=r"ranks are 0\.\.1"):
        TensorParallel(2, 2)
