"""Checks on one GPU: races between streams, cost of the exchange, hot rows over UVM.

    python -m benchmarks.gpu -o gpu.json

Where there is no CUDA device, no NCCL or no CUDA build of fbgemm_gpu, the command says so and ends.
"""
