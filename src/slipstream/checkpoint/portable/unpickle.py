"""A pickle machine that builds plain data and tensors, and can do nothing else.

A pickle is a program. The standard unpickler runs it, and restricting which names it may import is not enough: its
``BUILD`` instruction sets attributes of anything that is on its stack, classes and functions included; its extension
registry returns objects without asking; a memo index of four bytes allocates 64 GB; and the hash of a deeply nested
tuple overflows the C stack. Torch's own ``weights_only`` unpickler keeps the list of allowed names in a global variable
that all threads share.

So this module implements the instructions that ``torch.save`` uses (pickle protocol 2) and refuses all others:

* A name is looked up in a closed table (`slipstream.checkpoint.portable.rebuild`) and never imported. The stack
  contains an inert object in its place. It can be called with arguments, which the constructor behind it checks; it has
  no attributes to set, and it cannot become part of the result.
* ``BUILD`` completes NumPy dtypes and arrays, and sets attributes of an OrderedDict. It refuses everything else.
* Items can be added to lists and dicts only. Keys are plain values, nested to a limited depth.
* Memory is bounded: every instruction and every copy is charged to an allowance.

Nothing here is shared between threads.
"""

from __future__ import annotations

import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from slipstream.checkpoint.portable.inert import (
    IGNORED,
    INERT,
    Allowance,
    Arguments,
    Constructor,
    RefusedNameError,
    Storage,
    Symbol,
    Unfinished,
    require_values,
)
from slipstream.checkpoint.portable.rebuild import NAMES
from slipstream.errors import SlipstreamError

_MAX_NAME_BYTES = 1000
# What an instruction takes: a place on the stack or in the memo, and a small object. This bounds the time as well, to
# 33 million instructions for a file with little content.
_STEP_BYTES = 48
_CONTAINER_BYTES = 64
_ITEM_BYTES = 8
_DICTS = frozenset({dict, OrderedDict, Counter})
# What the constructors of `rebuild` raise for arguments that `torch.save` does not write.
_INVALID = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError, struct.error)

_UINT32 = struct.Struct("<I")
_NUMBERS = {
    pickle.BININT1: struct.Struct("<B"),
    pickle.BININT2: struct.Struct("<H"),
    pickle.BININT: struct.Struct("<i"),
    pickle.BINFLOAT: struct.Struct(">d"),
}
_CONSTANTS: dict[bytes, Any] = {
    pickle.NONE: None,
    pickle.NEWTRUE: True,
    pickle.NEWFALSE: False,
    pickle.EMPTY_TUPLE: (),
}

LoadStorage = Callable[[str, str], torch.UntypedStorage]
"""Returns the memory that a file has under a key; the second argument is the device that it was saved from."""


class Unpickler(Allowance):
    """Runs one pickle.

    Args:
        data: The pickle.
        load_storage: Returns the memory of tensors. Its errors are passed on as they are.
        allowance: How much memory the result may take, in bytes. Tensors are not counted.
    """

    def __init__(self, data: bytes, load_storage: LoadStorage, allowance: int) -> None:
        super().__init__(allowance)
        self._data = data
        self._load_storage = load_storage
        self._position = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []

    def load(self) -> Any:
        """Run the pickle and return its result.

        Raises:
            RefusedNameError: If it needs a name that is not in the table.
            pickle.UnpicklingError: If it is not a pickle that ``torch.save`` writes, or takes too much memory.
        """
        # This loop takes most of the time of a load with many tensors, so it makes few calls.
        while True:
            instruction = self._data[self._position : self._position + 1]
            self._position += 1
            self._left -= _STEP_BYTES
            if self._left < 0 or not instruction:
                self._stop_early()
            if instruction in _CONSTANTS:
                self._stack.append(_CONSTANTS[instruction])
            elif instruction in _NUMBERS:
                self._stack.append(self._number(_NUMBERS[instruction]))
            elif instruction == pickle.STOP:
                return self._pop_result()
            elif instruction == pickle.BINPERSID:
                # Outside of the `try`: a device that is missing says nothing about the pickle.
                self._push_storage()
            else:
                self._run(instruction)

    def _stop_early(self) -> None:
        """Raise that the pickle ends without a result, or that it takes too much memory."""
        self.charge(0)
        raise pickle.UnpicklingError("the pickle is cut off")

    def _run(self, instruction: bytes) -> None:
        if instruction not in self._INSTRUCTIONS:
            raise pickle.UnpicklingError(f"instruction {instruction!r} is not one that torch.save writes")
        try:
            self._INSTRUCTIONS[instruction](self)
        except (pickle.UnpicklingError, SlipstreamError):
            raise
        except _INVALID as error:
            reason = (str(error) or type(error).__name__).splitlines()[0][:200]
            raise pickle.UnpicklingError(f"invalid at byte {self._position}: {reason}") from error

    def _read(self, count: int) -> bytes:
        start = self._position
        self._position = start + count
        content = self._data[start : start + count]
        if len(content) != count:
            raise pickle.UnpicklingError("the pickle is cut off")
        return content

    def _number(self, layout: struct.Struct) -> Any:
        (number,) = layout.unpack(self._read(layout.size))
        return number

    def _line(self) -> str:
        """Read text up to the end of the line."""
        end = self._data.find(b"\n", self._position, self._position + _MAX_NAME_BYTES)
        if end < 0:
            raise pickle.UnpicklingError("a name does not end")
        line = self._data[self._position : end].decode()
        self._position = end + 1
        return line

    def _pop(self) -> Any:
        # Never below the last mark: the items there belong to what was begun before it.
        bottom = 0
        if self._marks:
            bottom = self._marks[-1]
        if len(self._stack) <= bottom:
            raise pickle.UnpicklingError("the stack is empty")
        return self._stack.pop()

    def _pop_items(self) -> list[Any]:
        """Take everything above the last mark."""
        if not self._marks:
            raise pickle.UnpicklingError("there is no mark")
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    def _top(self) -> Any:
        value = self._pop()
        self._stack.append(value)
        return value

    def _push_container(self, value: Any) -> None:
        self.charge(_CONTAINER_BYTES)
        self._stack.append(value)

    def _pop_result(self) -> Any:
        result = self._pop()
        require_values([result])
        return result

    def _push_storage(self) -> None:
        """Replace the id of a storage by the storage."""
        # ("storage", type, key, device, number of elements): the type is inert, so this cannot be a plain tuple.
        parts = self._pop()
        if type(parts) is not Arguments or len(parts) != 5:
            raise pickle.UnpicklingError("a persistent id is not that of a storage")
        kind, storage_type, key, location, _ = parts
        if type(storage_type) is not Symbol or type(storage_type.meaning) is not torch.dtype:
            raise pickle.UnpicklingError("a persistent id is not that of a storage")
        # Check the types first: comparing an array with text does not yield a truth value.
        if type(kind) is not str or type(key) is not str or type(location) is not str or kind != "storage":
            raise pickle.UnpicklingError("a persistent id is not that of a storage")
        self._stack.append(Storage(self._load_storage(key, location), storage_type.meaning))

    # One method per instruction follows.

    def _protocol(self) -> None:
        version = self._read(1)[0]
        if version != 2:
            raise pickle.UnpicklingError(
                f"it has pickle protocol {version}, torch.save writes 2 by default; load_checkpoint(..., "
                "weights_only=False) reads it if you trust its author"
            )

    def _mark(self) -> None:
        self._marks.append(len(self._stack))

    def _short_int(self) -> None:
        self._stack.append(pickle.decode_long(self._read(self._read(1)[0])))

    def _long_int(self) -> None:
        content = self._read(self._number(_UINT32))
        # Python stores 30 bits of an integer in four bytes.
        self.charge(2 * len(content))
        self._stack.append(pickle.decode_long(content))

    def _text(self) -> None:
        self._push_text(self._read(self._number(_UINT32)))

    def _short_python2_text(self) -> None:
        self._push_text(self._read(self._read(1)[0]))

    def _push_text(self, content: bytes) -> None:
        # Text with one character beyond Latin-1 takes two or four bytes for every character.
        width = 1
        if not content.isascii() and np.frombuffer(content, np.uint8).max() > 0xC3:
            width = 4
        self.charge(width * len(content))
        self._stack.append(content.decode("utf-8", "surrogatepass"))

    def _empty_list(self) -> None:
        self._push_container([])

    def _empty_dict(self) -> None:
        self._push_container({})

    def _tuple(self) -> None:
        self._push_tuple(self._pop_items())

    def _tuple1(self) -> None:
        self._push_tuple([self._pop()])

    def _tuple2(self) -> None:
        last = self._pop()
        self._push_tuple([self._pop(), last])

    def _tuple3(self) -> None:
        last = self._pop()
        middle = self._pop()
        self._push_tuple([self._pop(), middle, last])

    def _push_tuple(self, items: list[Any]) -> None:
        self.charge(_ITEM_BYTES * len(items))
        # Arguments of constructors are tuples, too, so that these may contain inert objects.
        if INERT.isdisjoint(map(type, items)):
            self._push_container(tuple(items))
        else:
            self._push_container(Arguments(items))

    def _append(self) -> None:
        self._extend([self._pop()])

    def _appends(self) -> None:
        self._extend(self._pop_items())

    def _extend(self, items: list[Any]) -> None:
        # Inert objects stop here, where they would become part of the result.
        require_values(items)
        target = self._top()
        if type(target) is not list:
            raise pickle.UnpicklingError(f"items are added to a {type(target).__qualname__}")
        self.charge(_ITEM_BYTES * len(items))
        target.extend(items)

    def _set_item(self) -> None:
        value = self._pop()
        self._set_all([self._pop(), value])

    def _set_items(self) -> None:
        self._set_all(self._pop_items())

    def _set_all(self, items: list[Any]) -> None:
        require_values(items)
        target = self._top()
        if type(target) not in _DICTS or len(items) % 2:
            raise pickle.UnpicklingError(f"keys are set on a {type(target).__qualname__}")
        self.charge(_CONTAINER_BYTES * len(items) // 2)
        for position in range(0, len(items), 2):
            self.check_key(items[position])
            target[items[position]] = items[position + 1]

    def _get1(self) -> None:
        self._get(self._read(1)[0])

    def _get4(self) -> None:
        self._get(self._number(_UINT32))

    def _get(self, place: int) -> None:
        if place >= len(self._memo):
            raise pickle.UnpicklingError(f"nothing is in the memo at {place}")
        self._stack.append(self._memo[place])

    def _put1(self) -> None:
        self._put(self._read(1)[0])

    def _put4(self) -> None:
        self._put(self._number(_UINT32))

    def _put(self, place: int) -> None:
        # Picklers number the entries without gaps, so that a list will do. A gap could claim gigabytes.
        if place > len(self._memo):
            raise pickle.UnpicklingError(f"the memo has {len(self._memo)} entries, the next one is put at {place}")
        value = self._top()
        if place == len(self._memo):
            self._memo.append(value)
        else:
            self._memo[place] = value
        if type(value) is Unfinished:
            value.places.append(place)

    def _global(self) -> None:
        # Nothing is imported: what is not in the table does not exist.
        name = f"{self._line()} {self._line()}"
        if name not in NAMES:
            raise RefusedNameError(name.replace(" ", "."))
        self._stack.append(NAMES[name])

    def _reduce(self) -> None:
        # Only what the table returned can be called, never an object that the pickle has built.
        arguments = self._pop()
        constructor = self._pop()
        if type(constructor) is not Constructor or not isinstance(arguments, tuple):
            raise pickle.UnpicklingError(f"a {type(constructor).__qualname__} is called")
        self._push_container(constructor.build(self, *arguments))

    def _new_object(self) -> None:
        # Named tuples are written like this. What a locked TensorDict caches is the only one that is expected.
        self._pop()
        if self._pop() is not IGNORED:
            raise pickle.UnpicklingError("an object is created without a call")
        self._stack.append(None)

    def _build(self) -> None:
        state = self._pop()
        target = self._pop()
        if type(target) is Unfinished:
            value = target.finish(self, state)
            # The memo has the unfinished value, so that later uses would get that one.
            for place in target.places:
                if self._memo[place] is target:
                    self._memo[place] = value
            self._stack.append(value)
            return
        if type(target) is not OrderedDict or type(state) is not dict:
            raise pickle.UnpicklingError(f"attributes are set on a {type(target).__qualname__}")
        for name, value in state.items():
            # An attribute must not hide a method.
            if type(name) is not str or hasattr(OrderedDict, name):
                raise pickle.UnpicklingError(f"an OrderedDict has the attribute {name!r}")
            target.__dict__[name] = value
        self._stack.append(target)

    # What each instruction does. Those that are missing are refused.
    _INSTRUCTIONS: ClassVar[dict[bytes, Callable[[Unpickler], None]]] = {
        pickle.PROTO: _protocol,
        pickle.MARK: _mark,
        pickle.LONG1: _short_int,
        pickle.LONG4: _long_int,
        pickle.BINUNICODE: _text,
        pickle.SHORT_BINSTRING: _short_python2_text,
        pickle.BINSTRING: _text,
        pickle.EMPTY_LIST: _empty_list,
        pickle.EMPTY_DICT: _empty_dict,
        pickle.TUPLE: _tuple,
        pickle.TUPLE1: _tuple1,
        pickle.TUPLE2: _tuple2,
        pickle.TUPLE3: _tuple3,
        pickle.APPEND: _append,
        pickle.APPENDS: _appends,
        pickle.SETITEM: _set_item,
        pickle.SETITEMS: _set_items,
        pickle.BINGET: _get1,
        pickle.LONG_BINGET: _get4,
        pickle.BINPUT: _put1,
        pickle.LONG_BINPUT: _put4,
        pickle.GLOBAL: _global,
        pickle.REDUCE: _reduce,
        pickle.NEWOBJ: _new_object,
        pickle.BUILD: _build,
    }
