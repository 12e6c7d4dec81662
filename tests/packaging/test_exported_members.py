"""The public names are those in ``__all__``, and each of them is documented."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

PACKAGES = ("sb3_per", "sb3_per_envs")


def modules() -> list[str]:
    """Every module of both packages, without importing those that only some extras serve."""
    names = []
    for package in PACKAGES:
        names.append(package)
        path = importlib.import_module(package).__path__
        names += [
            found.name
            for found in pkgutil.walk_packages(path, prefix=f"{package}.")
            if not found.name.endswith("__main__")
        ]
    return names


def is_ours(value: Any) -> bool:
    module = getattr(value, "__module__", None)
    return isinstance(module, str) and module.split(".")[0] in PACKAGES


def public_members(module: ModuleType) -> list[str]:
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    )


def documentable() -> Iterator[tuple[str, Any]]:
    """Public classes and functions, and the public methods and properties made here."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if not (inspect.isclass(value) or inspect.isroutine(value)):
                continue
            yield f"{package}.{name}", value
            if inspect.isclass(value):
                for attribute, member in vars(value).items():
                    member = getattr(member, "__func__", member)  # static and class methods
                    is_callable = inspect.isroutine(member) and is_ours(member)
                    if not attribute.startswith("_") and (
                        is_callable or isinstance(member, property)
                    ):
                        yield f"{package}.{name}.{attribute}", getattr(value, attribute)


def parameters(value: Any) -> set[str]:
    return {
        name
        for name, parameter in inspect.signature(value).parameters.items()
        if name not in {"self", "cls"}
        and not name.startswith("_")
        and parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
    }


def is_override(path: str, value: Any) -> bool:
    """Whether a method takes the place of one that another library documents."""
    package, class_name, *method = path.split(".")
    if not method:
        return False
    bases = inspect.getmro(getattr(importlib.import_module(package), class_name))[1:]
    return any(method[0] in vars(base) for base in bases if not is_ours(base))


def has_constructor_of_another_library(value: Any) -> bool:
    """Whether a class is made as its base class there is, whose documentation then holds."""
    if not inspect.isclass(value):
        return False
    # ``object`` has one without a module, which named tuples keep
    module = getattr(value.__init__, "__module__", None)
    return module is not None and not is_ours(value.__init__)


DOCUMENTABLE = dict(documentable())


@pytest.mark.parametrize("package", PACKAGES)
def test_all_lists_every_public_member(package: str) -> None:
    module = importlib.import_module(package)
    # What is imported when it is asked for
    lazy = {"PERQRDQN", "PERTQC"} & set(module.__all__)
    listed = set(module.__all__) - {"__version__"}
    assert sorted(listed - lazy) == [name for name in public_members(module) if name not in lazy]


@pytest.mark.parametrize("name", modules())
def test_all_names_what_exists_once(name: str) -> None:
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", [])
    assert len(set(listed)) == len(listed)
    assert [member for member in listed if not hasattr(module, member)] == []


@pytest.mark.parametrize("path", DOCUMENTABLE)
def test_public_member_is_documented(path: str) -> None:
    value = DOCUMENTABLE[path]
    text = inspect.getdoc(value) or ""
    # the text that dataclasses and named tuples give themselves
    assert text
    assert not text.startswith(f"{path.rsplit('.')[-1]}(")


@pytest.mark.parametrize("path", [path for path, value in DOCUMENTABLE.items() if callable(value)])
def test_every_parameter_is_documented(path: str) -> None:
    value = DOCUMENTABLE[path]
    if is_override(path, value) or has_constructor_of_another_library(value):
        return
    text = inspect.getdoc(value) or ""
    if inspect.isclass(value):
        text += inspect.getdoc(value.__init__) or ""
    # reST fields, or the Markdown list of an environment's arguments
    forms = (":param {}:", "`{}`", "`{}=")
    missing = {
        name for name in parameters(value) if not any(form.format(name) in text for form in forms)
    }
    assert not missing
