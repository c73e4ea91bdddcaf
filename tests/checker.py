"""Checks of types and shapes while the tests run: the decorator that the import hook of jaxtyping applies.

`jaxtyping.jaxtyped` binds the signature at every call and checks the arguments twice, also of functions without shapes.
Tests that train take a third longer by it. `jaxtyped` below makes the same checks once for each call.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

check_types = beartype(conf=BeartypeConf(is_pep484_tower=True))  # as pyright sees numbers: an int is a float
jaxtyped_by_jaxtyping = jaxtyping.jaxtyped


def install() -> None:
    """Check every function and dataclass of onefold that is imported from now on."""
    jaxtyping.jaxtyped = jaxtyped
    jaxtyping.install_import_hook("onefold", "checker.check_types")


def jaxtyped(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a decorator that checks types with `typechecker`, and that equal names in shapes are equal sizes."""

    def decorate(target: Any) -> Any:
        if isinstance(target, classmethod | staticmethod):
            return type(target)(decorate(target.__func__))
        if isinstance(target, property):
            return property(*(part and decorate(part) for part in (target.fget, target.fset, target.fdel)))
        if inspect.isclass(target):
            if dataclasses.is_dataclass(target) and not hasattr(target.__init__, "checks_types"):
                target.__init__ = decorate(target.__init__)
            return target
        function = _evaluate_annotations(target)
        shapes = [shape for hint in function.__annotations__.values() for shape in _shapes(hint)]
        if inspect.isgeneratorfunction(target) or any("{" in shape for shape in shapes):
            checked: Any = jaxtyped_by_jaxtyping(target, typechecker=typechecker)
        else:
            checked = typechecker(function)
            checked = functools.update_wrapper(_in_scope(checked) if shapes else checked, target)
        checked.checks_types = True
        return checked

    return decorate


def _in_scope(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with jaxtyped_by_jaxtyping("context"):
            return function(*args, **kwargs)

    return call


def _evaluate_annotations(function: FunctionType) -> Any:
    """Return a copy of a function whose annotations are types; those that cannot be evaluated yet are Any."""
    parts = function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    copy: Any = functools.update_wrapper(FunctionType(*parts), function)
    del copy.__wrapped__
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = {name: _evaluate(hint, function) for name, hint in function.__annotations__.items()}
    return copy


def _evaluate(hint: Any, function: FunctionType) -> Any:
    try:
        holder: Any = SimpleNamespace(__annotations__={"hint": hint})
        return typing.get_type_hints(holder, function.__globals__, include_extras=True)["hint"]
    except Exception:  # the class of a method, for example
        return Any


def _shapes(hint: Any) -> list[str]:
    """Return the shapes in an annotation, such as "n d"."""
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return [hint.dim_str]
    parts = [hint.__bound__, *hint.__constraints__] if isinstance(hint, typing.TypeVar) else typing.get_args(hint)
    return [shape for part in parts for shape in _shapes(part)]
