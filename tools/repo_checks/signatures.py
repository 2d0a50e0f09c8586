"""Compare a signature with a documented one, which is text such as "(model, cpu: bool = False)"."""

from __future__ import annotations

import ast
import inspect
import re
from inspect import Parameter, Signature
from typing import Any

__all__ = ["UNKNOWN", "differences", "parse"]

UNKNOWN = object()  # a documented default that is not a literal: having any default is enough

# What documentation tools write for a value without a literal, such as <factory> or <function f>.
PLACEHOLDER = re.compile(r"<[^<>]*>")
ANYTHING = ("(...)", "(*args, **kwargs)")  # the documented signature is hidden by a decorator


def parse(documented: str) -> Signature | None:
    """Read a documented signature; None where it says nothing."""
    if documented in ANYTHING:
        return None
    source = f"def documented{PLACEHOLDER.sub('_unknown_', documented)}: ..."
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    parameters = [
        _parameter(each.arg, Parameter.POSITIONAL_OR_KEYWORD, default)
        for each, default in zip(positional, defaults, strict=True)
    ]
    if arguments.vararg:
        parameters.append(_parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL, None))
    parameters += [
        _parameter(each.arg, Parameter.KEYWORD_ONLY, default)
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parameters.append(_parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD, None))
    return Signature(parameters)


def differences(documented: str, actual: Signature) -> list[str]:
    """Say how a call that the documented signature allows would fail, or mean something else.

    Parameters of our own are allowed where they have a default and take no documented one's position.
    """
    wanted = parse(documented)
    if wanted is None:
        return []
    found = []
    for parameter in wanted.parameters.values():
        found += _compare(parameter, actual)
    places = [_positions(signature) for signature in (wanted, actual)]
    if places[1][: len(places[0])] != places[0] and not found:
        found.append(f"takes its positions as ({', '.join(places[1])}), documented ({', '.join(places[0])})")
    for name, own in actual.parameters.items():
        if name not in wanted.parameters and own.default is Parameter.empty and not _is_variable(own):
            found.append(f"parameter {name} is not documented and has no default")
    return found


def _parameter(name: str, kind: Any, default: ast.expr | None) -> Parameter:
    if default is None:
        return Parameter(name, kind)
    try:
        value = ast.literal_eval(default)
    except ValueError:
        value = UNKNOWN
    return Parameter(name, kind, default=UNKNOWN if value == "_unknown_" else value)


def _compare(wanted: Parameter, actual: Signature) -> list[str]:
    if _is_variable(wanted):
        there = any(own.kind is wanted.kind for own in actual.parameters.values())
        return [] if there else [f"does not take {wanted}"]
    own = actual.parameters.get(wanted.name)
    if own is None or _is_variable(own):
        return [f"lacks the parameter {wanted.name}"]
    if own.kind is not wanted.kind and wanted.kind is not Parameter.KEYWORD_ONLY:
        return [f"parameter {wanted.name} is {own.kind.description}, documented {wanted.kind.description}"]
    if wanted.default is Parameter.empty:
        return []
    if own.default is Parameter.empty:
        return [f"parameter {wanted.name} has no default"]
    if wanted.default is not UNKNOWN and not _same(wanted.default, own.default):
        return [f"parameter {wanted.name} defaults to {own.default!r}, documented {wanted.default!r}"]
    return []


def _same(documented: Any, own: Any) -> bool:
    if isinstance(documented, bool) or isinstance(own, bool):
        return documented is own
    return bool(documented == own)


def _positions(signature: Signature) -> list[str]:
    return [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]


def _is_variable(parameter: Parameter) -> bool:
    return parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
