"""Types of the cuDNN frontend's objects, with the methods that this folder uses. The frontend has no annotations of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor


class GraphTensor(Protocol):
    """A tensor of a graph. Each setter returns the same tensor."""

    def set_output(self, is_output: bool, /) -> GraphTensor: ...

    def set_uid(self, uid: int, /) -> GraphTensor: ...

    def set_data_type(self, data_type: object, /) -> GraphTensor: ...

    def set_dim(self, dim: list[int], /) -> GraphTensor: ...

    def set_stride(self, stride: list[int], /) -> GraphTensor: ...

    def set_ragged_offset(self, offsets: GraphTensor, /) -> GraphTensor: ...


class Graph(Protocol):
    """A `cudnn.pygraph`. Its pointwise nodes are methods too; `mod_nodes` calls them by name."""

    def tensor(
        self, *, name: str, dim: list[int], stride: list[int], data_type: object, uid: int, is_pass_by_value: bool = False
    ) -> GraphTensor: ...

    def sdpa(self, **arguments: object) -> tuple[GraphTensor, GraphTensor]:
        """Returns out and the statistics."""

    def sdpa_backward(self, **arguments: object) -> Sequence[GraphTensor]:
        """Returns dq, dk and dv."""

    def sdpa_fp8(self, **arguments: object) -> tuple[GraphTensor, GraphTensor, GraphTensor, GraphTensor]:
        """Returns out, the statistics, and the largest magnitudes of the weights and of out."""

    def sdpa_fp8_backward(self, **arguments: object) -> Sequence[GraphTensor]:
        """Returns dq, dk, dv, their largest magnitudes, and the largest magnitude of the gradient of the scores."""

    def gen_index(self, tensor: GraphTensor, /, *, axis: int, compute_data_type: object) -> GraphTensor: ...

    def validate(self) -> None: ...

    def build_operation_graph(self) -> None: ...

    def create_execution_plans(self, heuristics: list[object], /) -> None: ...

    def check_support(self) -> None: ...

    def build_plans(self) -> None: ...

    def get_workspace_size(self) -> int: ...

    def execute(self, buffers: dict[int, Tensor], workspace: Tensor, /, *, handle: object) -> None: ...

    def serialize(self) -> Iterable[int]: ...

    def deserialize(self, *handle_and_data: object) -> None: ...
