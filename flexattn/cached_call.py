"""A kept call: what calls with one key share, and how they run, forward and backward. `flexattn.call_cache` finds it.

In each direction, the first run is computed step by step. The second is recorded (`call_recording`) if its backend supports it.
Later runs are replayed, also those over one retained graph. A call with another softmax_scale or softcap is made of a kept one,
with its recordings.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.autograd.profiler import record_function

from flexattn import compat, ops
from flexattn.dispatch import options, triton_backend
from flexattn.dispatch.neutral import is_ordinary
from flexattn.dispatch.select import Backend, select
from flexattn.dispatch.spec import DIFFERENTIABLE, TENSOR_FIELDS, AttentionSpec, Flat, Gradients, Operands, batch_size, dqkv_of
from flexattn.first_order import second_order
from flexattn.function_context import FunctionContext
from flexattn.likeness import PLAIN, Likeness, likeness_of, low_bits, same_tensors
from flexattn.validation import check_floor, extent, is_shared, refuse_shared

if TYPE_CHECKING:
    from flexattn.call_cache import CallKey
    from flexattn.dispatch.cpu_attention import KeptBackward, KeptForward
    from flexattn.dispatch.replay import Recording
    from flexattn.fp8_steps import Fp8Steps

    Replay = Recording | KeptForward | KeptBackward

_MOST_BACKWARDS = 8  # backwards kept for one call, by the strides of their tensors
_RNG_STATE = TENSOR_FIELDS.index("rng_state")

is_profiled = compat.is_profiler_enabled
counts = {"hits": 0, "misses": 0, "recordings": 0}  # since the last `clear_cache`

lock = threading.Lock()  # on what calls keep, and on the cache of them


class Layout:
    """The tensors of a call: how they are made from the arguments, and their places among a backend's operands.

    The inputs of a forward are the operands' tensors by `names`, then those that mods capture, then those of a block mask.
    """

    def __init__(self, x: Operands, names: Sequence[str], sources: Sequence[int | Tensor | None], spec: AttentionSpec) -> None:
        """names: the operands' tensors that the call has or may have. sources: of each input, its place among the arguments."""
        self.names, self.sources = tuple(names), tuple(sources)
        self.device = x.q.device
        self.num_mods, self.num_inputs = len(x.mod_tensors), len(names) + len(x.mod_tensors) + len(x.block_mask)
        self.has_dropout = x.dropout_p > 0.0
        self.block_arguments = (batch_size(spec, x), spec.num_heads, x.max_seqlen_q, x.max_seqlen_kv) if x.block_mask else ()
        is_in_place = all(s is None or type(s) is int for s in sources) and list(sources[len(names) :]) == list(
            range(len(names), len(sources))
        )
        # True if the arguments and captures are the inputs, in that order.
        self.is_as_given = is_in_place and not (self.has_dropout or x.block_mask)
        self.out_place = names.index("out") if x.out is not None else None
        self.extents: tuple[int, ...] = ()  # bytes that each input spans, if out is given

    def assemble(self, key: CallKey) -> tuple[tuple[Tensor | None, ...], list[int]]:
        """Returns the inputs of a forward, and their addresses, if the arguments are not the inputs."""
        given = key.tensors
        tensors: list[Any] = [given[s] if type(s) is int else s for s in self.sources]
        if self.has_dropout:
            state = given[_RNG_STATE] if key.num_arguments > _RNG_STATE else None
            tensors[_RNG_STATE] = ops.new_rng_state(self.device) if state is None else state
        if self.block_arguments:
            from flexattn.block_mask import block_lists  # here, as calls without a block mask should not wait for its import

            tensors += block_lists(key.block_mask, *self.block_arguments, self.device).tensors
        tensors += given[len(TENSOR_FIELDS) : key.num_arguments]
        return tuple(tensors), [0 if t is None else t.data_ptr() for t in tensors]

    def check_out(self, tensors: Flat, addresses: Sequence[int], place: int) -> None:
        """Raises for an out in the memory of another input, which no key has, and tells autograd that out is written."""
        self.extents = self.extents or tuple(map(extent, tensors))
        begin, size = addresses[place], self.extents[place]
        for i, (first, bytes_of) in enumerate(zip(addresses, self.extents, strict=True)):
            if first < begin + size and i != place and is_shared(begin, size, first, bytes_of):
                refuse_shared(self.names[i] if i < len(self.names) else "mod_tensors")
        increment_version(tensors[place])  # as kernels write without its knowledge


class Saved:
    """The tensors that a forward saves for a backward, and the leaves: the inputs that the backward returns gradients of."""

    def __init__(self, x: Operands, layout: Layout, fp8: Fp8Steps | None) -> None:
        names = layout.names
        leaves = [i for i, name in enumerate(names) if name in DIFFERENTIABLE and getattr(x, name) is not None]
        self.gradients = [DIFFERENTIABLE.index(names[i]) for i in leaves]  # their places among Gradients
        # Each argument of a Function costs time, so a captured tensor is a leaf only if it needs a gradient.
        self.captured_leaves = [i for i, t in enumerate(x.mod_tensors) if t.requires_grad]
        self.leaves = itemgetter(*leaves, *(len(names) + i for i in self.captured_leaves))
        is_given = [getattr(x, name) is not None for name in names] + [True] * (layout.num_inputs - len(names))
        if layout.has_dropout:
            is_given[_RNG_STATE] = True  # if it is not an argument, it is drawn for each call
        num_results = 3 if fp8 is None else fp8.num_results
        places = [num_results + i if is_there else None for i, is_there in enumerate(is_given)]
        self.history_place = None
        if fp8 is not None:
            self.history_place = fp8.history_place(layout.num_inputs)
            places = fp8.saved_places(places, num_results + layout.num_inputs)
        self.count = len(places)
        self.given = [i for i, place in enumerate(places) if place is not None]
        # Picks out, lse and all else that a backward needs from (*results, *inputs).
        self.pick = itemgetter(0, 1, *(place for place in places if place is not None))

    def restore(self, tensors: list[object], history: Tensor | None) -> list[Any]:
        """Returns the first inputs of a backward from the saved tensors behind out and lse. history: dout's, of delayed scaling."""
        if len(tensors) < self.count:
            given, tensors = tensors, [None] * self.count
            for i, t in zip(self.given, given, strict=True):
                tensors[i] = t
        if history is not None:
            tensors[-1] = history
        return tensors

    def for_leaves(self, gradients: Gradients, spec: AttentionSpec) -> tuple[Tensor | None, ...]:
        """Returns the gradients of a Function's arguments: the leaves, behind the first argument."""
        dense: tuple[Any, ...] = gradients
        if not self.captured_leaves:
            return (None, *[dense[i] for i in self.gradients])
        captured = iter(gradients.dmod_tensors or ())
        flags = spec.mods.tensor_needs_grad if spec.mods else ()
        dmods = [next(captured) if needs_grad else None for needs_grad in flags]
        return (None, *[dense[i] for i in self.gradients], *[dmods[i] for i in self.captured_leaves])


Stage = Literal["new", "computed", "settled"]


class Runs:
    """The state of one direction of a call, for tensors with the same strides.

    new: it has not run. computed: it ran once, step by step, and the next run is recorded. settled: the recording was tried; if
    there is one, later runs replay it, otherwise they are computed. is_alone: no recording with these numbers serves other ones.
    """

    __slots__ = ("is_alone", "recording", "stage")

    def __init__(self, recording: Replay | None = None, stage: Stage = "new", is_alone: bool = False) -> None:
        self.recording, self.stage, self.is_alone = recording, stage, is_alone

    def run(
        self,
        tensors: Sequence[Tensor | None],
        addresses: Sequence[int],
        compute: Callable[[Flat], Flat],
        record: Callable[[Flat], tuple[Flat, Replay | None]],
    ) -> Flat:
        """Returns the flat results for these tensors. record: like `compute`, also returns what replays it, or None."""
        recording = self.recording
        if recording is not None and recording.can_replay():
            return recording.replay(tensors, addresses)
        if self.stage == "computed":
            self.stage = "settled"  # first, so that another thread does not record too
            results, self.recording = record(tensors)
            counts["recordings"] += self.recording is not None
            return results
        if self.stage == "new":
            self.stage = "computed"
        return compute(tensors)

    def with_numbers(self, numbers: Sequence[float]) -> Runs:
        """Returns the state of a call that differs only in its numbers.

        A recording takes longer than a run. So if numbers change in each call, and no recording serves other ones, none is made.
        """
        if self.recording is not None:
            recording = self.recording.with_numbers(numbers)
            return Runs(None, "new", is_alone=True) if recording is None else Runs(recording, "settled")
        return Runs(None, "new" if self.is_alone and self.stage != "settled" else self.stage, self.is_alone)


class KeptCall:
    """A call that `call_cache` keeps: a `CachedCall`, or a call over ranks. Its key has everything that its checks depend on."""

    is_checked = False  # True under FLEXATTN_CHECK=1
    is_used = False  # found since the cache last looked for calls to drop
    likeness: Likeness | None = None  # known from the second call on

    def run(self, key: CallKey, returns_lse: bool) -> Any:
        """Returns the results of a call with this key."""
        raise NotImplementedError

    def with_numbers(self, scale: float, softcap: float) -> KeptCall | None:
        """Returns the call with another softmax_scale and softcap, or None if these need new checks."""
        return None


class CachedCall(KeptCall):
    """Everything that calls with one key share: the spec, the layout of their tensors, and a recording for each direction.

    The inputs of its forward are those of `layout`, then those of FP8's part. The inputs of its backward are the saved ones of
    both, then out, lse, dout and dlse.
    """

    def __init__(
        self,
        x: Operands,
        settings: ops.Settings,
        names: Sequence[str],
        sources: Sequence[int | Tensor | None],
        fp8: Fp8Steps | None,
    ) -> None:
        planned = x
        if fp8 is not None and fp8.config is not None:
            from flexattn.fp8_ops import planned as planned_of  # here, as calls without FP8 should not wait for its import

            planned = planned_of(x, settings, fp8.config)
        self.spec = ops.spec_to_run(planned, settings)
        self.settings, self.fp8 = settings, fp8
        self.layout = Layout(x, names, sources, self.spec)
        self.saved = Saved(x, self.layout, fp8)
        # Without tensors, so that nothing of a user's is kept alive.
        nothing: dict[str, Any] = dict.fromkeys(TENSOR_FIELDS)
        self.template = x._replace(**nothing, mod_tensors=(), block_mask=(), descales=x.descales if fp8 is None else ())
        # By a kernel, which is recorded with the others; or by a look at the results, after each forward.
        self.launches_check = settings.has_floor and triton_backend.can_check_floor(x.q.device)
        self.looks_at_lse = settings.has_floor and not self.launches_check
        self.is_recordable = fp8 is None or fp8.can_be_recorded  # unless its backends cannot be recorded
        self.forwards = Runs()
        self.backwards: OrderedDict[Hashable, Runs] = OrderedDict()
        # The backward that was replayed first, found again by its inputs' likeness and all else that is in its key.
        self.replayed: tuple[Hashable, Likeness, Runs] | None = None

    @property
    def numbers(self) -> tuple[float, ...]:
        """softmax_scale, softcap and the floats that mods capture: no kernel is compiled for their values."""
        x = self.template
        return (x.softmax_scale, x.softcap, *x.mod_numbers)

    def with_numbers(self, scale: float, softcap: float) -> CachedCall:
        """Returns the call with another softmax_scale and softcap, with the recordings of this one that hold for them."""
        made = copy.copy(self)
        made.template = self.template._replace(softmax_scale=scale, softcap=softcap)
        made.take_recordings(self)
        return made

    def differs_in_numbers_alone(self, other: CachedCall) -> bool:
        """Returns whether another call, whose key without numbers is the same, was prepared in the same way."""
        a, b = self.layout, other.layout
        scale, softcap, *mod_numbers = other.numbers
        template = self.template._replace(softmax_scale=scale, softcap=softcap, mod_numbers=tuple(mod_numbers))
        return (
            (self.spec, self.settings, a.names, a.block_arguments) == (other.spec, other.settings, b.names, b.block_arguments)
            and len(self.numbers) == len(other.numbers)
            and template == other.template
            and all(x is y or (type(x) is type(y) is int and x == y) for x, y in zip(a.sources, b.sources, strict=True))
            and self.fp8 is other.fp8 is None
        )

    def take_recordings(self, other: CachedCall) -> None:
        """Derives recordings from those of a call that differs only in its numbers."""
        numbers = self.numbers
        with lock:
            backwards = list(other.backwards.items())
        self.forwards = other.forwards.with_numbers(numbers)
        self.backwards = OrderedDict((key, runs.with_numbers(numbers)) for key, runs in backwards)
        self.replayed = None

    def run(self, key: CallKey, returns_lse: bool) -> Any:
        """Returns out, lse and max_logit of a call with this key; lse is not differentiable unless it is returned."""
        layout = self.layout
        tensors, addresses = key.tensors, key.addresses
        if not layout.is_as_given:
            tensors, addresses = layout.assemble(key)
        if self.settings.needs_grad:
            if returns_lse or self.settings.return_max_logit:
                return _apply((self, tensors, addresses, returns_lse), *self.saved.leaves(tensors))
            return _apply((self, tensors, addresses, None), *self.saved.leaves(tensors)), None, None
        if layout.out_place is not None:
            layout.check_out(tensors, addresses, layout.out_place)
        results = self.forward(tensors, addresses)
        if self.looks_at_lse:
            check_floor(results[1])
        return results if self.fp8 is None else self.fp8.outputs(results)

    def inputs(self, key: CallKey) -> Sequence[Tensor | None]:
        """Returns the first inputs of `backward` for a call with this key, if no forward saved them."""
        layout = self.layout
        return (key.tensors if layout.is_as_given else layout.assemble(key)[0])[: layout.num_inputs]

    def operands(self, tensors: Sequence[Tensor | None]) -> Operands:
        """Returns the operands with these inputs."""
        layout = self.layout
        mod_tensors = tuple(tensors[len(layout.names) : layout.num_inputs])
        fields: dict[str, Any] = dict(zip(layout.names, tensors, strict=False))
        fields |= {"mod_tensors": mod_tensors[: layout.num_mods], "block_mask": mod_tensors[layout.num_mods :]}
        return self.template._replace(**fields)

    def forward(self, tensors: Sequence[Tensor | None], addresses: Sequence[int]) -> Flat:
        """Returns out, lse, max_logit, and then the results of FP8's part."""
        if is_profiled():  # a profiler sees the call as an operator
            with record_function("flexattn::attention_forward"):
                return self.forwards.run(tensors, addresses, self.compute_forward, self._record_forward)
        recording = self.forwards.recording
        if recording is not None and recording.can_replay():  # here too, as most calls end here
            return recording.replay(tensors, addresses)
        return self.forwards.run(tensors, addresses, self.compute_forward, self._record_forward)

    def _record_forward(self, tensors: Sequence[Tensor | None]) -> tuple[Sequence[object], Replay | None]:
        from flexattn.call_recording import record_forward  # here, as a first call should not wait for its import

        return record_forward(self, tensors)

    def compute_forward(self, tensors: Sequence[Tensor | None]) -> Flat:
        """Returns the results of `forward`, computed step by step."""
        return self.results(tensors, functools.partial(ops.run_forward, self.spec, self.settings.backend))

    def results(self, tensors: Sequence[Tensor | None], attend: Callable[[Operands], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Returns the results of `forward`, from `attend` on the operands that a backend takes."""
        x, fp8 = self.operands(tensors), self.fp8
        out, lse, max_logit, *more = attend(x) if fp8 is None else fp8.forward(x, tensors[self.layout.num_inputs :], attend)
        if self.launches_check:
            check_floor(lse)
        return out, lse, max_logit if self.spec.return_max_logit else None, *more

    def forward_backend(self, tensors: Sequence[Tensor | None]) -> Backend:
        """Returns the backend that runs the forward."""
        x = self.operands(tensors)
        if self.fp8 is not None:
            x = self.fp8.as_run(x, tensors[self.layout.num_inputs :])
        return ops.backend_of(self.spec, "forward", self.settings.backend, x)

    def backward(self, inputs: Sequence[Tensor | None]) -> Gradients:
        """Returns the gradients, replayed if there is a recording. inputs: the saved ones, then out, lse, dout and dlse."""
        # Tensors saved for a backward may come back with other strides, as from a hook that moved it to a CPU and back. Shapes are
        # the call's, and autograd sees to it that dout's and dlse's are.
        state = (select.generation, options.snapshot(), inputs[-1] is None)
        if self.replayed is not None:
            known, like, runs = self.replayed
            recording = runs.recording
            if recording is not None and known == state and recording.can_replay():
                places = like.addresses(inputs)
                if places is not None:
                    return self._as_gradients(recording.replay(inputs, places))
        inputs = [t if t is None else t.resolve_neg() for t in inputs]  # a hook may also set the negative bit
        key, addresses = _backward_key(state, inputs)
        found = self.backwards.get(key)
        runs = self._keep(key) if found is None else found
        if runs.recording is not None and self.replayed is None and runs.recording.can_replay():
            likeness = likeness_of(inputs)
            if likeness is not None:
                self.replayed = state, likeness, runs
        return self._as_gradients(runs.run(inputs, addresses, self.compute_backward, self._record_backward))

    def _keep(self, key: Hashable) -> Runs:
        with lock:
            runs = self.backwards.setdefault(key, Runs())
            while len(self.backwards) > _MOST_BACKWARDS:
                self.backwards.popitem(last=False)
        return runs

    def _record_backward(self, inputs: Sequence[Tensor | None]) -> tuple[Sequence[object], Replay | None]:
        from flexattn.call_recording import record_backward  # here, as a first call should not wait for its import

        return record_backward(self, inputs)

    def compute_backward(self, inputs: Flat) -> Flat:
        """Returns the flat gradients of `backward`, computed step by step."""
        spec, backend, incoming = self.backward_spec(inputs), self.settings.backend, ops.Incoming(*inputs[-4:])
        attend = lambda x, dout: ops.run_backward(spec, backend, x, incoming._replace(dout=dout))  # noqa: E731
        return self.gradients(inputs, attend).flat()

    def backward_spec(self, inputs: Sequence[Tensor | None]) -> AttentionSpec:
        """Returns the spec of a backward; inputs: its own."""
        return self.spec.for_backward()._replace(needs_lse_grad=inputs[-1] is not None)

    def backward_backend(self, inputs: Flat, spec: AttentionSpec) -> Backend:
        """Returns the backend that runs the backward."""
        x = self.operands(inputs)
        if self.fp8 is not None:
            x = self.fp8.backward_as_run(x, inputs[self.layout.num_inputs : -4], inputs[-2])
        return ops.backend_of(spec, "backward", self.settings.backend, x)

    def gradients(self, inputs: Flat, attend: Callable[[Operands, Tensor], Gradients], by_operators: bool = False) -> Gradients:
        """Returns the gradients of `backward`, from `attend` on the operands and the dout that a backend takes."""
        x, dout = self.operands(inputs), inputs[-2]
        if self.fp8 is None:
            return attend(x, dout)
        from flexattn.fp8_ops import FUNCTIONS, OPERATORS

        passes = OPERATORS if by_operators else FUNCTIONS
        return self.fp8.backward(x, inputs[self.layout.num_inputs : -4], dout, passes, attend)

    def _as_gradients(self, flat: Flat) -> Gradients:
        """Returns the gradients with dq, dk and dv apart."""
        dq, dk, dv, dbias, doffset, *dmod_tensors = flat
        gradients = Gradients(dq, dk, dv, dbias, doffset, tuple(dmod_tensors) or None)
        if not self.settings.dqkv_packing:
            return gradients
        dq, dk, dv = dqkv_of(self.spec, gradients)
        return gradients._replace(dq=dq, dk=dk, dv=dv)

    def _operator_gradients(self, inputs: Flat) -> Gradients:
        """Returns the gradients by the operators, for modes and traces to see."""
        incoming, settings = ops.Incoming(*inputs[-4:]), ops.settings_of_backward(self.settings)

        def attend(x: Operands, dout: Tensor) -> Gradients:
            return ops.gradients(x, settings, incoming._replace(dout=dout))

        return self.gradients(inputs, attend, by_operators=True)

    def leaf_gradients(
        self, saved: Flat, dout: Tensor | None, dlse: Tensor | None, history: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients of a Function's arguments, the leaves behind the first. history: dout's, of delayed scaling."""
        out, lse, *tensors = saved
        if dout is None:  # only lse was used
            dout = torch.zeros_like(out)
        inputs = (*self.saved.restore(tensors, history), out, lse, dout, dlse)
        is_direct = not torch.compiler.is_compiling() and is_ordinary() and options.snapshot() is not None
        is_stored = is_direct and type(dout) in PLAIN and not dout.is_neg()  # compiled autograd traces no is_neg
        if not (is_stored and (dlse is None or (type(dlse) in PLAIN and not dlse.is_neg()))):
            gradients = self._operator_gradients(inputs)
        elif is_profiled():
            with record_function("flexattn::attention_backward"):
                gradients = self.backward(inputs)
        else:
            gradients = self.backward(inputs)
        return self.saved.for_leaves(gradients, self.spec)


def _backward_key(state: Hashable, inputs: Sequence[Tensor | None]) -> tuple[Hashable, list[int]]:
    """Returns all that a backward's launches depend on beside the call's key, and the addresses of its inputs."""
    parts: list[object] = [state]
    addresses, together, ids = [], 0, []
    for t in inputs:
        if t is None:
            addresses.append(0)
            parts.append(None)
        else:
            address = t.data_ptr()
            together |= address
            addresses.append(address)
            ids.append(id(t))
            parts.append(t.stride())
    if together & 15:
        parts.append(low_bits(addresses))
    if len(set(ids)) < len(ids):
        parts.append(same_tensors(ids))
    return tuple(parts), addresses


def _with_derivatives(
    ctx: FunctionContext,
    saved: Flat,
    gradients: Sequence[Tensor | None],
    dout: Tensor | None,
    dlse: Tensor | None = None,
    _: None = None,
) -> list[Tensor | None] | None:
    """Returns the gradients of `CachedAttention.backward` with derivatives, or None for a call in FP8."""
    from flexattn.second_order import differentiable  # here, because few backwards are differentiated

    call: CachedCall = ctx.call
    if call.fp8 is not None:
        return None
    out, lse, *tensors = saved
    x = call.operands(call.saved.restore(tensors, None))
    places = [*call.saved.gradients, *(len(DIFFERENTIABLE) + i for i in call.saved.captured_leaves)]
    wanted: list[Tensor | None] = [None] * (len(DIFFERENTIABLE) + len(x.mod_tensors))
    for place, gradient in zip(places, gradients[1:], strict=True):
        wanted[place] = gradient
    incoming = ops.Incoming(out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
    found = differentiable(x, call.settings, wanted, incoming)
    return [None, *(found[place] for place in places)]


class CachedAttention(torch.autograd.Function):
    """Attention by a cached call, which no operator sees.

    One object carries all that is not differentiable, as each argument of a Function costs time, and so does each result: with
    returns_lse None out is the only one. None and an lse that was not asked for are no outputs to autograd.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext, made: tuple[CachedCall, Sequence[Tensor | None], list[int], bool | None], *leaves: Tensor
    ) -> Any:
        call, tensors, addresses, returns_lse = made
        results = call.forward(tensors, addresses)
        if call.looks_at_lse:
            check_floor(results[1])
        ctx.call = call
        ctx.save_for_backward(*call.saved.pick((*results, *tensors)))
        if call.saved.history_place is not None:
            ctx.history = tensors[call.saved.history_place]  # which is not saved, as it changes
        if returns_lse is None:
            return results[0]
        ctx.set_materialize_grads(False)
        out, lse, max_logit = results[:3]
        if max_logit is not None:
            ctx.mark_non_differentiable(max_logit)
        return out, lse if returns_lse else None, max_logit

    @staticmethod
    @second_order(_with_derivatives)
    def backward(
        ctx: FunctionContext, saved: Sequence[Tensor | None], dout: Tensor | None, dlse: Tensor | None = None, _: None = None
    ) -> tuple[Tensor | None, ...]:
        call: CachedCall = ctx.call
        return call.leaf_gradients(saved, dout, dlse, None if call.saved.history_place is None else ctx.history)


# As its `apply`, without what that does for torch.func's transforms, under which no call has a key.
_apply: Any = super(torch.autograd.Function, CachedAttention).apply
