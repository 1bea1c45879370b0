"""Declares the wire format and the collectives on packed uint8 buffers.

They know process groups and tensors, not optimizers. What moves the bytes is a ``Transport``: made
by ``make_transport`` from a process group, or any object with its five collectives and one exchange, such as a rank
of a ``SimulatedGroup`` (threads of one process). ``fusedonebit.comm.mpi``, which has ``MPITransport``, is imported
by its own name.
"""

from __future__ import annotations

from ..ring_topology import Topology, torus_rows
from ..triton_kernels.headers import Flag, Word
from .agreement import DisagreementError, agree, checksum
from .allreduce import CompressedAllReduce
from .alone import make_all_reduce
from .feedback import FeedbackReducer
from .message import Messages, StepContext, describe_mismatch
from .multi_hop import MarsitAllReduce
from .parted import BucketedAllReduce, HierarchicalAllReduce
from .partition import NodeSection, Section
from .quantised import Format, QuantisedAllReduce, QuantisedReduceScatter, Step
from .reducer import Reducer
from .shards import ModelGroup, ShardGroup
from .sign_vote import SignVote
from .simulated import SimulatedGroup, SimulatedTransport
from .transport import CollectiveError, LocalTransport, TorchTransport, Traffic, Transport, make_transport

__all__ = [
    "BucketedAllReduce",
    "CollectiveError",
    "CompressedAllReduce",
    "DisagreementError",
    "FeedbackReducer",
    "Flag",
    "Format",
    "HierarchicalAllReduce",
    "LocalTransport",
    "MarsitAllReduce",
    "Messages",
    "ModelGroup",
    "NodeSection",
    "QuantisedAllReduce",
    "QuantisedReduceScatter",
    "Reducer",
    "Section",
    "ShardGroup",
    "SignVote",
    "SimulatedGroup",
    "SimulatedTransport",
    "Step",
    "StepContext",
    "Topology",
    "TorchTransport",
    "Traffic",
    "Transport",
    "Word",
    "agree",
    "checksum",
    "describe_mismatch",
    "make_all_reduce",
    "make_transport",
    "torus_rows",
]
