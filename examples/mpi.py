"""1-bit Adam over MPI: pip install mpi4py, and an MPI library.

mpirun -n 2 python examples/mpi.py
"""

import torch
from torch import nn

from fusedonebit import OneBitAdam
from fusedonebit.comm.mpi import MPITransport

STEPS = 300


def main() -> None:
    transport = MPITransport()  # no torch.distributed
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", transport.rank % torch.cuda.device_count()) if cuda else torch.device("cpu")

    torch.manual_seed(0)  # the same model on every rank; no DistributedDataParallel
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    teacher = nn.Linear(64, 10).to(device)
    optimizer = OneBitAdam(model.parameters(), lr=1e-3, warmup=0.05, total_steps=STEPS, process_group=transport)

    torch.manual_seed(1 + transport.rank)  # other data on every rank
    for step in range(STEPS):
        x = torch.randn(128, 64, device=device)
        loss = nn.functional.cross_entropy(model(x), teacher(x).argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 and transport.rank == 0:
            print(f"step {step:3}  loss {loss.item():.3f}  {optimizer.stats()['bytes_step']:6,} bytes sent")
    if transport.rank == 0:
        print(f"loss {loss.item():.3f} after {STEPS} steps, {optimizer.stats()['bytes_step']:,} bytes in the last one")
        print(transport)


if __name__ == "__main__":
    main()
