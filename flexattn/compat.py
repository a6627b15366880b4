"""The private names of torch that flexattn uses, under names of its own: a new torch that changes one changes this file alone.

Each name was seen in every version of `SEEN_IN`, or else the comment beside it names the versions. CUDA_ONLY lists the names that a
torch without CUDA lacks. Names that would import a large part of torch, such as Dynamo, are functions that import it in their first
call. `tests/repository/test_compat.py` gets each name, and finds private names in other files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import overrides
from torch._C import _functorch
from torch._decomp import core_aten_decompositions as core_aten_decompositions
from torch._decomp import get_decompositions as get_decompositions
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as temporarily_clear_interpreter_stack
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import forward_ad
from torch.utils import _python_dispatch, _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

if TYPE_CHECKING:
    from torch import Tensor

SEEN_IN = ("2.11", "2.13", "2.14", "2.15")
CUDA_ONLY = ("current_device", "current_raw_stream")

_C = torch._C
_compiler = _C._dynamo  # parts of torch.compile in C++, which import nothing

# Modes, transforms and traces. Callers keep these functions, as each look into torch's modules takes 20 ns of a call.
function_modes = overrides._get_current_function_mode_stack
no_dispatch_modes = _python_dispatch._disable_current_modes
num_dispatch_modes = _C._len_torch_dispatch_stack
num_function_modes = _C._len_torch_function_stack
pop_function_mode = _C._pop_torch_function_stack
push_function_mode = _C._push_on_torch_function_stack
has_function_mode = _C._is_torch_function_mode_enabled
functions_enabled = _C._EnableTorchFunction
python_dispatcher_disabled = _C._DisablePythonDispatcher
innermost_transform = _functorch.peek_interpreter_stack
has_transforms = _C._are_functorch_transforms_active
is_batched = _functorch.is_batchedtensor
is_legacy_batched = _functorch.is_legacy_batchedtensor
is_transformed = _functorch.is_functorch_wrapped_tensor
jit_trace = _C._get_tracing_state
forward_mode_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level")  # negative: no level
set_jit_trace: Callable[[object], None] = _C._set_tracing_state  # type: ignore[attr-defined]


def is_differentiated(t: Tensor) -> bool:
    """Returns whether forward mode, or a transform of torch.func other than vmap, takes a derivative with respect to t."""
    while True:
        if forward_mode_level() >= 0 and forward_ad.unpack_dual(t).tangent is not None:  # type: ignore[no-untyped-call]
            return True
        if not is_transformed(t):
            return False
        if not is_batched(t):  # a wrapper of torch.func.grad, jvp or functionalize
            return True
        t = _functorch.get_unwrapped(t)


def is_forward_mode_innermost() -> bool:
    """Returns whether forward mode, or torch.func.jvp, is the innermost transform. Then `unpack_dual` finds its tangents."""
    if forward_mode_level() < 0:
        return False
    innermost = innermost_transform()
    return innermost is None or innermost.key() == _functorch.TransformType.Jvp


unpack_dual: Callable[[Tensor], tuple[Tensor, Tensor | None]] = forward_ad.unpack_dual
make_dual: Callable[[Tensor, Tensor], Tensor] = forward_ad.make_dual


# Dispatch keys and the settings of a thread.
DispatchKey = _C.DispatchKey
DispatchKeySet = _C.DispatchKeySet
dispatch_keys = _C._ForceDispatchKeyGuard
dispatch_key_excluded = _C._SetExcludeDispatchKeyGuard
autocast_disabled = _C._DisableAutocast
is_any_autocast_enabled = _C._is_any_autocast_enabled
is_deterministic = _C._get_deterministic_algorithms
is_profiler_enabled = _C._autograd._profiler_enabled
set_saved_tensors_hooks_tracing = _C._autograd._saved_tensors_hooks_set_tracing
backward_id = _C._current_graph_task_id

# Operators without a public name.
assert_async = torch._assert_async
foreach_add = torch._foreach_add_
foreach_copy = torch._foreach_copy_

# CUDA.
current_device: Callable[[], int] = getattr(_C, "_cuda_getDevice", None)  # type: ignore[assignment]
current_raw_stream: Callable[[int], int] = getattr(_C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]

# Functions that mods may call, by the objects and dicts that hold them.
C_FUNCTIONS: tuple[object, ...] = (_C._VariableFunctions, _C._nn, _C._special, _C._linalg, _C._fft)  # type: ignore[attr-defined]
TENSOR_FUNCTIONS = vars(torch._tensor)

# torch.compile's guards: types, dispatch keys (device, layout, negation, transforms, modes), dtypes, devices, requires_grad, shapes
# and strides. None: this torch has no such class, and calls are found by keys alone.
TensorGuards: Any = getattr(getattr(_compiler, "guards", None), "TensorGuards", None)


def storage_of(t: Tensor) -> int:
    """Returns a number that identifies the tensor's storage while the storage lives."""
    return t.untyped_storage()._cdata  # type: ignore[no-any-return]


def empty_strided(device_type: str) -> Callable[..., Tensor] | None:
    """Returns the empty_strided(shape, strides, dtype) that Inductor's code calls for the current device, or None."""
    found: Callable[..., Tensor] | None = getattr(getattr(_compiler, "guards", None), f"_empty_strided_{device_type}", None)
    return found


def fake_mode() -> Any:
    """Returns the FakeTensorMode that is active, or None."""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE)


def register_namedtuple(kind: type, name: str) -> None:
    """Registers a NamedTuple for torch.export.save."""
    _pytree._register_namedtuple(kind, serialized_type_name=name)


def runs_as_it_is(function: Any) -> None:
    """Keeps torch.compile from tracing a function and its callees, by a graph break, without cost in eager mode.

    torch.compiler.disable would cost a microsecond in each call.
    """
    frames = _compiler.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(function.__code__, skip)
    function._torchdynamo_disable = True  # the strategy alone lets a compiled caller inline the function


# Names whose modules `import torch` does not import.


def device_context() -> type:
    """Returns the class of the modes of torch.set_default_device."""
    from torch.utils._device import DeviceContext

    return DeviceContext


def dynamo() -> ModuleType:
    """Returns torch._dynamo."""
    import torch._dynamo

    return torch._dynamo


def substitute_in_graph(function: Callable[..., object]) -> Callable[[Callable[..., object]], object]:
    """Decorates the function that Dynamo traces in place of another one."""
    return dynamo().decorators.substitute_in_graph(function)  # type: ignore[no-any-return]


def side_effects_allowed() -> Callable[..., object]:
    """Returns Dynamo's function that calls a function whose side effects a checkpoint accepts."""
    from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer

    return _disable_side_effect_safety_checks_for_current_subtracer


def functorch_config() -> Any:
    """Returns the settings of AOTAutograd."""
    from torch._functorch import config

    return config


def symmetric_memory() -> ModuleType:
    """Returns torch's module of symmetric memory."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory


def allocate_symmetric(*arguments: object) -> Tensor:
    """Allocates memory of its own as torch's workspaces do: `symmetric_memory().empty` uses a pool, which does not free memory."""
    return symmetric_memory()._SymmetricMemory.empty_strided_p2p(*arguments)  # type: ignore[no-any-return]


def is_ring_balanced() -> bool:
    """Returns whether torch's context parallelism deals the tokens in a zigzag, not in contiguous parts."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention._cp_options.enable_load_balance


def timeout_of(group: Any, device: torch.device) -> Any:
    """Returns the timeout of a process group's backend, a timedelta."""
    return group._get_backend(device).options._timeout
