import ast
import inspect
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from conftest import CONF, ROOT
from hydra.utils import get_object

PACKAGES = ("granikv", "baselines", "experiments", "analysis")
ALLOWED = {
    "granikv": set(),
    "baselines": {"granikv"},
    "experiments": {"granikv", "analysis"},
    "analysis": set(),
}
LAZY_ONLY = ("flashinfer", "triton", "sglang", "wandb")
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
YAMLS = sorted(CONF.rglob("*.yaml"))


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").split(".")[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_packages_import_only_what_the_design_allows(path):
    package = path.relative_to(ROOT).parts[0]
    found = set(imported(ast.parse(path.read_text())))
    forbidden = set(PACKAGES) - ALLOWED[package] - {package}
    assert not found & forbidden
    if package == "analysis":
        assert "torch" not in found


@pytest.mark.parametrize("package", PACKAGES)
def test_a_machine_without_gpu_packages_imports_everything(package):
    """Optional packages are imported inside the files that need them, never on the way to somebody else's module."""
    code = f"import sys; sys.modules.update({dict.fromkeys(LAZY_ONLY)!r}); import {package}"
    subprocess.run(["python", "-c", code], check=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT), **_environment()})


def _environment():
    import os
    import sys

    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def leaves(node, path=()):
    """(path, value, the mapping that holds it) of every scalar or list in a yaml document."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value, node


def read_somewhere(path, holder, group):
    """A key counts as read if its _target_ takes it, another yaml interpolates it, or code names it."""
    key = path[-1]
    if key == "_target_":
        return get_object(holder[key]) is not None
    if "_target_" in holder:
        return key in inspect.signature(get_object(holder["_target_"])).parameters
    dotted = ".".join((group, *path)) if group else ".".join(path)
    texts = [other.read_text() for other in YAMLS]
    if any(re.search(rf"\$\{{[^}}]*{re.escape(dotted)}[.}}]", text) for text in texts):
        return True
    code = "".join(source.read_text() for source in SOURCES if source.relative_to(ROOT).parts[0] != "baselines")
    return bool(re.search(rf"(\.{key}\b|[\"']{key}[\"'])", code))


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: str(path.relative_to(CONF)))
def test_every_configuration_key_is_read(path):
    document = yaml.safe_load(path.read_text())
    group = "" if path.parent == CONF or path.parent.name == "experiment" else path.parent.name
    unread = [
        ".".join(map(str, key))
        for key, _, holder in leaves({k: v for k, v in document.items() if k not in ("defaults", "hydra")})
        if not read_somewhere(key, holder, group)
    ]
    assert not unread


def test_a_dead_key_would_be_noticed():
    assert not read_somewhere(("unused_setting",), {"unused_setting": 1}, "device")
    assert not read_somewhere(
        ("page_sise",), {"_target_": "granikv.layouts.paged.PagedLayout", "page_sise": 1}, "layout"
    )


def public_definitions():
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        yield f"{path.relative_to(ROOT)}", tree
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                yield f"{path.relative_to(ROOT)}:{node.name}", node


@pytest.mark.parametrize("node", [pytest.param(node, id=name) for name, node in public_definitions()])
def test_everything_public_says_what_it_is(node):
    assert ast.get_docstring(node)


@pytest.mark.parametrize("group", ["layout", "kernel"])
def test_a_yaml_and_the_name_in_it_agree(group):
    for path in (CONF / group).glob("*.yaml"):
        keys = [key for key in yaml.safe_load(path.read_text()) if key != "defaults"]
        assert keys == [path.stem]


def test_make_help_lists_every_target():
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.M).group(1).split()
    shown = subprocess.run(["make", "-s", "help"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert {line.split()[0] for line in shown.splitlines()} == set(phony)


def test_the_readme_names_only_files_that_exist():
    for name in re.findall(r"\]\((?!https?://)([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / name).exists(), name
