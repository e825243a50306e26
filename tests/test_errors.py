"""`naming`: errors say which file they are about, once."""

import pytest

from slipstream.errors import (
    CodecError,
    CorruptFileError,
    MissingEntryError,
    SlipstreamError,
    WriteError,
    naming,
)


def raise_named(path: object, error: BaseException) -> BaseException:
    """Raise an error inside `naming` and return what comes out."""
    with pytest.raises(type(error)) as caught, naming(path):  # type: ignore[arg-type]
        raise error
    return caught.value


@pytest.mark.parametrize("kind", [CorruptFileError, MissingEntryError, CodecError, SlipstreamError])
def test_the_file_is_named_and_the_error_stays_the_same_object(tmp_path, kind):
    error = kind("chunk 3 is damaged")
    found = raise_named(tmp_path / "a.slip", error)
    assert found is error
    assert type(found) is kind
    assert str(found) == f"{tmp_path}/a.slip: chunk 3 is damaged"


def test_the_cause_of_an_error_is_kept():
    cause = KeyError("codec")
    error = CorruptFileError("invalid index")
    error.__cause__ = cause
    assert raise_named("a.slip", error).__cause__ is cause


@pytest.mark.parametrize(
    "message", ["runs: is not a folder", "runs/a.slip: is empty", "runs is locked", "runs"], ids=str
)
def test_a_file_is_not_named_twice(message):
    assert str(raise_named("runs", CorruptFileError(message))) == message


def test_nested_blocks_name_a_file_once_and_its_folder_not_at_all():
    with pytest.raises(CorruptFileError, match=r"^replay/part\.slip: is empty$"), naming("replay"):  # noqa: SIM117
        with naming("replay/part.slip"), naming("replay/part.slip"):
            raise CorruptFileError("is empty")


def test_a_file_whose_name_begins_alike_is_another_file():
    assert str(raise_named("a.slip", CorruptFileError("a.slip2: is empty"))) == "a.slip: a.slip2: is empty"


def test_errors_that_name_their_file_already_and_errors_of_other_libraries_are_left_alone():
    write = WriteError(28, "cannot write /data/a.slip: No space left on device")
    assert str(raise_named("a.slip", write)) == "cannot write /data/a.slip: No space left on device"
    missing = FileNotFoundError(2, "No such file or directory", "b.slip")
    assert str(raise_named("a.slip", missing)) == "[Errno 2] No such file or directory: 'b.slip'"
    assert str(raise_named("a.slip", ZeroDivisionError("division"))) == "division"


def test_a_block_without_errors_changes_nothing():
    with naming("a.slip"):
        pass
