"""Import lines of other frameworks, and the names of the program that come from them, as edits."""

from __future__ import annotations

import re
from collections.abc import Iterable

import libcst as cst

from .bindings import Binding
from .edits import Outcome
from .names import OWN_MODULES, Missing, Target, counterpart
from .source import Source, bound_name, dotted, from_import_lines, whole_line

_OWN = __name__.partition(".")[0]
_PLAIN = ""


class ImportRewriter:
    """Turns the imports of a file, and the uses of their names, into edits."""

    def __init__(self, source: Source, found: list[Binding], outcome: Outcome, keeps_names: bool) -> None:
        self._source, self._outcome, self._keeps_names = source, outcome, keeps_names
        self._lines: dict[cst.CSTNode, set[str]] = {}
        self.new_names: dict[str, str] = {}
        """The names of the file that were replaced, for annotations that are strings."""
        statements: dict[cst.Import | cst.ImportFrom, list[Binding]] = {}
        for binding in found:
            statements.setdefault(binding.statement, []).append(binding)
        for statement, given in statements.items():
            if isinstance(statement, cst.Import):
                self._import(statement, given)
            else:
                self._import_from(statement, given)

    # ---- import a.b as c -----------------------------------------------------------------------------------------

    def _import(self, statement: cst.Import, given: list[Binding]) -> None:
        lines = [
            f"import {self._source.code(alias)}"
            for alias in statement.names
            if not any(alias is each.alias for each in given)
        ]
        for binding in given:
            lines += self._lines_for(binding)
        self._replace(statement, lines)

    def _lines_for(self, binding: Binding) -> list[str]:
        """Return the imports in place of one that binds a module, and rename what is used of it."""
        own, target = f"import {self._source.code(binding.alias)}", binding.target
        if not isinstance(target, Target):
            self._leave(binding, self._source.line(binding.statement), target)
            return [own]
        missing = self._missing(binding)
        is_passed_on = any(_is_module(path) for _, path in binding.uses)
        has_same_names = not binding.framework.has_own_names or target.module in OWN_MODULES
        if not missing and "." not in binding.name and (is_passed_on or (has_same_names and binding.uses)):
            return [f"import {target.module} as {binding.name}"]
        modules = self._rename(binding)
        kept = [own] if missing or is_passed_on else []
        return kept + (_module_imports(modules) if modules or kept else [f"import {_OWN}"])

    def _missing(self, binding: Binding) -> bool:
        """Leave the uses of names without a counterpart; return whether there are any."""
        missing = [(node, counterpart(path)) for node, path in binding.uses]
        for node, target in missing:
            self._leave(binding, self._source.line(node), target)
        return any(isinstance(target, Missing) for _, target in missing)

    def _rename(self, binding: Binding) -> set[str]:
        """Replace the uses of a module's names by full dotted names of phalanx; return the modules that they need."""
        modules = set()
        for node, path in binding.uses:
            target = counterpart(path)
            if isinstance(target, Target) and not target.is_module:
                modules.add(target.module)
                self._outcome.replace(self._source.span(node), target.dotted, self._source.line(node))
        return modules

    # ---- from a.b import c ---------------------------------------------------------------------------------------

    def _import_from(self, statement: cst.ImportFrom, given: list[Binding]) -> None:
        found: dict[str | None, list[tuple[Binding, str]]] = {}
        self._extra: list[str] = []
        for binding in given:
            module, text = self._new_alias(binding)
            found.setdefault(module, []).append((binding, text))
        if list(found) == [None] and not self._extra:
            return
        module = next(iter(found))
        if len(found) == 1 and module:
            self._edit_in_place(statement, module, found[module])
            return
        lines = re.findall(r"#.*", self._source.code(statement))
        for module, aliases in found.items():
            texts = [text for _, text in aliases]
            lines += texts if module == _PLAIN else from_import_lines(module or dotted(statement.module) or "", texts)
        self._replace(statement, lines + self._extra)

    def _new_alias(self, binding: Binding) -> tuple[str | None, str]:
        """Return the module to import from, None for the present one, and the name with its alias.

        A line that imports a module itself has ``_PLAIN`` as its module.
        """
        target, own = binding.target, self._source.code(binding.alias)
        if not isinstance(target, Target):
            self._leave(binding, self._source.line(binding.alias), target)
            return None, own
        if not target.is_module:
            bound = self._bound_name(binding, target)
            return target.module, target.name if bound == target.name else f"{target.name} as {bound}"
        if self._missing(binding):
            # What exists is taken from phalanx by its full name, in a line of its own behind this one.
            self._extra += _module_imports(self._rename(binding))
            return None, own
        package, _, name = target.module.rpartition(".")
        alias = "" if name == binding.name else f" as {binding.name}"
        return (package, f"{name}{alias}") if package else (_PLAIN, f"import {name}{alias}")

    def _bound_name(self, binding: Binding, target: Target) -> str:
        """Return the name in the file: phalanx's, unless the file uses that for something else."""
        old, new = binding.name, target.name
        if binding.is_renamed or old == new:
            return old
        taken = new in self._source.identifiers or old in self._source.identifiers or self._keeps_names
        if taken or _is_imported(self._source, new, binding):
            return old
        self.new_names[old] = new
        for node, path in binding.uses:
            if isinstance(node, cst.Name) and path == binding.path:
                self._outcome.replace(self._source.span(node), new, self._source.line(node))
        return new

    def _edit_in_place(self, statement: cst.ImportFrom, module: str, aliases: list[tuple[Binding, str]]) -> None:
        """Replace the module and the names, so that comments and line breaks stay."""
        assert statement.module is not None
        line = self._source.line(statement)
        self._outcome.replace(self._source.span(statement.module), module, line)
        for binding, text in aliases:
            start, end = self._source.span(binding.alias.name)
            if binding.alias.asname is not None:
                _, end = self._source.span(binding.alias.asname.name)
            if self._source.text[start:end].decode(self._source.encoding) != text:
                self._outcome.replace((start, end), text, self._source.line(binding.alias))

    # ---- shared --------------------------------------------------------------------------------------------------

    def _leave(self, binding: Binding, line: int, target: Target | Missing | None) -> None:
        if isinstance(target, Missing):
            self._outcome.leave(line, target.reason, binding.framework.page)

    def _replace(self, statement: cst.Import | cst.ImportFrom, lines: list[str]) -> None:
        """Replace an import statement by lines, without imports that its block has already."""
        whole = self._source.parent(statement)
        assert isinstance(whole, cst.SimpleStatementLine | cst.SimpleStatementSuite)
        block = self._source.parent(whole) or whole
        earlier = self._lines.setdefault(block, set()) | _before(self._source, block, whole)
        new = [line for line in lines if line not in earlier]
        self._lines[block].update(line for line in new if line.startswith(f"import {_OWN}"))
        span, line = self._source.span(statement), self._source.line(statement)
        is_alone = isinstance(whole, cst.SimpleStatementLine) and len(whole.body) == 1
        if self._source.code(statement) == "\n".join(new):
            return
        if not new and is_alone and len(getattr(block, "body", ())) > 1:
            self._outcome.replace(whole_line(self._source.text, *span), "", line)
            return
        separator = self._source.tree.default_newline + self._source.indentation(statement) if is_alone else "; "
        self._outcome.replace(span, separator.join(new or ["pass"]), line)


def _module_imports(modules: Iterable[str]) -> list[str]:
    """Return the imports for full dotted names; phalanx itself loads its own public modules on first use."""
    compat = sorted(each for each in modules if each.startswith(f"{_OWN}.compat."))
    own = [_OWN] if any(not each.startswith(f"{_OWN}.compat.") for each in modules) else []
    return [f"import {module}" for module in (*own, *compat)]


def _is_module(path: str) -> bool:
    target = counterpart(path)
    return isinstance(target, Target) and target.is_module


def _is_imported(source: Source, name: str, but: Binding) -> bool:
    """Whether another import binds a name."""
    for statement in source.walk(cst.Import, cst.ImportFrom):
        if isinstance(statement.names, cst.ImportStar):
            continue
        for alias in statement.names:
            if bound_name(alias) == name and alias is not but.alias:
                return True
    return False


def _before(source: Source, block: cst.CSTNode, until: cst.CSTNode) -> set[str]:
    """Return the plain imports of phalanx that a block has before one of its statements."""
    found = set()
    for line in getattr(block, "body", ()):
        if line is until:
            break
        for small in getattr(line, "body", ()) if isinstance(line, cst.SimpleStatementLine) else ():
            if isinstance(small, cst.Import) and (text := source.code(small)).startswith(f"import {_OWN}"):
                found.add(text)
    return found
