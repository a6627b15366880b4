"""A kept call: what calls with one key share, and how they run, forward and backward; `flexattn.call_cache` finds it.

The first call with a key is computed step by step. The second is recorded (`dispatch.replay`) where its backend's kernels can be,
and later ones are replayed. Backwards likewise, also those over one graph that is retained. A call of another softmax_scale or
softcap is made of a kept one, recordings included.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.autograd.profiler import record_function

from flexattn import ops
from flexattn.call_key import (
    PLAIN,
    CallKey,
    is_ordinary,
    is_profiled,
    low_bits,
    same_tensors,
)
from flexattn.dispatch import options, triton_backend
from flexattn.dispatch.runtime_failures import RuntimeFailure
from flexattn.dispatch.select import Backend, backend_module, select
from flexattn.dispatch.spec import AttentionSpec, Direction, Gradients, Operands, batch_size, dqkv_of
from flexattn.first_order import first_order
from flexattn.likeness import Likeness, likeness_of
from flexattn.validation import check_floor, extent, is_shared, refuse_shared

if TYPE_CHECKING:
    from flexattn.dispatch.cpu_attention import KeptBackward, KeptForward
    from flexattn.dispatch.replay import Recording
    from flexattn.fp8_steps import Fp8Steps

_MOST_BACKWARDS = 8  # backwards kept for one call, by the strides of what comes in
TENSOR_FIELDS = Operands._fields[: Operands._fields.index("max_seqlen_q")]  # they come first
NUM_TENSORS = len(TENSOR_FIELDS)
_RNG_STATE = TENSOR_FIELDS.index("rng_state")

lock = threading.Lock()  # on what calls keep, and on the cache of them
counts = {"hits": 0, "misses": 0, "recordings": 0}


class CachedCall:
    """Everything that calls with one key share: the spec, and a recording for each direction once there is one.

    The inputs of its forward are its operands' tensors, then those of FP8's part; those of its backward are the saved ones of both,
    then out, lse, dout and dlse.
    """

    is_checked = False  # True under FLEXATTN_CHECK=1

    def __init__(
        self,
        x: Operands,
        settings: ops.Settings,
        names: Sequence[str],
        sources: Sequence[int | Tensor | None],
        of_fp8: Fp8Steps | None,
    ) -> None:
        """names: the operands' tensors that the call has or may have."""
        planned = x
        if of_fp8 is not None and of_fp8.config is not None:
            from flexattn.fp8_ops import planned as planned_of  # here, as calls without FP8 should not wait for its import

            planned = planned_of(x, settings, of_fp8.config)
        self.spec = ops.spec_to_run(planned, settings)
        self.needs_grad = settings.needs_grad
        self.of_fp8 = of_fp8
        self.settings = settings
        # By a kernel, which is recorded with the others; or by a look at the results, after each forward.
        self.launches_check = settings.has_floor and triton_backend.can_check_floor(x.q.device)
        self.looks_at_lse = settings.has_floor and not self.launches_check
        self.backend = settings.backend
        self.device = x.q.device
        self.is_used = False
        self.likeness: Likeness | None = None  # known from the second call on
        self.has_run = False
        self.names = tuple(names)
        self.num_mods = len(x.mod_tensors)
        # Without tensors, so that nothing of a user's is kept alive.
        nothing: dict[str, Any] = dict.fromkeys(TENSOR_FIELDS)
        self.template = x._replace(**nothing, mod_tensors=(), block_mask=(), descales=x.descales if of_fp8 is None else ())
        self.sources = tuple(sources)
        self.has_dropout = x.dropout_p > 0.0
        self.out_place = names.index("out") if x.out is not None else None
        self.extents: tuple[int, ...] = ()  # bytes that each input spans, where out is given
        # True where the arguments and captures are the inputs, in that order.
        is_in_place = all(s is None or type(s) is int for s in sources) and list(sources[len(names) :]) == list(
            range(len(names), len(sources))
        )
        self.is_as_given = is_in_place and not (self.has_dropout or x.block_mask)
        self.block_arguments = (len(x.block_mask) > 0) and _block_arguments(self.spec, x)
        differentiable = ("q", "k", "v", "bias", "softmax_offset")
        leaves = [i for i, name in enumerate(names) if name in differentiable and getattr(x, name) is not None]
        self.gradients = [differentiable.index(names[i]) for i in leaves]  # their places among Gradients
        # Each argument of a Function costs time: of the captures only those that need a gradient are leaves.
        self.captured_leaves = [i for i, t in enumerate(x.mod_tensors) if t.requires_grad]
        self.leaves = itemgetter(*leaves, *(len(names) + i for i in self.captured_leaves))
        blocks = len(x.block_mask)
        self.num_inputs = len(names) + self.num_mods + blocks
        is_given = [getattr(x, name) is not None for name in names] + [True] * (self.num_mods + blocks)
        if self.has_dropout:
            is_given[_RNG_STATE] = True  # drawn for each call where it is not an argument
        num_results = 3 if of_fp8 is None else of_fp8.num_results
        places = [num_results + i if is_there else None for i, is_there in enumerate(is_given)]
        self.history_place = None
        self.is_recordable = True  # unless its backends cannot be recorded
        if of_fp8 is not None:
            self.history_place = of_fp8.history_place(self.num_inputs)
            self.is_recordable = of_fp8.can_be_recorded
            places = of_fp8.saved_places(places, num_results + self.num_inputs)
        self.num_saved = len(places)
        self.given = [i for i, place in enumerate(places) if place is not None]
        # Picks out, lse and what else a backward needs from (*results, *inputs).
        self.saved = itemgetter(0, 1, *(place for place in places if place is not None))
        self.recording: Recording | KeptForward | None = None
        self.is_final = False  # True once recording was tried
        self.backwards: OrderedDict[Hashable, Recording | KeptBackward | str] = OrderedDict()
        # The first that was replayed, found again by its inputs' likeness and what else is in its key.
        self.replayed: tuple[Hashable, Likeness, Recording | KeptBackward] | None = None

    @property
    def numbers(self) -> tuple[float, ...]:
        """softmax_scale, softcap and the floats that mods capture: what no kernel is chosen or compiled for."""
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
        return (
            (self.spec, self.settings, self.names, self.block_arguments)
            == (other.spec, other.settings, other.names, other.block_arguments)
            and len(self.numbers) == len(other.numbers)
            and _with_numbers(self.template, other.numbers) == other.template
            and all(a is b or (type(a) is type(b) is int and a == b) for a, b in zip(self.sources, other.sources, strict=True))
            and self.of_fp8 is other.of_fp8 is None
        )

    def take_recordings(self, other: CachedCall) -> None:
        """Derives recordings from a call that differs only in its numbers."""
        numbers = self.numbers
        self.has_run = other.has_run
        self.recording = None if other.recording is None else other.recording.with_numbers(numbers)
        self.is_final = self.recording is not None
        with lock:
            backwards = list(other.backwards.items())
        derived = ((key, None if isinstance(found, str) else found.with_numbers(numbers)) for key, found in backwards)
        self.backwards, self.replayed = OrderedDict((key, found) for key, found in derived if found is not None), None

    def run(self, key: CallKey, returns_lse: bool) -> Any:
        """Returns out, lse and max_logit of a call with this key; lse is not differentiable unless it is returned."""
        tensors, addresses = key.tensors, key.addresses
        if not self.is_as_given:
            tensors, addresses = self._inputs(key)
        if self.needs_grad:
            if returns_lse or self.settings.return_max_logit:
                return _apply((self, tensors, addresses, returns_lse), *self.leaves(tensors))
            return _apply((self, tensors, addresses, None), *self.leaves(tensors)), None, None
        if self.out_place is not None:
            self._check_out(tensors, addresses, self.out_place)
        results = self.forward(tensors, addresses)
        if self.looks_at_lse:
            check_floor(results[1])
        return results if self.of_fp8 is None else self.of_fp8.outputs(results)

    def _check_out(self, tensors: Sequence[Any], addresses: Sequence[int], place: int) -> None:
        """Raises for memory for out that another input may share, which no key says, and tells autograd that it is written."""
        self.extents = self.extents or tuple(map(extent, tensors))
        begin, size = addresses[place], self.extents[place]
        for i, (first, bytes_of) in enumerate(zip(addresses, self.extents, strict=True)):
            if first < begin + size and i != place and is_shared(begin, size, first, bytes_of):
                refuse_shared(self.names[i] if i < len(self.names) else "mod_tensors")
        increment_version(tensors[place])  # as kernels write without its knowledge

    def inputs(self, key: CallKey) -> Sequence[Tensor | None]:
        """Returns what `backward` takes first for a call with this key, where no forward saved it."""
        return (key.tensors if self.is_as_given else self._inputs(key)[0])[: self.num_inputs]

    def _inputs(self, key: CallKey) -> tuple[tuple[Tensor | None, ...], list[int]]:
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

    def operands(self, tensors: Sequence[Tensor | None]) -> Operands:
        named: dict[str, Any] = dict(zip(self.names, tensors, strict=False))
        mod_tensors: Any = tuple(tensors[len(self.names) : self.num_inputs])
        named |= {"mod_tensors": mod_tensors[: self.num_mods], "block_mask": mod_tensors[self.num_mods :]}
        return self.template._replace(**named)

    def forward(self, tensors: Sequence[Tensor | None], addresses: Sequence[int]) -> Sequence[Any]:
        """Returns out, lse, max_logit, and then what FP8's part gives."""
        if is_profiled():  # a profiler sees the call as an operator
            with record_function("flexattn::attention_forward"):
                return self._forward(tensors, addresses)
        recording = self.recording
        if recording is not None and recording.can_replay():
            return recording.replay(tensors, addresses)
        return self._forward(tensors, addresses)

    def _forward(self, tensors: Sequence[Tensor | None], addresses: Sequence[int]) -> Sequence[Any]:
        recording = self.recording
        if recording is not None and recording.can_replay():
            return recording.replay(tensors, addresses)
        if recording is None and self.has_run and not self.is_final:
            self.is_final = True
            if self._is_torchs(tensors, self.spec, "forward"):
                from flexattn.dispatch.cpu_attention import KeptForward

                self.recording = KeptForward(self.spec, self.operands(tensors), self._run_forward)
                return self.recording.replay(tensors, addresses)
            if self.is_recordable and self._forward_backend(tensors).can_be_recorded():
                with contextlib.suppress(RuntimeFailure):  # then `run_forward` asks another backend
                    results, self.recording = self._record_forward(tensors)
                    counts["recordings"] += self.recording is not None
                    return results
        self.has_run = True
        return self._run_forward(tensors)

    def _run_forward(self, tensors: Sequence[Tensor | None]) -> Sequence[Any]:
        return self._results(tensors, lambda x: ops.run_forward(self.spec, self.backend, x))

    def _is_torchs(self, tensors: Sequence[Any], spec: AttentionSpec, direction: Direction) -> bool:
        """Returns whether torch's own operator for CPUs computes the call in a direction."""
        if self.device.type != "cpu" or self.of_fp8 is not None:
            return False
        from flexattn.dispatch.cpu_attention import can_be_kept  # here, as importing flexattn imports no backend

        x = self.operands(tensors)
        return can_be_kept(spec, x) and ops.backend_name(spec, direction, self.backend, x) == "eager"

    def backward(self, inputs: Sequence[Any]) -> Gradients:
        """Returns the gradients, by the recording where there is one; inputs: what is saved, and then out, lse, dout and dlse."""
        # Tensors saved for a backward may come back with other strides, as from a hook that moved it to a CPU and back. Shapes are
        # the call's, and autograd sees to it that dout's and dlse's are.
        state = (select.generation, options.snapshot(), inputs[-1] is None)
        if self.replayed is not None:
            known, like, replayed = self.replayed
            places = like.addresses(inputs) if known == state and replayed.can_replay() else None
            if places is not None:
                return self._as_gradients(replayed.replay(inputs, places))
        parts: list[Any] = [state]
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
        key = tuple(parts)
        found = self.backwards.get(key)
        if found is not None and not isinstance(found, str) and found.can_replay():
            likeness = likeness_of(inputs) if self.replayed is None else None
            if likeness is not None:
                self.replayed = state, likeness, found
            return self._as_gradients(found.replay(inputs, addresses))
        spec = self.backward_spec(inputs)
        if found is _SEEN and inputs[-1] is None and self._is_torchs(inputs, spec, "backward"):
            from flexattn.dispatch.cpu_attention import KeptBackward

            kept = KeptBackward(spec, self.operands(inputs), lambda tensors: _flat_gradients(self._run_backward(tensors, spec)))
            self._keep(key, kept)
            return self._as_gradients(kept.replay(inputs, addresses))
        if found is _SEEN and self.is_recordable and self._backward_backend(inputs, spec).can_be_recorded():
            with contextlib.suppress(RuntimeFailure):
                gradients, recording = self._record_backward(inputs, spec)
                self._keep(key, _NEVER if recording is None else recording)
                counts["recordings"] += recording is not None
                return self._with_views(gradients)
        if found is None:
            self._keep(key, _SEEN)
        return self._with_views(self._run_backward(inputs, spec))

    def backward_spec(self, inputs: Sequence[Any]) -> AttentionSpec:
        """Returns the spec of a backward; inputs: its own."""
        return self.spec.for_backward()._replace(needs_lse_grad=inputs[-1] is not None)

    def _run_backward(self, inputs: Sequence[Any], spec: AttentionSpec) -> Gradients:
        incoming = ops.Incoming(*inputs[-4:])
        return self._gradients(inputs, lambda x, dout: ops.run_backward(spec, self.backend, x, incoming._replace(dout=dout)))

    def _as_gradients(self, flat: Sequence[Any]) -> Gradients:
        dq, dk, dv, dbias, doffset, *dmod_tensors = flat
        return self._with_views(Gradients(dq, dk, dv, dbias, doffset, tuple(dmod_tensors) or None))

    def _with_views(self, gradients: Gradients) -> Gradients:
        """Returns gradients with dq, dk and dv apart, of what a backend gives."""
        if not self.settings.dqkv_packing:
            return gradients
        dq, dk, dv = dqkv_of(self.spec, gradients)
        return gradients._replace(dq=dq, dk=dk, dv=dv)

    def _results(self, tensors: Sequence[Any], attend: Callable[[Operands], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Returns what `forward` does, from `attend` on the operands that a backend takes."""
        x = self.operands(tensors)
        of_fp8 = self.of_fp8
        out, lse, max_logit, *more = attend(x) if of_fp8 is None else of_fp8.forward(x, tensors[self.num_inputs :], attend)
        if self.launches_check:
            check_floor(lse)
        return out, lse, max_logit if self.spec.return_max_logit else None, *more

    def _record_forward(self, tensors: Sequence[Tensor | None]) -> tuple[Sequence[Any], Recording | None]:
        from flexattn.dispatch.replay import record  # here, as a first call should not wait for its import

        backend = self._forward_backend(tensors)
        also: Any = None if self.of_fp8 is None else self.of_fp8.quantizer_beside(backend)
        if self.launches_check and backend_module("triton") is not backend:
            also = triton_backend
        return record(
            backend,
            lambda: self._results(tensors, lambda x: backend.forward(self.spec, x)),
            tensors,
            tuple,
            self.device,
            also,
            self._numbers_of_launches(backend),
        )

    def _gradients(
        self, inputs: Sequence[Any], attend: Callable[[Operands, Tensor], Gradients], by_operators: bool = False
    ) -> Gradients:
        """Returns what `backward` does, from `attend` on the operands and the dout that a backend takes."""
        x, dout = self.operands(inputs), inputs[-2]
        if self.of_fp8 is None:
            return attend(x, dout)
        from flexattn.fp8_ops import FUNCTIONS, OPERATORS

        return self.of_fp8.backward(x, inputs[self.num_inputs : -4], dout, OPERATORS if by_operators else FUNCTIONS, attend)

    def _record_backward(self, inputs: Sequence[Any], spec: AttentionSpec) -> tuple[Gradients, Recording | None]:
        from flexattn.dispatch.replay import record

        backend = self._backward_backend(inputs, spec)
        also = None if self.of_fp8 is None else self.of_fp8.quantizer_beside(backend)
        out, lse, _, dlse = inputs[-4:]

        def run() -> Gradients:
            return self._gradients(inputs, lambda x, dout: backend.backward(spec, x, out, lse, dout, dlse))

        return record(backend, run, inputs, _flat_gradients, self.device, also, self._numbers_of_launches(backend))

    def _numbers_of_launches(self, backend: Backend) -> tuple[float, ...] | None:
        """Returns the numbers if launches have them by name, as the Triton backend's do without FP8."""
        return self.numbers if self.of_fp8 is None and backend is backend_module("triton") else None

    def _operator_gradients(self, inputs: Sequence[Any]) -> Gradients:
        """Returns the gradients by the operators, for modes and traces to see."""
        incoming, settings = ops.Incoming(*inputs[-4:]), ops.settings_of_backward(self.settings)

        def attend(x: Operands, dout: Tensor) -> Gradients:
            return ops.gradients(x, settings, incoming._replace(dout=dout))

        return self._gradients(inputs, attend, by_operators=True)

    def leaf_gradients(
        self, saved: Sequence[Any], dout: Tensor | None, dlse: Tensor | None, history: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients of a Function's arguments, the leaves behind the first. history: dout's, of delayed scaling."""
        out, lse, *tensors = saved
        if len(tensors) < self.num_saved:
            given: list[Any] = tensors
            tensors = [None] * self.num_saved
            for i, t in zip(self.given, given, strict=True):
                tensors[i] = t
        if history is not None:
            tensors[-1] = history
        if dout is None:  # only lse was used
            dout = torch.zeros_like(out)
        inputs = (*tensors, out, lse, dout, dlse)
        is_direct = not torch.compiler.is_compiling() and is_ordinary() and options.snapshot() is not None
        is_stored = type(dout) in PLAIN and not dout.is_neg() and (dlse is None or (type(dlse) in PLAIN and not dlse.is_neg()))
        if not (is_direct and is_stored):
            gradients = self._operator_gradients(inputs)
        elif is_profiled():
            with record_function("flexattn::attention_backward"):
                gradients = self.backward(inputs)
        else:
            gradients = self.backward(inputs)
        dense: tuple[Any, ...] = gradients
        if not self.captured_leaves:
            return (None, *[dense[i] for i in self.gradients])
        of_captures = iter(gradients.dmod_tensors or ())
        flags = self.spec.mods.tensor_needs_grad if self.spec.mods else ()
        of_mods = [next(of_captures) if needs_grad else None for needs_grad in flags]
        return (None, *[dense[i] for i in self.gradients], *[of_mods[i] for i in self.captured_leaves])

    def _forward_backend(self, tensors: Sequence[Any]) -> Backend:
        x = self.operands(tensors)
        if self.of_fp8 is not None:
            x = self.of_fp8.as_run(x, tensors[self.num_inputs :])
        return ops.backend_of(self.spec, "forward", self.backend, x)

    def _backward_backend(self, inputs: Sequence[Any], spec: AttentionSpec) -> Backend:
        x = self.operands(inputs)
        if self.of_fp8 is not None:
            x = self.of_fp8.backward_as_run(x, inputs[self.num_inputs : -4], inputs[-2])
        return ops.backend_of(spec, "backward", self.backend, x)

    def _keep(self, key: Hashable, found: Recording | KeptBackward | str) -> None:
        with lock:
            self.backwards[key] = found
            while len(self.backwards) > _MOST_BACKWARDS:
                self.backwards.popitem(last=False)


_SEEN, _NEVER = "seen", "never"  # for a backward without a recording: the next one is recorded, or none can be


def _with_numbers(x: Operands, numbers: Sequence[float]) -> Operands:
    scale, softcap, *of_mods = numbers
    return x._replace(softmax_scale=scale, softcap=softcap, mod_numbers=tuple(of_mods))


def _flat_gradients(gradients: Gradients) -> tuple[Tensor | None, ...]:
    return (*gradients[:-1], *(gradients.dmod_tensors or ()))


def _block_arguments(spec: AttentionSpec, x: Operands) -> tuple[int, int, int, int]:
    return batch_size(spec, x), spec.num_heads, x.max_seqlen_q, x.max_seqlen_kv


class CachedAttention(torch.autograd.Function):
    """Attention by a cached call, which no operator sees.

    One object carries all that is not differentiable, as each argument of a Function costs time, and so does each result: with
    returns_lse None out is the only one. None and an lse that was not asked for are no outputs to autograd.
    """

    @staticmethod
    def forward(ctx: Any, made: tuple[CachedCall, Sequence[Tensor | None], list[int], bool | None], *leaves: Tensor) -> Any:
        call, tensors, addresses, returns_lse = made
        results = call.forward(tensors, addresses)
        if call.looks_at_lse:
            check_floor(results[1])
        ctx.call = call
        ctx.save_for_backward(*call.saved((*results, *tensors)))
        if call.history_place is not None:
            ctx.history = tensors[call.history_place]  # which is not saved, as it changes
        if returns_lse is None:
            return results[0]
        ctx.set_materialize_grads(False)
        out, lse, max_logit = results[:3]
        if max_logit is not None:
            ctx.mark_non_differentiable(max_logit)
        return out, lse if returns_lse else None, max_logit

    @staticmethod
    @first_order
    def backward(
        ctx: Any, saved: Sequence[Any], dout: Tensor | None, dlse: Tensor | None = None, _: None = None
    ) -> tuple[Tensor | None, ...]:
        call: CachedCall = ctx.call
        return call.leaf_gradients(saved, dout, dlse, None if call.history_place is None else ctx.history)


# As its `apply`, without what that does for torch.func's transforms, under which no call has a key.
_apply: Any = super(torch.autograd.Function, CachedAttention).apply
