import json
from pathlib import Path

import pytest
from conftest import ROOT

from experiments.make_trace import requests
from granikv.tree import ContextTree
from granikv.workloads.agents import AgentsWorkload
from granikv.workloads.trace import TraceWorkload
from granikv.workloads.uniform import UniformWorkload

MOONCAKE = ROOT.parent / "shared" / "data" / "mooncake"


def uniform(**changes):
    return UniformWorkload(**{"name": "uniform", "batch_size": 7, "prefix_len": 100, "suffix_len": 10, **changes})


def trace(path, **changes):
    return TraceWorkload(**{"name": "trace", "path": str(path), "batch_size": 4, **changes})


def write_trace(folder: Path, *lines):
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def request(length, ids, output_length=100):
    return {"timestamp": 0, "input_length": length, "output_length": output_length, "hash_ids": ids}


def test_uniform_groups_differ_by_at_most_one_request():
    tree = uniform(num_prefixes=3).tree()
    assert tree.prefix_groups() == [(3, 100), (2, 100), (2, 100)]
    assert tree.seq_lens() == [110] * 7


def test_ungrouped_requests_hold_their_whole_prompt():
    tree = uniform(num_ungrouped=2).tree()
    assert tree.prefix_groups() == [(5, 100)]
    assert [tree.nodes[row].num_tokens for row in tree.requests] == [10] * 5 + [110] * 2


def test_a_spread_draws_different_lengths_around_the_mean():
    tree = uniform(batch_size=200, suffix_spread=0.5).tree()
    own = [tree.nodes[row].num_tokens for row in tree.requests]
    assert min(own) >= 5
    assert max(own) <= 15
    assert len(set(own)) > 5


def test_equal_fields_give_equal_trees_and_another_seed_another():
    spread = {"batch_size": 50, "suffix_spread": 0.5}
    assert uniform(**spread).tree() == uniform(**spread).tree()
    assert uniform(**spread).tree() != uniform(**spread, seed=1).tree()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "workload.batch_size=0"),
        ({"batch_size": "many"}, "workload.batch_size='many'"),
        ({"prefix_len": -1}, "workload.prefix_len=-1"),
        ({"prefix_len": 0, "suffix_len": 0}, "at least one token"),
        ({"num_prefixes": 8}, "workload.num_prefixes=8 with 7 grouped requests"),
        ({"suffix_spread": 1.0}, "workload.suffix_spread=1.0"),
        ({"num_ungrouped": 8}, "every prefix needs a request"),
    ],
)
def test_a_batch_that_cannot_be_is_refused_with_the_fix(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        uniform(**changes)
    assert "Fix:" in str(caught.value)


def test_agents_have_zipf_group_sizes_that_add_up():
    workload = AgentsWorkload("agents", 32, (800, 400, 200), 10)
    assert workload.group_sizes() == [17, 9, 6]
    assert AgentsWorkload("agents", 30, (8, 4, 2), 10, zipf=0).group_sizes() == [10, 10, 10]
    assert [length for _, length in workload.tree().prefix_groups()] == [800, 400, 200]


def test_agents_need_a_request_each():
    with pytest.raises(ValueError, match="every agent needs a request"):
        AgentsWorkload("agents", 2, (8, 4, 2), 10)


def test_equal_leading_blocks_become_a_prefix_group(tmp_path):
    path = write_trace(
        tmp_path, request(1200, [1, 2, 3]), request(1100, [1, 2, 4]), request(700, [9, 8]), request(600, [1, 5])
    )
    tree = trace(path, progress=0.0).tree()
    assert tree.prefix_groups() == [(3, 512), (2, 512)]
    assert tree.seq_lens() == [1201, 1101, 601, 701]
    assert [tree.nodes[row].num_tokens for row in tree.requests] == [177, 77, 89, 701]


def test_a_shared_last_block_counts_its_real_tokens(tmp_path):
    path = write_trace(tmp_path, *[request(700, [1, 2], output_length=10)] * 4)
    tree = trace(path, progress=0.5).tree()
    assert tree.prefix_groups() == [(4, 700)]
    assert [tree.nodes[row].num_tokens for row in tree.requests] == [5] * 4


def test_a_prompt_that_is_wholly_shared_still_has_its_own_tokens(tmp_path):
    path = write_trace(tmp_path, request(512, [1]), request(1024, [1, 2]), request(1024, [1, 3]), request(1024, [1, 4]))
    tree = trace(path).tree()
    assert tree.prefix_groups() == [(4, 512)]
    assert tree.seq_lens() == [562, 1074, 1074, 1074]


def test_a_scale_shortens_every_run_but_not_the_sharing(tmp_path):
    path = write_trace(tmp_path, *[request(1024, [1, 10 + i]) for i in range(4)])
    assert trace(path, length_scale=0.25).tree().prefix_groups() == [(4, 128)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a request"),
        ('{"timestamp": 0}', "KeyError: 'input_length'"),
        (json.dumps(request(1024, [1])), "one id per 512 tokens"),
        ("[]", "not a request"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = write_trace(tmp_path, request(10, [1]))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=message) as caught:
        trace(path, batch_size=2).tree()
    assert "trace.jsonl:2" in str(caught.value)


def test_a_missing_file_and_too_few_requests_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        trace(tmp_path / "none.jsonl").tree()
    with pytest.raises(ValueError, match=r"1 requests from line 0, but workload\.batch_size=4"):
        trace(write_trace(tmp_path, request(10, [1]))).tree()


def test_the_shipped_trace_is_what_its_generator_writes():
    path = ROOT / "conf" / "workload" / "traces" / "agents_small.jsonl"
    assert [json.loads(line) for line in path.open()] == list(requests(64, 0))


@pytest.mark.parametrize("name", ["conversation_trace", "synthetic_trace"])
@pytest.mark.parametrize("start", [0, 1000, 3000])
def test_real_traces_give_groups_that_agree_with_their_block_ids(name, start):
    path = MOONCAKE / f"{name}.jsonl"
    if not path.exists():
        pytest.skip("the Mooncake traces are not here")
    tree = trace(path, batch_size=32, start=start, progress=0.0).tree()
    lines = [json.loads(line) for line in path.open()][start : start + 32]
    assert sorted(tree.seq_lens()) == sorted(line["input_length"] + 1 for line in lines)
    block_rows = {}
    for line in lines:
        for depth in range(len(line["hash_ids"])):
            key = tuple(line["hash_ids"][: depth + 1])
            block_rows[key] = block_rows.get(key, 0) + 1
    shared_blocks = sum(rows > 1 for rows in block_rows.values())
    assert sum(-(-length // 512) for _, length in tree.prefix_groups()) == shared_blocks


def test_trees_list_parents_first():
    tree = trace(ROOT / "conf/workload/traces/agents_small.jsonl", batch_size=32).tree()
    assert isinstance(tree, ContextTree)
    assert all(node.parent is None or node.parent < number for number, node in enumerate(tree.nodes))
