"""Cuts a Python file into blocks of prose and code, for the annotated pages of docs/build.py."""

import ast
import re
from dataclasses import dataclass, field

BANNER = re.compile(r"^# -{10,} *(.*)")


@dataclass
class Block:
    lines: list = field(default_factory=list)  # numbers of its lines of code
    prose: str = ""
    name: str = ""  # of the function that begins here
    section: str = ""
    marks: str = ""  # comments at the end of code lines, which may contain tags


def docstring(node) -> ast.Expr | None:
    match node.body[0]:
        case ast.Expr(value=ast.Constant(value=str())) as first:
            return first
    return None


def blocks(text: str) -> list[Block]:
    """The file cut where a comment, a documented function or a documented argument begins."""
    lines, tree = text.splitlines(), ast.parse(text)
    said = {}  # line -> its prose
    starts = {}  # line -> the name of the function that begins there
    skip = set()  # lines that are prose
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            doc = docstring(node)
            if doc or node in tree.body:
                starts[first] = node.name if node in tree.body else ""
            if doc:
                said[first] = doc.value.value
                skip |= set(range(doc.lineno, doc.end_lineno + 1))
        if isinstance(node, ast.ClassDef):
            for one, other in zip(node.body, node.body[1:], strict=False):
                if isinstance(one, ast.AnnAssign) and docstring(ast.Module([other], [])):
                    starts[one.lineno], said[one.lineno] = "", other.value.value
                    skip |= set(range(other.lineno, other.end_lineno + 1))
    intro = docstring(tree)
    found = [Block(prose=intro.value.value if intro else "")]
    skip |= set(range(1, intro.end_lineno + 1)) if intro else set()
    talking = False  # the last line was a comment that has a line to itself
    for i, line in enumerate(lines, 1):
        if i in skip:
            continue
        if banner := BANNER.match(line):
            found.append(Block(section=banner[1] or " "))
            talking = False
        elif line.lstrip().startswith("#"):
            if not talking:
                found.append(Block())
            found[-1].prose += line.strip()[1:].removeprefix(" ") + "\n"
            talking = True
        else:
            if i in starts:
                if not (talking or (found[-1].section and not found[-1].lines)):
                    found.append(Block())
                found[-1].name = starts[i]
                found[-1].prose += ("\n" if found[-1].prose else "") + said.get(i, "")
            elif not line.strip() and talking:
                found.append(Block())
            found[-1].lines.append(i)
            found[-1].marks += line.partition("#")[2] + "\n"
            talking = False
    for block in found:
        while block.lines and not lines[block.lines[-1] - 1].strip():
            block.lines.pop()
        while block.lines and not lines[block.lines[0] - 1].strip():
            block.lines.pop(0)
    return [b for b in found if b.lines or b.prose or b.section]
