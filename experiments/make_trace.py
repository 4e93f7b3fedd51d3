"""Write a small request trace in Mooncake's format: `python -m experiments.make_trace --requests 64 --seed 0`.

A few agents, each with a system prompt of its own, some with a shared preamble, serve users whose turns repeat their
conversation so far; that gives nested prefixes and requests that share nothing.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from granikv.workloads.trace import BLOCK_LEN


def requests(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """`count` requests with Poisson arrivals; equal leading hash_ids are a shared prefix."""
    rng = np.random.default_rng(seed)
    next_id = iter(range(10**9)).__next__
    preamble = [next_id() for _ in range(2)]
    agents = [preamble + [next_id() for _ in range(blocks)] for blocks in (14, 6, 3)] + [[]]
    conversations: dict[tuple[int, int], list[int]] = {}
    now = 0.0
    for _ in range(count):
        now += rng.exponential(250.0)
        agent = int(rng.choice(len(agents), p=[0.45, 0.25, 0.15, 0.15]))
        user = int(rng.integers(0, 6))
        history = conversations.setdefault((agent, user), list(agents[agent]))
        length = len(history) * BLOCK_LEN + int(rng.integers(1, 3 * BLOCK_LEN))
        blocks = -(-length // BLOCK_LEN)
        ids = history + [next_id() for _ in range(blocks - len(history))]
        conversations[agent, user] = ids[: length // BLOCK_LEN]
        output_length = int(rng.integers(32, 512))
        yield {"timestamp": round(now), "input_length": length, "output_length": output_length, "hash_ids": ids}


def main() -> None:
    """Parses the command line and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("conf/workload/traces/agents_small.jsonl"))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.write_text("".join(json.dumps(request) + "\n" for request in requests(options.requests, options.seed)))
    print(options.out.resolve())


if __name__ == "__main__":
    main()
