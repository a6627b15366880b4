"""Joins the graphs of a call's mods into one program: unique capture names, masks as bands, a derived or explicit backward."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import NamedTuple, cast

from torch.fx import Graph

from flexattn.dispatch.mod_program import GRADIENT, Capture, Program, decode_graph, make_program
from flexattn.mod_values import op_name
from flexattn.mods import bands
from flexattn.mods.bands import Fact, Fill, Masks
from flexattn.mods.derivative import derive
from flexattn.mods.same import is_same, is_same_gradient, softcap_of
from flexattn.mods.tracer import distinct


class Joined(NamedTuple):
    """Program of a call's mods, the positions of the captures that it reads, and the band that the program leaves out."""

    program: Program
    kept: tuple[int, ...]
    left: int | None
    right: int | None
    has_floor: bool  # the band is exact only if every query's lse is above `validation.FLOOR`


class _Mods(NamedTuple):
    score: Graph | None
    mask: Graph | None
    gradient: Graph | None  # the explicit gradient of the score (score_mod_gradient)
    has_floor: bool = False


class _Known(NamedTuple):
    masks: Masks
    fills: Mapping[str, Fill]
    tensors: frozenset[str]
    same: Mapping[str, str]  # capture of the gradient: the score's capture with the same value


@functools.lru_cache(maxsize=256)
def join(
    graphs: tuple[tuple[str, tuple[Capture, ...]], ...],
    roles: tuple[str, ...],
    needs_grad: bool,
    masks: Masks,
    facts: tuple[Fact, ...],
) -> Joined:
    """Returns one program for all mods, with the captures of one mod after those of the other under unique names, and its band.

    graphs: the text and the captures of each mod. roles: "score_mod", "mask_mod" or "score_mod_gradient" for each mod. facts: one
    for each capture, in the same order.
    """
    captures: list[Capture] = []
    by_role: dict[str, Graph] = {}
    for role, (text, graph_captures) in zip(roles, graphs, strict=True):
        before = [capture.name for capture in graph_captures]
        names = dict(zip(before, distinct(before, [capture.name for capture in captures]), strict=True))
        graph = by_role[role] = cast(Graph, decode_graph(json.loads(text)))
        for node in graph.nodes:
            if node.op == "placeholder":
                node.target = names.get(node.target, node.target)
        captures += [capture._replace(name=names[capture.name]) for capture in graph_captures]
    named = list(zip(captures, facts, strict=True))
    same = {capture.name: captures[fact.same_as].name for capture, fact in named if fact.same_as >= 0}
    mods = _Mods(by_role.get("score_mod"), by_role.get("mask_mod"), by_role.get("score_mod_gradient"))
    if mods.mask is not None and _is_always_true(mods.mask):
        mods = mods._replace(mask=None)
    left, right = None, None
    if masks is not Masks.NONE:
        fills = {capture.name: fact.fill for capture, fact in named}
        tensors = frozenset(capture.name for capture in captures if not capture.is_number)
        mods = _without_identity(_unmasked(mods, _Known(masks, fills, tensors, same)))
        if mods.mask is not None:
            left, right, rest = bands.implied_band(mods.mask)
            mods = mods._replace(mask=rest)
    score = mods.score
    if score is not None:
        score, position, name = softcap_of(score, captures)
        if name:
            same = {gradient_name: name if known == captures[position].name else known for gradient_name, known in same.items()}
            captures[position] = captures[position]._replace(name=name)
    read = {name for graph in (score, mods.mask) if graph is not None for name in _read(graph)}
    program_captures = [capture for capture in captures if capture.needs_grad or capture.name in read]
    derivative, is_given = _derivative(score, mods.gradient, program_captures, needs_grad, same)
    if is_given and derivative is not None:
        read |= _read(derivative)
    kept = tuple(i for i, capture in enumerate(captures) if capture.needs_grad or capture.name in read)
    program = make_program([captures[i] for i in kept], score, mods.mask, derivative, is_given)
    return Joined(program, kept, left, right, mods.has_floor)


def _derivative(
    score: Graph | None, gradient: Graph | None, captures: list[Capture], needs_grad: bool, same: Mapping[str, str]
) -> tuple[Graph | None, bool]:
    """Returns the gradient of the score and of captures, and whether it is explicit: False if the derived gradient is the same."""
    captures_need_it = any(capture.needs_grad for capture in captures)
    if score is None or not (needs_grad or captures_need_it):
        return None, False
    if gradient is not None and captures_need_it:
        return _listed(gradient), True
    derived = derive(score, captures)
    if gradient is None or is_same_gradient(gradient, derived, same):
        return derived, False
    return _listed(gradient), True


def _unmasked(mods: _Mods, known: _Known) -> _Mods:
    """Moves scores that score_mod hides to the mask if the results stay the same."""
    score, mask, gradient, _ = mods
    if score is None:
        return mods
    split = bands.split(score, known.fills, Fill.MASKING, Fill.HIDING)
    if split.visible is None:
        return mods
    if gradient is not None:
        # A hidden score has no weight, so its gradient is 0, and stays 0 if the explicit gradient is linear.
        blocked = bands.split(gradient, known.fills, Fill.ZERO)
        if blocked.visible is not None and _is_same_mask(split.visible, blocked.visible, known.same):
            gradient = blocked.graph
        elif not bands.is_linear(gradient):
            return mods
    if split.is_finite:
        band = bands.implied_band(split.visible)
        fits = known.masks is Masks.ALL or (known.masks is Masks.OPEN_LEFT and band.left is None)
        if band.rest is not None:
            fits = known.masks is Masks.ALL and bands.shows_itself(band.rest)
        if not fits or mask is not None:
            return mods
        if not bands.is_near_its_score(split.graph, known.fills, known.tensors):
            return mods
    return _Mods(split.graph, split.visible if mask is None else bands.conjunction(split.visible, mask), gradient, split.is_finite)


def _is_same_mask(a: Graph, b: Graph, names: Mapping[str, str]) -> bool:
    """Returns whether two masks show the same keys. names: the name in `a` for each capture of `b`."""
    band_a, band_b = bands.implied_band(a), bands.implied_band(b)
    if band_a[:2] != band_b[:2] or (band_a.rest is None) is not (band_b.rest is None):
        return False
    return band_a.rest is None or is_same(band_a.rest, cast(Graph, band_b.rest), names)


def _without_identity(mods: _Mods) -> _Mods:
    if (
        mods.score is None
        or not bands.is_identity(mods.score)
        or not (mods.gradient is None or bands.is_identity(mods.gradient, GRADIENT))
    ):
        return mods
    return mods._replace(score=None, gradient=None)


def _read(graph: Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if node.op == "placeholder" and node.users}


def _listed(gradient: Graph) -> Graph:
    """Puts a graph's output in a list, which is the form of a derivative's outputs."""
    gradient.output_node().args = ([bands.output_of(gradient)],)
    return gradient


def _is_always_true(graph: Graph) -> bool:
    result = bands.output_of(graph)
    return op_name(result) == "full" and bool(result.args[1])
