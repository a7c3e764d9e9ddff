"""One of two processes that search together; prints what it finds as JSON.

Arguments: a port, the number of the process, and its folder.
"""

import json
import sys
from pathlib import Path

import jax

from . import test_search as alone


def main(port, number, folder):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, int(number))
    found = {}
    # The key is the run's in process 0 alone: the other one reads it from there.
    options = {"key": int(number), "folder": Path(folder), "trajectory": True}
    try:
        alone.search(losses=alone.Counted(fails_at=2), **options)
    except RuntimeError as error:
        found["interrupted"] = str(error)
    losses = alone.Counted()
    found["value"] = alone.search(losses=losses, **options).value.tolist()
    found["evaluations"] = len(losses.points)
    found["files"] = sorted(file.name for file in Path(folder).glob("*"))
    try:
        alone.search(name="random_search", **options)
    except ValueError as error:
        found["refused"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
