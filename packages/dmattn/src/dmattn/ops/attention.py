"""The operators dmattn::fwd and dmattn::bwd: schemas, implementations, fakes and gradients.

Their arguments are the fields of a `Problem`, where packing and key lists are replaced by their own
fields, and the name of a backend or None:

    dmattn::fwd(<problem>, backend) -> (out, lse, lse_rest)
    dmattn::bwd(dout, dlse, out, lse, lse_rest, needs, <problem>, backend)
        -> (dq, dk, dv, dbias, dsinks)
"""

from typing import Any

import torch
from torch import Tensor

from dmattn.backends import registry, sinks
from dmattn.checks import check, check_backward, check_one_head_dim
from dmattn.key_lists import Selection
from dmattn.ops import batching
from dmattn.ops.arguments import BWD_NAMES, FWD_NAMES
from dmattn.ops.register import Operator, register
from dmattn.problem import (
    FLAT_NAMES,
    SETTINGS,
    Gradients,
    Needs,
    Packing,
    Problem,
    Results,
    empty_gradients,
    empty_results,
    zero_lse_rest,
)
from dmattn.validation import one_of


def _setting(name: str) -> str:
    """The schema of one plain setting, such as "float softcap=0.0"."""
    default = Problem._field_defaults[name]
    return f"{type(default).__name__} {name}={default}"


_PROBLEM = ", ".join(
    (
        "Tensor q, Tensor k, Tensor v, Tensor? mask=None, Tensor? bias=None, Tensor? sinks=None",
        *(_setting(name) for name in SETTINGS),
        *(f"Tensor? sel_{name}=None" for name in Selection._fields),
        *(f"Tensor? {name}=None" for name in Packing._fields[:2]),
        *(f"SymInt {name}=0" for name in Packing._fields[2:]),
        "str? backend=None",
    )
)
_FWD_SCHEMA = f"({_PROBLEM}) -> (Tensor out, Tensor lse, Tensor lse_rest)"
_BWD_SCHEMA = (
    "(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor? lse_rest, bool[5] needs, "
    f"{_PROBLEM}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
)
# The indices, among the arguments of dmattn::fwd, of the operands that `Needs` names.
_DIFFERENTIABLE = tuple(FWD_NAMES.index(name) for name in Needs._fields)
_FWD_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(FWD_NAMES),
    **Problem._field_defaults,
    "max_seqlen_q": 0,
    "max_seqlen_k": 0,
}


def attend(problem: Problem, backend: str | None) -> tuple[Tensor, Tensor]:
    """out and lse by the operator dmattn::fwd, differentiable."""
    out, lse, _ = torch.ops.dmattn.fwd(*problem.flat(), backend)
    return out, lse


def differentiate(
    problem: Problem,
    results: Results,
    dout: Tensor,
    dlse: Tensor | None,
    needs: Needs,
    backend: str | None,
) -> Gradients:
    """The gradients by the operator dmattn::bwd."""
    given = (dout, dlse, *results, needs, *problem.flat(), backend)
    return Gradients(*torch.ops.dmattn.bwd(*given))


def _problem(arguments: dict[str, Any]) -> Problem:
    """The problem among the named arguments of an operator, checked."""
    values = [arguments[name] for name in FLAT_NAMES]
    problem = Problem.from_flat(values)
    if problem.key_lists is not None:  # a compiler may have changed their strides
        lists = Selection(*(t.contiguous() for t in problem.key_lists))
        problem = problem._replace(key_lists=lists)
    check(problem)
    check_one_head_dim(problem)
    return problem


def _forward_arguments(given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    return {**_FWD_DEFAULTS, **dict(zip(FWD_NAMES, given, strict=False)), **named}


def _forward(*given: Any, **named: Any) -> Results:
    arguments = _forward_arguments(given, named)
    problem = _problem(arguments)
    results = sinks.forward(registry.choose(problem, arguments["backend"]), problem)
    if results.lse_rest is None:
        results = results._replace(lse_rest=zero_lse_rest(problem))
    return results


def _fake_forward(*given: Any, **named: Any) -> Results:
    arguments = _forward_arguments(given, named)
    if arguments["backend"] is not None:
        registry.named(arguments["backend"])
    return empty_results(_problem(arguments))


def _backward_arguments(
    given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Problem, Results, Tensor, Tensor | None, Needs], str | None]:
    """The arguments of `Backend.backward`, checked, and the name of the backend."""
    arguments = {**_FWD_DEFAULTS, **dict(zip(BWD_NAMES, given, strict=False)), **named}
    if len(arguments["needs"]) != len(Needs._fields):
        wanted = f"wanted {len(Needs._fields)}, one for each of {one_of(Needs._fields)}"
        raise ValueError(f"needs: got {len(arguments['needs'])} entries, {wanted}")
    problem, needs = _problem(arguments), Needs(*arguments["needs"])
    results = Results(arguments["out"], arguments["lse"], arguments["lse_rest"])
    grads = arguments["dout"], arguments["dlse"]
    check_backward(problem, results, *grads, needs)
    return (problem, results, *grads, needs), arguments["backend"]


def _backward(*given: Any, **named: Any) -> Gradients:
    arguments, backend = _backward_arguments(given, named)
    grads = sinks.backward(registry.choose(arguments[0], backend), *arguments)
    return _all_tensors(grads, arguments[0])


def _fake_backward(*given: Any, **named: Any) -> Gradients:
    (problem, *_, needs), _ = _backward_arguments(given, named)
    return _all_tensors(empty_gradients(problem, needs), problem)


def _all_tensors(grads: Gradients, problem: Problem) -> Gradients:
    """The gradients, with a tensor of shape (0,) instead of None, as operators return tensors."""
    return grads if grads.sinks is not None else grads._replace(sinks=problem.q.new_empty(0))


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save what the backward of a call of dmattn::fwd needs; `saved_call` reads it."""
    *flat, ctx.backend = inputs
    ctx.set_materialize_grads(False)  # an unused lse then has the gradient None, not zeros
    ctx.mark_non_differentiable(output[2])
    tensors, ctx.rest = Problem.from_flat(flat).split()
    ctx.save_for_backward(*tensors, *output)


def saved_call(ctx: Any) -> tuple[Problem, Results, Needs]:
    """What `setup_context` saved, and the gradients that are needed."""
    *tensors, out, lse, rest = ctx.saved_tensors
    # torch's dispatcher leaves out trailing arguments that have the defaults of the schema.
    known = ctx.needs_input_grad
    needs = Needs(*(i < len(known) and known[i] for i in _DIFFERENTIABLE))
    return Problem.join(tensors, ctx.rest), Results(out, lse, rest), needs


def input_gradients(grads: Gradients, needs: Needs) -> tuple[Tensor | None, ...]:
    """The gradients as autograd wants them: an entry, perhaps None, per argument of dmattn::fwd."""
    found: list[Tensor | None] = [None] * len(FWD_NAMES)
    for place, grad, need in zip(_DIFFERENTIABLE, grads, needs, strict=True):
        found[place] = grad if need else None
    return tuple(found)


def _gradients(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    problem, results, needs = saved_call(ctx)
    if dout is None:
        dout = torch.zeros_like(results.out)
    grads = differentiate(problem, results, dout, dlse, needs, ctx.backend)
    return input_gradients(grads, needs)


def no_double_backward(ctx: Any, *grads: Tensor | None) -> None:
    """The backward of dmattn::bwd: raises RuntimeError, as there are no second derivatives."""
    raise RuntimeError(
        "dmattn::bwd is not differentiable: dmattn attention has first derivatives only"
    )


# The operators need exact strides, which decide what a backend reads in place.
register(Operator("dmattn::fwd", _FWD_SCHEMA, _forward, _fake_forward, True, batching.forward))
register(Operator("dmattn::bwd", _BWD_SCHEMA, _backward, _fake_backward, True, batching.backward))
torch.library.register_autograd("dmattn::fwd", _gradients, setup_context=setup_context)
torch.library.register_autograd("dmattn::bwd", no_double_backward)
