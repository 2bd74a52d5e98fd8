"""The interpreter of a rank ends after gloo's threads have released their tensors."""

from tests.support.processes import run_python

WITH_A_LATE_THREAD = """
import threading, time
import torch, torch.distributed as dist
from torchrec_picasso import InterleavedTrainPipeline

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
{construct}

def release():
    time.sleep(0.05)
    print("released", flush=True)

threading.Thread(target=release, daemon=True).start()
"""


def late_thread_runs(construct: str) -> bool:
    ended = run_python("-c", WITH_A_LATE_THREAD.format(construct=construct))
    assert ended.returncode == 0, ended.stderr
    return "released" in ended.stdout


def test_exit_waits_for_threads_that_need_the_interpreter():
    """Otherwise torch aborts the process: a gloo thread takes the GIL of an interpreter that ends
    (pytorch issue 190489)."""
    cpu = 'InterleavedTrainPipeline(model, optimizer, torch.device("cpu"))'
    assert late_thread_runs(cpu)
    assert not late_thread_runs("")
