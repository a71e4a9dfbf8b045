"""A pool of gloo processes for all tests of a file: starting one takes seconds, nearly all of it the import
of PyTorch.
"""

import multiprocessing
import os
import traceback
from contextlib import suppress
from pathlib import Path

WORLD = 4
SECONDS = 120


def serve(rank, folder, connection):
    """Compute what comes, until nothing does: (function, arguments) of this folder's module `ranks`."""
    os.environ["LOCAL_WORLD_SIZE"] = str(WORLD)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    import ranks

    ranks.start(rank)
    connection.send("ready")
    with suppress(EOFError):
        while True:
            name, arguments, environment = connection.recv()
            os.environ.update(environment)
            try:
                connection.send((getattr(ranks, name)(*arguments), None))
            except Exception:  # noqa: BLE001  # the test gets it
                connection.send((None, traceback.format_exc()))
            for variable in environment:
                del os.environ[variable]


class Pool:
    """``WORLD`` processes; of these as many compute as a call says."""

    def __init__(self, folder):
        context = multiprocessing.get_context("spawn")
        before = dict(os.environ)
        paths = str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")
        # Threads of BLAS in four processes would wait for each other.
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"}
        self.processes, self.connections = [], []
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, str(folder), theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)
        os.environ.clear()
        os.environ |= before
        for rank in range(WORLD):
            assert self._received(rank) == "ready"

    def _received(self, rank):
        if not self.connections[rank].poll(SECONDS):
            self.close()
            raise AssertionError(f"rank {rank} has not answered in {SECONDS} s: it may wait for another one")
        return self.connections[rank].recv()

    def run(self, name, *arguments, world=WORLD, of_rank=None, environment=None):
        """What ``ranks.name(world, *arguments)`` returns on each rank, or the text of its error; ``of_rank``
        has more arguments for each rank. An AssertionError of a rank is raised here.
        """
        for rank in range(world):
            more = of_rank[rank] if of_rank else ()
            self.connections[rank].send((name, (world, *arguments, *more), environment or {}))
        answers = [self._received(rank) for rank in range(world)]
        for rank, (_, error) in enumerate(answers):
            if error is not None:
                raise AssertionError(f"on rank {rank}: {error}")
        return [result for result, _ in answers]

    def close(self):
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.join()
