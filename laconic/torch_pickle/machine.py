"""Pickle's stack machine with the calls left out: opcodes in, plain data out.

Where pickle would import a name, this machine makes a `Name`, if the name is one that a saved `PowerSGDState`
has; where pickle would call, it makes a `Record` of the call. So there is nothing to restrict: no object of the
running program is ever on the stack. (A `pickle.Unpickler` with a strict `find_class` is weaker. BUILD may
still set attributes of what `find_class` returned, a memo index in five bytes allocates gigabytes, and the hash
of a deep tuple overflows the C stack.)
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, NoReturn

from laconic.torch_pickle.names import ALLOWED

MAX_OPCODES = 2_000_000
"""A checkpoint with a hundred thousand tensors has fewer; each opcode can hold about a hundred bytes."""


class UnsafePickleError(ValueError):
    """The file asks for something that a saved `PowerSGDState` does not need; nothing of it was run."""


@dataclass(frozen=True)
class Name:
    """A name that the file would have had imported."""

    path: str


@dataclass(eq=False)
class Record:
    """A call that the file would have had made: of what, with what, and the state and items it then got."""

    name: str
    args: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Persistent:
    """A reference to something outside the pickle; torch uses them for storages."""

    id: Any


_MARK = object()
_LITERALS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset(
    {
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    }
)
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})


@dataclass(frozen=True)
class Program:
    """What a pickle amounts to: its value, and all the calls and outside references on the way to it."""

    value: Any
    records: tuple[Record, ...]
    references: tuple[Persistent, ...]


def read(source: BytesIO) -> Program:
    """The pickle at `source`'s position, as plain data; `source` then stands after it."""
    machine = _Machine()
    for count, (opcode, argument) in enumerate(_opcodes(source)):
        if count > MAX_OPCODES:
            damaged(f"more than {MAX_OPCODES} opcodes")
        machine.step(opcode, argument)
    return Program(machine.result(), tuple(machine.records), tuple(machine.references))


def damaged(what: str) -> NoReturn:
    """Raise the error for a file that is not what it should be."""
    raise ValueError(
        f"the pickle is damaged, or is no saved PowerSGDState: {what}. "
        "A file made by torch.save(state) or pickle.dump(state) is needed; was this one copied whole?"
    )


def as_bytes(value: Any) -> bytes:
    """Bytes that a pickle holds; before protocol 3 they travel as `_codecs.encode(text, "latin1")`."""
    if isinstance(value, Record) and value.name == "_codecs.encode" and value.args[1:] == ("latin1",):
        text = value.args[0]
        value = text.encode("latin1", errors="replace") if isinstance(text, str) else None
    if not isinstance(value, bytes):
        damaged("it has something else where bytes should be")
    return value


def _opcodes(source: BytesIO) -> Iterator[tuple[str, Any]]:
    """Each opcode's name and argument, to the end of the pickle; one that no state uses is not even decoded."""
    name = ""
    while name != "STOP":
        code = source.read(1).decode("latin1")
        if not code:
            damaged("it ends before its end")
        opcode = _OPCODES.get(code)
        if opcode is None or opcode.name not in _KNOWN:
            raise UnsafePickleError(
                f"the file has the pickle opcode {opcode.name if opcode else code!r}, which no saved PowerSGDState "
                "has: refused, nothing was run. Save the state again with torch.save(state)."
            )
        name = opcode.name
        yield name, _argument(opcode, source)


def _argument(opcode: pickletools.OpcodeInfo, source: BytesIO) -> Any:
    if opcode.arg is None:
        return None
    try:
        if opcode.name == "GLOBAL":  # `pickletools` would treat backslashes in it as escapes, which pickle does not
            return tuple(source.readline().decode().removesuffix("\n") for _ in range(2))
        return opcode.arg.reader(source)
    except (ValueError, OverflowError, IndexError) as error:
        damaged(str(error)[:200])


class _Machine:
    """The stack, the memo, and one method for each kind of opcode."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.records: list[Record] = []
        self.references: list[Persistent] = []

    def result(self) -> Any:
        if len(self.stack) != 1:
            damaged(f"{len(self.stack)} values are left at its end instead of one")
        return self.pop()

    def step(self, opcode: str, argument: Any) -> None:
        """Do one opcode of `_KNOWN`; PROTO, FRAME and STOP leave the stack as it is."""
        if opcode in _VALUES:
            self.stack.append(bytes(argument) if isinstance(argument, bytearray) else argument)
        elif opcode in _LITERALS:
            self.stack.append(_LITERALS[opcode])
        elif opcode in _EMPTY:
            self.stack.append(_EMPTY[opcode]())
        elif opcode in _TUPLES:
            self.stack.append(tuple(reversed([self.pop() for _ in range(_TUPLES[opcode])])))
        elif opcode in _PUTS:
            self.memo[argument] = self.top()
        elif opcode in _GETS:
            self.stack.append(self.remembered(argument))
        elif opcode in _STEPS:
            _STEPS[opcode](self, argument)

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            damaged("it takes a value that is not there")
        return self.stack.pop()

    def top(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            damaged("it names a value that is not there")
        return self.stack[-1]

    def remembered(self, index: int) -> Any:
        if index not in self.memo:
            damaged(f"it recalls value {index}, which it never stored")
        return self.memo[index]

    def since_mark(self) -> list[Any]:
        values: list[Any] = []
        while self.stack and self.stack[-1] is not _MARK:
            values.append(self.stack.pop())
        if not self.stack:
            damaged("a mark is missing")
        self.stack.pop()
        return values[::-1]

    def mark(self, _: Any) -> None:
        self.stack.append(_MARK)

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.top()

    def append(self, values: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, list):
            damaged("it appends to something that is no list")
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.top()
        target = target.items if isinstance(target, Record) else target
        if not isinstance(target, dict) or len(values) % 2:
            damaged("it sets items of something that is no dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            # A tuple as a key could be nested deeply enough for its hash to overflow the C stack.
            if not isinstance(key, int | str | float | None):
                damaged(f"a dict has a key of type {type(key).__name__}")
            target[key] = value

    def make_dict(self, _: Any) -> None:
        values = self.since_mark()
        self.stack.append({})
        self.set_items(values)

    def name(self, module: str, attribute: str) -> None:
        path = f"{module}.{attribute}"
        if path not in ALLOWED:
            raise UnsafePickleError(
                f"the file names {path[:200]!r}, which no saved PowerSGDState needs: refused, nothing was "
                "run. Save the state by itself, torch.save(state), or with plain tensors and numbers around it."
            )
        self.stack.append(Name(path))

    def stack_global(self, _: Any) -> None:
        attribute, module = self.pop(), self.pop()
        if not isinstance(module, str) or not isinstance(attribute, str):
            damaged("a name is not text")
        self.name(module, attribute)

    def call(self, _: Any) -> None:
        args, called = self.pop(), self.pop()
        if not isinstance(called, Name) or not isinstance(args, tuple):
            raise UnsafePickleError(
                f"the file calls a {type(called).__name__}: refused, nothing was run. A saved PowerSGDState "
                "only calls torch's and numpy's constructors: save it again with torch.save(state)."
            )
        self.records.append(_record(called.path, args))
        self.stack.append(self.records[-1])

    def refer(self, _: Any) -> None:
        self.references.append(Persistent(self.pop()))
        self.stack.append(self.references[-1])

    def build(self, _: Any) -> None:
        state, target = self.pop(), self.top()
        if not isinstance(target, Record):
            raise UnsafePickleError(
                f"the file sets the state of a {type(target).__name__}: refused, nothing was run. A saved "
                "PowerSGDState only sets that of its own objects: save it again with torch.save(state)."
            )
        target.state = state


def _record(path: str, args: tuple[Any, ...]) -> Record:
    """Protocols 0 and 1 make an object by `copyreg._reconstructor(class, object, None)`."""
    if path.endswith("._reconstructor"):
        if len(args) != 3 or not isinstance(args[0], Name):
            damaged("copyreg._reconstructor is given something that is no class")
        return Record(args[0].path, ())
    return Record(path, args)


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.since_mark())),
    "LIST": lambda machine, _: machine.stack.append(machine.since_mark()),
    "DICT": _Machine.make_dict,
    "MEMOIZE": _Machine.memoize,
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "GLOBAL": lambda machine, argument: machine.name(*argument),
    "STACK_GLOBAL": _Machine.stack_global,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.refer,
}
_KNOWN = frozenset({"PROTO", "FRAME", "STOP", *_VALUES, *_LITERALS, *_EMPTY, *_TUPLES, *_PUTS, *_GETS, *_STEPS})
_OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}
