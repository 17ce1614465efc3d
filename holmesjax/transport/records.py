"""The messages of processes are typed records: the one codec that turns either into the other.

A message on the wire is a JSON object: the fields of a record, and its `kind`. `decode` refuses an
unknown kind, a missing or unknown field, and a value of another type, each by its name. The length
of a message is checked before its bytes are read (`connections`). No JAX.
"""

import functools
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

from pydantic import (
    ConfigDict,
    GetCoreSchemaHandler,
    PlainValidator,
    Strict,
    TypeAdapter,
    ValidationError,
)

Message = dict[str, Any]
Endpoint = Annotated[tuple[str, int], Strict(False)]  # address and port; JSON makes it a list
R = TypeVar("R", bound="Record")


@dataclass(frozen=True, kw_only=True)
class Record:
    """A message; each kind is a class of its own. A field may be a record too."""

    kind: ClassVar[str]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """The check of a field that is a record: its message becomes the record."""
        check = PlainValidator(functools.partial(_decode_field, cls))
        return handler.generate_schema(Annotated[Any, check])


def encode(record: Record) -> Message:
    """Returns the message of a record."""
    values = {field.name: _plain(getattr(record, field.name)) for field in fields(record)}
    return {"kind": record.kind, **values}


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return encode(value)
    if isinstance(value, list) and value and isinstance(value[0], Record):
        return [encode(one) for one in value]
    return value


def by_kind(*records: type[Record]) -> dict[str, type[Record]]:
    """Returns the records that one end may send, by kind."""
    found = {record.kind: record for record in records}
    assert len(found) == len(records), f"two of {records} are of one kind"
    return found


def decode(message: Mapping[str, Any], kinds: Mapping[str, type[Record]]) -> Record:
    """Returns the record of a message.

    Args:
      message: as it was received.
      kinds: the records that the other end may send, by kind.

    Raises:
      ValueError: the kind is unknown, or a field is missing, unknown or of another type.
    """
    kind = message.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"a message of unknown kind {kind!r}")
    return make(kinds[kind], {name: message[name] for name in message if name != "kind"})


def decode_as(message: Mapping[str, Any], record: type[R]) -> R:
    """Returns the record of a message that must be of one kind; raises ValueError as `decode`."""
    found = decode(message, {record.kind: record})
    assert isinstance(found, record), found
    return found


def make(record: type[R], values: Mapping[str, Any]) -> R:
    """Returns a record with these values of its fields; raises ValueError as `decode` does."""
    checks = _checks(record)
    if unknown := values.keys() - checks.keys():
        raise ValueError(f"a message {record.kind} with an unknown field {min(unknown)!r}")
    checked = {}
    for name, value in values.items():
        try:
            checked[name] = checks[name].validate_python(value)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise ValueError(f"a message {record.kind} whose {name} is wrong: {problem}") from None
    try:
        return record(**checked)
    except TypeError:
        missing = [one.name for one in fields(record) if _is_missing(one, values)]
        raise ValueError(f"a message {record.kind} without {' and '.join(missing)}") from None


_CHECKS: dict[type[Record], dict[str, TypeAdapter[Any]]] = {}


def _checks(record: type[Record]) -> dict[str, TypeAdapter[Any]]:
    """The checks of a record's fields, by name; made once."""
    if record not in _CHECKS:
        hints, strict = get_type_hints(record, include_extras=True), ConfigDict(strict=True)
        _CHECKS[record] = {
            field.name: TypeAdapter(hints[field.name], config=_config(hints[field.name], strict))
            for field in fields(record)
        }
    return _CHECKS[record]


def _config(hint: Any, config: ConfigDict) -> ConfigDict | None:
    """A record checks itself, and pydantic takes no configuration for it."""
    return None if isinstance(hint, type) and issubclass(hint, Record) else config


def _decode_field(record: type[R], value: Any) -> R:
    if isinstance(value, record):  # made here, and not yet sent
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"no message {record.kind}")
    return decode_as(value, record)


def _is_missing(field: Field[Any], values: Mapping[str, Any]) -> bool:
    return field.default is MISSING and field.name not in values
